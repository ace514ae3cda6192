"""Trees of tensors as bytes: how batches, results and optimizer states travel between ranks.

A tree (nested dicts, lists, tuples and the like) is a layout, which says everything but the numbers, and one flat
buffer with the bytes of its tensors. The layout is pickled, so it is sent only when it changes; the numbers never are.
"""

import pickle
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class _Slot:
    """Stands for a tensor in a layout."""

    shape: torch.Size
    dtype: torch.dtype
    nbytes: int


class Packed(NamedTuple):
    """A tree ready to travel."""

    layout: bytes
    data: Tensor


def pack(tree: Any) -> Packed:
    """Packs a tree; tensors are copied to the CPU."""
    tensors: list[Tensor] = []

    def slot(leaf: Tensor) -> _Slot:
        flat = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        tensors.append(flat)
        return _Slot(leaf.shape, leaf.dtype, flat.numel())

    layout = apply_to_collection(tree, Tensor, slot, allow_frozen=True)
    return Packed(pickle.dumps(layout), torch.cat(tensors) if tensors else torch.empty(0, dtype=torch.uint8))


def unpack(packed: Packed) -> Any:
    """The tree again."""
    layout = pickle.loads(packed.layout)
    offset = 0

    def fill(leaf: _Slot) -> Tensor:
        nonlocal offset
        piece = packed.data[offset : offset + leaf.nbytes]
        offset += leaf.nbytes
        # A copy of its own: aligned for its type, and free to be kept or written to.
        return piece.clone().view(leaf.dtype).reshape(leaf.shape)

    return apply_to_collection(layout, _Slot, fill, allow_frozen=True)


class Broadcast:
    """Sends trees from one rank of a group to the others, remembering the last layout.

    Args:
        group: A group on the CPU.
        source: The global rank that sends.
        is_source: Whether this rank is it.
    """

    def __init__(self, group: ProcessGroup, source: int, *, is_source: bool) -> None:
        self._group = group
        self._source = source
        self._is_source = is_source
        self._layout = b""

    def __call__(self, tree: Any = None) -> Any:
        """Returns the source's tree on every rank; the argument counts on the source only."""
        if dist.get_world_size(self._group) == 1:
            return tree
        packed = pack(tree) if self._is_source else None
        sizes = torch.zeros(2, dtype=torch.int64)
        if packed is not None:
            sizes[0] = len(packed.layout) if packed.layout != self._layout else -1
            sizes[1] = packed.data.numel()
        dist.broadcast(sizes, self._source, group=self._group)
        layout_size, data_size = sizes.tolist()
        if layout_size >= 0:
            layout = torch.empty(layout_size, dtype=torch.uint8)
            if packed is not None:
                layout = torch.frombuffer(bytearray(packed.layout), dtype=torch.uint8)
            dist.broadcast(layout, self._source, group=self._group)
            self._layout = layout.numpy().tobytes()
        data = packed.data if packed is not None else torch.empty(data_size, dtype=torch.uint8)
        if data_size:
            dist.broadcast(data, self._source, group=self._group)
        return tree if self._is_source else unpack(Packed(self._layout, data))


def send_tree(tree: Any, target: int, group: ProcessGroup) -> None:
    """Sends a tree to one rank."""
    packed = pack(tree)
    dist.send(torch.tensor([len(packed.layout), packed.data.numel()]), target, group=group)
    dist.send(torch.frombuffer(bytearray(packed.layout), dtype=torch.uint8), target, group=group)
    if packed.data.numel():
        dist.send(packed.data, target, group=group)


def receive_tree(source: int, group: ProcessGroup) -> Any:
    """Receives a tree from one rank."""
    sizes = torch.empty(2, dtype=torch.int64)
    dist.recv(sizes, source, group=group)
    layout_size, data_size = sizes.tolist()
    layout = torch.empty(layout_size, dtype=torch.uint8)
    dist.recv(layout, source, group=group)
    data = torch.empty(data_size, dtype=torch.uint8)
    if data_size:
        dist.recv(data, source, group=group)
    return unpack(Packed(layout.numpy().tobytes(), data))
