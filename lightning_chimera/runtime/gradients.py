"""Gradients between the copies of a stage: summed over replicas, pipes and tied ends, with one norm over all stages."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain, compress
from operator import itemgetter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_chimera.partition.ownership import Ownership, Ranks
from lightning_chimera.partition.placeholder import Placeholder, PlaceholderGradient
from lightning_chimera.runtime.buckets import Bucket, Gradients
from lightning_chimera.timeline import SyncSpan


class GradientSync:
    """Sums the gradients of parameters that several ranks hold, in flat buckets.

    The losses of the microbatches are weighted so that the sum over all of them is the batch's loss; so gradients are
    summed, never averaged, and a tied table gets the sum of both ends like any copy.

    There is one bucket for each set of holders and type, and further ones for the stages whose sums start within the
    schedule. A parameter that several stages use, as a tied table, is in none of those: it is not complete before
    the last of its stages.

    **Order.** All ranks start their buckets in one order: first those of the stages in ``order``, as each comes to
    them, then all others, at the end of its row. A bucket that is ready early waits for the start of those before it.
    So ranks that share several groups start the sums of all of them alike, as NCCL needs, and the sums of a group
    match. Nothing waits for a sum to end but ``reduce``; ``sync_order`` proves that all might.

    Args:
        ownership: Who holds what.
        groups: A process group for each set of holders.
        order: The stages whose sums start within the schedule.
    """

    def __init__(self, ownership: Ownership, groups: Mapping[Ranks, ProcessGroup], order: Sequence[int] = ()) -> None:
        self._ownership = ownership
        self._groups = groups
        self._order = tuple(order)
        self._shared = [parameter for parameter in ownership.held() if len(ownership.holders[parameter]) > 1]
        self._trained: list[bool] = []
        self._slots: list[list[Bucket]] = []
        """The buckets of each stage in the order, and behind them all others."""
        self._num_started = 0
        self._earlier: Gradients = {}
        self.is_early = True
        """Whether sums may start before ``reduce``."""
        self.wait = 0.0
        """Seconds that the last ``reduce`` has waited for sums to end."""
        self.spans: list[SyncSpan] = []
        """When the last sums ran, in seconds of ``perf_counter``. The end is when this rank saw it, between actions."""

    def begin(self, earlier: Gradients) -> None:
        """Lets sums start while a step runs, whose gradients are final with it.

        Args:
            earlier: Gradients of the batches before that belong to the same optimizer step.
        """
        self._bucketize()
        self._earlier = earlier

    def start(self, count: int | None = None) -> None:
        """Starts the sums of the first stages in the order, or all; those that were started before go on.

        Args:
            count: Number of stages in the order; all buckets by default.
        """
        for slot in self._slots[: self._num_started]:
            for bucket in slot:
                bucket.look()
        for slot in self._slots[self._num_started : len(self._slots) if count is None else count]:
            for bucket in slot:
                bucket.start(self._earlier)
            self._num_started += 1

    @property
    def under_way(self) -> set[nn.Parameter]:
        """The parameters whose sums were started."""
        return {
            parameter for slot in self._slots[: self._num_started] for bucket in slot for parameter in bucket.parameters
        }

    def give_up(self) -> None:
        """Waits for the sums that were started, since their gradients were not final; every holder must call it."""
        for bucket in chain.from_iterable(self._slots[: self._num_started]):
            bucket.give_up()
        self._num_started, self._earlier = 0, {}

    def reduce(self) -> None:
        """Ends all sums, and starts before what was not. Every holder of a set must call it.

        Afterwards all of them have bitwise equal gradients.
        """
        if not self._num_started:
            self.begin({})
        self.start()
        buckets = list(chain.from_iterable(self._slots))
        self.wait = sum(bucket.hand_out() for bucket in buckets)
        self.spans = [bucket.span for bucket in buckets]
        self._num_started, self._earlier = 0, {}

    def release(self) -> None:
        """Lets go of the buffers; the next sums make new ones."""
        self._slots, self._trained, self._earlier = [], [], {}
        self._num_started = 0

    def _bucketize(self) -> None:
        """Makes the buckets anew if other parameters are trained than before."""
        trained = [parameter.requires_grad for parameter in self._shared]
        if trained == self._trained:
            return
        self._trained = trained
        found: dict[tuple[int, Ranks, str], list[nn.Parameter]] = {}
        for parameter in compress(self._shared, trained):
            key = self._slot_of(parameter), self._ownership.holders[parameter], str(parameter.dtype)
            found.setdefault(key, []).append(parameter)
        self._slots = [[] for _ in range(len(self._order) + 1)]
        for (slot, ranks, _), parameters in sorted(found.items(), key=itemgetter(0)):
            stages = sorted(set().union(*map(self._ownership.stages.__getitem__, parameters)))
            self._slots[slot].append(Bucket(parameters, ranks, stages, self._groups[ranks]))

    def _slot_of(self, parameter: nn.Parameter) -> int:
        stages = self._ownership.stages[parameter]
        alone = next(iter(stages)) if len(stages) == 1 else None
        return self._order.index(alone) if alone in self._order else len(self._order)


class PlaceholderGradients:
    """Says on every rank which parameters elsewhere have a gradient, in ``.grad`` of their placeholders.

    Args:
        ownership: Who holds what.
    """

    def __init__(self, ownership: Ownership) -> None:
        self._parameters = list(ownership.holders)
        self._placeholders = [parameter for parameter in self._parameters if isinstance(parameter, Placeholder)]
        self._hidden: list[tuple[Placeholder, Tensor]] = []

    def put(self, present: Iterable[int]) -> None:
        """Gives gradients to placeholders, and zeros to a copy here that none of this rank's microbatches has used.

        Args:
            present: The parameters with a gradient on any rank, by their places in the module.
        """
        for parameter in (self._parameters[index] for index in present):
            if parameter.grad is None and isinstance(parameter, Placeholder):
                parameter.grad = PlaceholderGradient(parameter)
            elif parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def hide(self) -> None:
        """Takes them away from the optimizer's step, which uses every gradient that it sees."""
        self._hidden += self._take()

    def show(self) -> None:
        """Puts back what was hidden."""
        for placeholder, gradient in self._hidden:
            placeholder.grad = gradient
        self._hidden = []

    @contextmanager
    def hidden(self) -> Iterator[None]:
        """Takes them away for a while, if they are there."""
        taken = self._take()
        yield
        for placeholder, gradient in taken:
            placeholder.grad = gradient

    def _take(self) -> list[tuple[Placeholder, Tensor]]:
        taken = [(placeholder, placeholder.grad) for placeholder in self._placeholders if placeholder.grad is not None]
        for placeholder, _ in taken:
            placeholder.grad = None
        return taken


def check_norm_type(norm_type: float | str) -> float:
    """The order of a norm.

    Raises:
        ValueError: It is not positive.
    """
    order = float(norm_type)
    if not order > 0:
        raise ValueError(f"norm_type={norm_type!r}: it must be a positive number, or 'inf' for the largest entry.")
    return order


def total_norm(
    parameters: Iterable[nn.Parameter], ownership: Ownership, group: ProcessGroup, norm_type: float = 2.0
) -> Tensor:
    """Norm of the gradients of the whole model, each parameter counted once, bitwise equal on all ranks.

    Args:
        parameters: The parameters to look at; those without a gradient on this rank count elsewhere or not at all.
        ownership: Who counts what.
        group: All ranks, on the CPU.
        norm_type: The order of the norm.
    """
    own = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and ownership.owner(parameter) == ownership.rank
    ]
    norm = torch.zeros((), dtype=torch.float64)
    if own:
        norm = torch.linalg.vector_norm(_norms(own, norm_type), norm_type)
    # Gathered, not summed: any order of the norm is computed alike, and a rank's NaN is never lost in a maximum.
    gathered = [torch.zeros_like(norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, norm, group=group)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(gathered), norm_type)
    return whole


def _norms(gradients: list[Tensor], norm_type: float) -> Tensor:
    """The norm of each gradient in double precision on the CPU, read from the device once."""
    if not gradients:
        return torch.zeros(0, dtype=torch.float64)
    dense = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    return torch.stack(torch._foreach_norm(dense, norm_type)).double().cpu()


def parameter_norms(
    named: Mapping[str, nn.Parameter], ownership: Ownership, group: ProcessGroup, norm_type: float
) -> dict[str, Tensor]:
    """Norm of each parameter's gradient, where there is one, bitwise equal on all ranks."""
    own = [
        (index, parameter.grad)
        for index, parameter in enumerate(named.values())
        if parameter.grad is not None and ownership.owner(parameter) == ownership.rank
    ]
    norms = torch.zeros(len(named), dtype=torch.float64)
    norms[[index for index, _ in own]] = _norms([gradient for _, gradient in own], norm_type)
    dist.all_reduce(norms, group=group)  # every place but the owner's is zero
    return {
        name: norm.to(parameter.dtype)
        for (name, parameter), norm in zip(named.items(), norms, strict=True)
        if parameter.grad is not None
    }


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    ownership: Ownership,
    group: ProcessGroup,
    norm_type: float = 2.0,
    *,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scales all gradients by one factor so that the norm of the whole model's gradient is at most ``max_norm``.

    Returns:
        The norm before.

    Raises:
        RuntimeError: It is not finite, and that was not to be.
    """
    chosen = [parameter for parameter in parameters if parameter.grad is not None and not parameter.is_meta]
    norm = total_norm(chosen, ownership, group, norm_type)
    if error_if_nonfinite and not norm.isfinite():
        raise RuntimeError(
            f"The norm of order {norm_type} of the whole model's gradient is {float(norm)}: no gradient can be clipped"
            " by it. With error_if_nonfinite=False gradients are scaled by it all the same."
        )
    nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
    return norm


Unscale = Callable[[torch.optim.Optimizer, Tensor, Tensor, bool], dict[torch.device, Tensor]]
"""How a scaler divides gradients, and says of each device whether they overflow: its ``_unscale_grads_``."""


def sharing_overflow(scaler: torch.amp.GradScaler, absent: PlaceholderGradients, group: ProcessGroup) -> Unscale:
    """Has a loss's scaler on every rank skip a step, and lower its scale, if any rank's gradients overflow.

    Args:
        scaler: The scaler.
        absent: What it must not try to unscale.
        group: All ranks, on the CPU.

    Returns:
        What is to be put in front of its own.
    """
    unscale = scaler._unscale_grads_

    def unscale_and_share(
        optimizer: torch.optim.Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        with absent.hidden():
            found = unscale(optimizer, inv_scale, found_inf, allow_fp16)
        anywhere = torch.tensor(max((float(flag) for flag in found.values()), default=0.0))
        dist.all_reduce(anywhere, op=dist.ReduceOp.MAX, group=group)
        # Also on a rank that has no gradients at all, where torch would miss its own check.
        return {found_inf.device: anywhere.to(found_inf.device)}

    return unscale_and_share
