"""Gradients between the copies of a stage: summed over replicas, pipes and tied ends, with one norm over all stages."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_chimera.partition.ownership import Ownership, Ranks
from lightning_chimera.partition.placeholder import Placeholder, PlaceholderGradient


class GradientSync:
    """Sums the gradients of parameters that several ranks hold, in one flat bucket per set of holders and type.

    The losses of the microbatches are weighted so that the sum over all of them is the batch's loss; so gradients are
    summed, never averaged, and a tied table gets the sum of both ends like any copy.

    Args:
        ownership: Who holds what.
        groups: A process group for each set of holders.
    """

    def __init__(self, ownership: Ownership, groups: Mapping[Ranks, ProcessGroup]) -> None:
        self._ownership = ownership
        self._groups = groups

    def reduce(self) -> None:
        """Sums now. Every holder of a set must call it; afterwards all of them have bitwise equal gradients."""
        buckets: dict[tuple[Ranks, torch.dtype], list[nn.Parameter]] = {}
        for parameter in self._ownership.held():
            ranks = self._ownership.holders[parameter]
            if parameter.requires_grad and len(ranks) > 1:
                buckets.setdefault((ranks, parameter.dtype), []).append(parameter)
        # Sorted, so that ranks which share several sets reduce them in one order, as NCCL needs.
        pending = [
            (parameters, *self._start(self._groups[ranks], parameters))
            for (ranks, _), parameters in sorted(buckets.items(), key=lambda item: (item[0][0], str(item[0][1])))
        ]
        for parameters, flat, work in pending:
            work.wait()
            self._finish(parameters, flat)

    @staticmethod
    def _start(group: ProcessGroup, parameters: list[nn.Parameter]) -> tuple[Tensor, dist.Work]:
        """Starts the sum of a bucket: the gradients, and behind them one number each that says whether there is one."""
        zero = parameters[0].new_zeros(1)
        pieces = [
            zero.expand(parameter.numel()) if parameter.grad is None else parameter.grad.reshape(-1)
            for parameter in parameters
        ]
        present = parameters[0].new_tensor([parameter.grad is not None for parameter in parameters])
        flat = torch.cat([*pieces, present])
        work = dist.all_reduce(flat, group=group, async_op=True)
        assert work is not None
        return flat, work

    @staticmethod
    def _finish(parameters: list[nn.Parameter], flat: Tensor) -> None:
        """Hands the sums out; a parameter that no holder has used keeps no gradient, so nothing decays it."""
        *sums, present = torch.split(flat, [*(parameter.numel() for parameter in parameters), len(parameters)])
        for parameter, total, count in zip(parameters, sums, present.tolist(), strict=True):
            parameter.grad = total.view_as(parameter) if count else None


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
        norms = torch.stack([torch.linalg.vector_norm(gradient, norm_type) for gradient in own])
        norm = torch.linalg.vector_norm(norms.double(), norm_type).cpu()
    # Gathered, not summed: any order of the norm is computed alike, and a rank's NaN is never lost in a maximum.
    gathered = [torch.zeros_like(norm) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, norm, group=group)
    whole: Tensor = torch.linalg.vector_norm(torch.stack(gathered), norm_type)
    return whole


def parameter_norms(
    named: Mapping[str, nn.Parameter], ownership: Ownership, group: ProcessGroup, norm_type: float
) -> dict[str, Tensor]:
    """Norm of each parameter's gradient, where there is one, bitwise equal on all ranks."""
    norms = torch.zeros(len(named), dtype=torch.float64)
    for index, parameter in enumerate(named.values()):
        if parameter.grad is not None and ownership.owner(parameter) == ownership.rank:
            norms[index] = parameter.grad.norm(norm_type)
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


def share_overflow(scaler: torch.amp.GradScaler, absent: PlaceholderGradients, group: ProcessGroup) -> None:
    """Makes a loss's scaler on every rank skip a step, and lower its scale, if any rank's gradients overflow.

    The scaler stays the user's own object: it is asked for its state under the name of Lightning's plugin.

    Args:
        scaler: The scaler.
        absent: What it must not try to unscale.
        group: All ranks, on the CPU.
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

    scaler.__dict__["_unscale_grads_"] = unscale_and_share
