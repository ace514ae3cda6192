"""What a process holds for training: states of parameters, and activations that autograd keeps."""

from collections import Counter
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, which may be a part."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def state_bytes(parameters: Iterable[nn.Parameter], optimizer: torch.optim.Optimizer) -> int:
    """Bytes of parameters, gradients and what the optimizer keeps for each of them, on this process."""
    held = [parameter for parameter in parameters if not parameter.is_meta]
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    kept = [
        value
        for parameter in held
        for value in optimizer.state.get(parameter, {}).values()
        if isinstance(value, Tensor) and value.dim()
    ]
    return sum(local(tensor).nbytes for tensor in (*held, *gradients, *kept))


class SavedForBackward:
    """Counts the bytes of activations that autograd keeps, while it is entered.

    What several tensors share counts once.

    Args:
        apart: What does not count: parameters, and the batch.

    Attributes:
        live: Bytes that are kept now.
        peak: The most that were kept at one time.
    """

    def __init__(self, apart: Iterable[Tensor] = ()) -> None:
        self.live = self.peak = 0
        self._held: Counter[int] = Counter()
        self._apart = {local(tensor).untyped_storage().data_ptr() for tensor in apart}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def __enter__(self) -> "SavedForBackward":
        self._hooks.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._hooks.__exit__(kind, error, trace)

    def _pack(self, tensor: Tensor) -> "_Kept":
        storage = local(tensor).untyped_storage()
        place, size = storage.data_ptr(), storage.nbytes()
        return _Kept(self, tensor, place, 0 if place in self._apart else size)

    @staticmethod
    def _unpack(kept: "_Kept") -> Tensor:
        return kept.tensor

    def add(self, place: int, size: int) -> None:
        """Counts a tensor that is kept from now on."""
        self.live += 0 if self._held[place] else size
        self._held[place] += 1
        self.peak = max(self.peak, self.live)

    def remove(self, place: int, size: int) -> None:
        """Counts a tensor that is kept no longer."""
        self._held[place] -= 1
        self.live -= 0 if self._held[place] else size


class _Kept:
    """A tensor that autograd keeps; it goes with the graph."""

    def __init__(self, meter: SavedForBackward, tensor: Tensor, place: int, size: int) -> None:
        self.tensor = tensor
        self._meter, self._at = meter, (place, size)
        meter.add(*self._at)

    def __del__(self, *_: Any) -> None:
        self._meter.remove(*self._at)
