"""Gradients between the copies of a stage: summed over replicas, pipes and tied ends, with one norm over all stages."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_chimera.partition.ownership import Ownership, Ranks


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


def total_norm(parameters: Iterable[nn.Parameter], ownership: Ownership, group: ProcessGroup) -> Tensor:
    """Norm of the gradients of the whole model, each parameter counted once, bitwise equal on all ranks.

    Args:
        parameters: The parameters to look at; those without a gradient on this rank count elsewhere or not at all.
        ownership: Who counts what.
        group: All ranks, on the CPU.
    """
    own = [
        parameter.grad
        for parameter in parameters
        if parameter.grad is not None and ownership.owner(parameter) == ownership.rank
    ]
    squares = torch.zeros((), dtype=torch.float64)
    if own:
        norms = torch.stack([torch.linalg.vector_norm(gradient) for gradient in own])
        squares = norms.double().square().sum().cpu()
    dist.all_reduce(squares, group=group)
    return squares.sqrt()


@contextmanager
def one_scale(parameters: Sequence[nn.Parameter], group: ProcessGroup) -> Iterator[None]:
    """Watches over code that may scale gradients, such as a user's own clipping; every rank must enter it.

    Args:
        parameters: The parameters on this rank.
        group: All ranks, on the CPU.

    Raises:
        RuntimeError: Afterwards, if ranks have scaled their gradients by different factors. What is no scaling, such as
            clipping by value, passes.
    """
    before = _norms(parameters)
    yield
    ratios = _norms(parameters)[before > 0] / before[before > 0]
    is_scaling = len(ratios) == 0 or bool((ratios.max() - ratios.min()) <= 1e-5 * ratios.max())
    # The largest and the smallest factor of all ranks; a rank without gradients has no say.
    factor = float(ratios.mean()) if len(ratios) else 1.0
    bounds = torch.tensor([factor, -factor, 0.0 if is_scaling else 1.0], dtype=torch.float64)
    if len(ratios) == 0:
        bounds[:2] = -torch.inf
    dist.all_reduce(bounds, op=dist.ReduceOp.MAX, group=group)
    largest, smallest, is_other = bounds[0], -bounds[1], bool(bounds[2])
    if not is_other and largest - smallest > 1e-5 * largest:
        raise RuntimeError(
            f"configure_gradient_clipping has scaled the gradients of different ranks by different factors, from"
            f" {float(smallest):.4g} to {float(largest):.4g}: it saw the norm of one rank's parameters only. Call"
            " self.clip_gradients(optimizer, gradient_clip_val=..., gradient_clip_algorithm='norm'), which clips by the"
            " norm of the whole model."
        )


def _norms(parameters: Sequence[nn.Parameter]) -> Tensor:
    """Norm of each gradient, 0 where there is none."""
    norms = [0.0 if p.grad is None else float(torch.linalg.vector_norm(p.grad)) for p in parameters]
    return torch.tensor(norms, dtype=torch.float64)


def clip_by_norm(
    parameters: Iterable[nn.Parameter],
    max_norm: float,
    ownership: Ownership,
    group: ProcessGroup,
) -> Tensor:
    """Scales all gradients by one factor so that the norm of the whole model's gradient is at most ``max_norm``.

    Returns:
        The norm before.
    """
    chosen = [parameter for parameter in parameters if parameter.grad is not None]
    norm = total_norm(chosen, ownership, group)
    nn.utils.clip_grads_with_norm_(chosen, max_norm, norm)
    return norm
