"""Flat buckets: the gradients of some parameters in one buffer, with which their holders sum them at once."""

from collections.abc import Mapping, Sequence
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from lightning_chimera.timeline import SyncSpan

Gradients = Mapping[nn.Parameter, Tensor | None]


class Bucket:
    """Parameters of one type that the same ranks hold.

    On the CPU the buffer is kept from step to step, since fresh pages cost more than filling them; on a device torch's
    allocator keeps it. Sums are copied from it to the parameters' own gradients, so nothing else ever sees it: those of
    the last step stay whole until ``zero_grad``, which Lightning calls when the next sums may be under way.

    Args:
        parameters: The parameters, in the order in which all holders have them.
        ranks: The global ranks that hold them.
        stages: The stages that use them.
        group: The process group of the holders.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], ranks: tuple[int, ...], stages: Sequence[int], group: ProcessGroup
    ) -> None:
        self.parameters = tuple(parameters)
        self.ranks = ranks
        self.stages = tuple(stages)
        self._group = group
        self._sizes = [parameter.numel() for parameter in parameters]
        self._kept: Tensor | None = None
        self._kept_parts: list[Tensor] = []
        self._flat: Tensor | None = None
        self._work: dist.Work | None = None
        self._times: tuple[float, float | None] = (0.0, None)

    def start(self, earlier: Gradients) -> None:
        """Starts to sum the gradients in place.

        Args:
            earlier: Gradients of batches before, that are part of the sum.
        """
        assert self._work is None
        self._times = perf_counter(), None
        zero = self.parameters[0].new_zeros(1)
        pieces = [_either(parameter.grad, earlier.get(parameter)) for parameter in self.parameters]
        flat = [
            zero.expand(parameter.numel()) if piece is None else piece.reshape(-1)
            for parameter, piece in zip(self.parameters, pieces, strict=True)
        ]
        self._flat = torch.cat(flat, out=self._buffer())
        if earlier:
            for parameter, part in zip(self.parameters, self._parts(), strict=True):
                gradient, more = parameter.grad, earlier.get(parameter)
                if gradient is not None and more is not None:
                    part.add_(more)
        self._work = dist.all_reduce(self._flat, group=self._group, async_op=True)

    def look(self) -> None:
        """Notes the time if the sum has ended."""
        start, end = self._times
        if end is None and self._work is not None and self._work.is_completed():
            self._times = start, perf_counter()

    @property
    def span(self) -> SyncSpan:
        """When the last sum ran, as this rank saw it."""
        start, end = self._times
        return SyncSpan(self.stages, (), start, start if end is None else end)

    def give_up(self) -> None:
        """Waits for a sum that is not wanted."""
        self._wait()
        self._flat = self._work = None

    def hand_out(self) -> float:
        """Waits for the sum and puts it in the place of the gradients that are there.

        They are the same on all holders by now, since ``PlaceholderGradients.put`` has given zeros to what only others
        have used: so nothing about it has to travel with a sum that may start before that, nor be read from a device.

        Returns:
            The seconds that it has waited.
        """
        waited = self._wait()
        assert self._flat is not None
        taken = [
            (parameter.grad, total)
            for parameter, total in zip(self.parameters, self._parts(), strict=True)
            if parameter.grad is not None
        ]
        if taken:
            gradients, totals = zip(*taken, strict=True)
            torch._foreach_copy_(gradients, totals)
        self._flat = self._work = None
        return waited

    def _wait(self) -> float:
        """Waits for the sum to end; returns for how long."""
        assert self._work is not None
        self.look()
        before = perf_counter()
        self._work.wait()
        after = perf_counter()
        start, end = self._times
        self._times = start, after if end is None else end
        return after - before

    def _buffer(self) -> Tensor:
        like = self.parameters[0]
        if self._kept is not None:
            return self._kept
        buffer = torch.empty(sum(self._sizes), dtype=like.dtype, device=like.device)
        if like.device.type == "cpu":
            self._kept = buffer
        return buffer

    def _parts(self) -> list[Tensor]:
        """The place of each parameter in the buffer, in its shape."""
        assert self._flat is not None
        if self._flat is self._kept and self._kept_parts:
            return self._kept_parts
        pieces = torch.split(self._flat, self._sizes)
        parts = [piece.view(parameter.shape) for piece, parameter in zip(pieces, self.parameters, strict=True)]
        if self._flat is self._kept:
            self._kept_parts = parts
        return parts


def _either(first: Tensor | None, second: Tensor | None) -> Tensor | None:
    return second if first is None else first
