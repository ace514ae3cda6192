"""Trees of tensors as bytes: how batches, results and optimizer states travel between ranks.

A tree (nested dicts, lists, tuples and the like) is a layout, which says everything but the numbers, and one flat
buffer with the bytes of its numbers: Python's own, and those in tensors. A layout is pickled to be sent, and it is sent
only when it changes (see :mod:`lightning_chimera.runtime.exchange`); the numbers never are.
"""

import pickle
import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from torch.distributed import ProcessGroup

Layout = tuple[Any, ...]
"""The kind of a tree, and what belongs to it; trees of equal layouts differ in their numbers only."""

_CODES: dict[type, str] = {float: "d", int: "q", bool: "?"}
"""Python's numbers, as ``struct`` writes them."""

_LARGEST = 1 << 63
"""Larger integers are part of the layout."""


class Constant(NamedTuple):
    """A part of a tree that seldom changes, so that it belongs to the layout with all its numbers.

    Attributes:
        value: Anything that can be pickled and compared, and that nobody changes in place.
    """

    value: Any


class Numbers(NamedTuple):
    """A part of a tree whose tensors are read on the CPU, wherever they were.

    Attributes:
        value: A tree.
    """

    value: Any


class Packed(NamedTuple):
    """A tree ready to travel."""

    layout: Layout
    data: Tensor


class _Slot(NamedTuple):
    """Stands for a tensor inside of an object that is pickled."""

    place: int


class Flat:
    """A tree, taken apart.

    Args:
        tree: Any tree; objects that are no containers are part of the layout.
    """

    def __init__(self, tree: Any) -> None:
        self._numbers: list[Any] = []
        self._tensors: list[Tensor] = []
        self._are_numbers = False
        self.layout = self._flatten(tree)

    def _flatten(self, tree: Any) -> Layout:
        kind = type(tree)
        if kind in _CODES and (kind is not int or -_LARGEST <= tree < _LARGEST):
            self._numbers.append(tree)
            return (_CODES[kind],)
        if tree is None or kind is str or kind is bytes:
            return ("fixed", tree)
        if kind is Constant:
            return ("fixed", tree.value)
        if kind is Numbers:
            return self._flatten_numbers(tree.value)
        if kind is list or kind is tuple:
            return (kind.__name__, *[self._flatten(value) for value in tree])
        if kind is dict and all(type(key) is str for key in tree):
            return ("dict", tuple(tree), *[self._flatten(value) for value in tree.values()])
        if isinstance(tree, Tensor) and tree.layout is torch.strided and not tree.is_nested:
            self._tensors.append(tree)
            stays = self._are_numbers or tree.is_cpu
            return ("tensor", tree.shape, tree.dtype, tree.numel() * tree.element_size(), stays)
        if isinstance(tree, tuple) and hasattr(tree, "_fields"):
            return ("named", kind, *[self._flatten(value) for value in tree])
        return self._pickled(tree)

    def _flatten_numbers(self, tree: Any) -> Layout:
        before, self._are_numbers = self._are_numbers, True
        try:
            return self._flatten(tree)
        finally:
            self._are_numbers = before

    def _pickled(self, tree: Any) -> Layout:
        """An object of another type as bytes, but for the tensors in it."""
        slots: list[Layout] = []

        def slot(tensor: Tensor) -> _Slot:
            slots.append(self._flatten(tensor))
            return _Slot(len(slots) - 1)

        return ("pickled", pickle.dumps(apply_to_collection(tree, Tensor, slot, allow_frozen=True)), *slots)

    def write(self, codec: "Codec", row: Tensor) -> None:
        """Writes the numbers to the start of a row of bytes.

        Args:
            codec: That of the layout.
            row: Bytes on the CPU, at least as many as the layout needs.
        """
        codec.numbers.pack_into(row.numpy().data, 0, *self._numbers)
        parts = [tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in self._tensors]
        if len({part.device for part in parts}) == 1 and not parts[0].is_cpu:
            parts = [torch.cat(parts).cpu()]  # at once, since each copy would wait for the device
        offset = codec.numbers.size
        for part in parts:
            row[offset : offset + part.numel()].copy_(part)
            offset += part.numel()


class Codec:
    """Reads the numbers of trees of one layout.

    Args:
        layout: The layout.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        nodes = list(_nodes(layout))
        self.numbers = struct.Struct("=" + "".join(tag for tag, *_ in nodes if tag in _CODES.values()))
        self.nbytes = self.numbers.size + sum(node[3] for node in nodes if node[0] == "tensor")

    def read(self, row: Tensor, device: torch.device | None = None) -> Any:
        """The tree, whose numbers are at the start of a row of bytes; nothing in it shares memory with the row.

        Args:
            row: The bytes, on the CPU.
            device: Where to put tensors that were not on the CPU: there by default.
        """
        numbers = iter(self.numbers.unpack_from(row.numpy().data))
        offset = self.numbers.size
        moved: Tensor | None = None

        def tensor(shape: torch.Size, dtype: torch.dtype, nbytes: int, stays: bool) -> Tensor:
            nonlocal offset, moved
            if not stays and device is not None and moved is None:
                moved = row.to(device)  # at once
            piece = (row if stays or moved is None else moved)[offset : offset + nbytes]
            offset += nbytes
            # A copy of its own: aligned for its type, and free to be kept or written to.
            return piece.clone().view(dtype).reshape(shape)

        return _build(self.layout, numbers, tensor)


def _nodes(layout: Layout) -> Iterator[Layout]:
    """A layout and all layouts in it, in the order of their numbers."""
    yield layout
    if layout[0] in ("list", "tuple", "dict", "named", "pickled"):
        for inner in layout[1 if layout[0] in ("list", "tuple") else 2 :]:
            yield from _nodes(inner)


def _build(layout: Layout, numbers: Iterator[Any], tensor: Callable[..., Tensor]) -> Any:
    tag = layout[0]
    if tag == "tensor":
        return tensor(*layout[1:])
    if tag == "fixed":
        return layout[1]
    if tag == "list":
        return [_build(inner, numbers, tensor) for inner in layout[1:]]
    if tag == "tuple":
        return tuple([_build(inner, numbers, tensor) for inner in layout[1:]])
    if tag == "dict":
        return {key: _build(inner, numbers, tensor) for key, inner in zip(layout[1], layout[2:], strict=True)}
    if tag == "named":
        return layout[1](*[_build(inner, numbers, tensor) for inner in layout[2:]])
    if tag == "pickled":
        inside = [_build(inner, numbers, tensor) for inner in layout[2:]]
        return apply_to_collection(pickle.loads(layout[1]), _Slot, lambda slot: inside[slot.place], allow_frozen=True)
    return next(numbers)


def pack(tree: Any) -> Packed:
    """Packs a tree; tensors are copied to the CPU."""
    flat = Flat(tree)
    codec = Codec(flat.layout)
    data = torch.empty(codec.nbytes, dtype=torch.uint8)
    flat.write(codec, data)
    return Packed(flat.layout, data)


def unpack(packed: Packed) -> Any:
    """The tree again."""
    return Codec(packed.layout).read(packed.data)


def send_tree(tree: Any, target: int, group: ProcessGroup) -> None:
    """Sends a tree to one rank."""
    packed = pack(tree)
    layout = torch.frombuffer(bytearray(pickle.dumps(packed.layout)), dtype=torch.uint8)
    dist.send(torch.tensor([layout.numel(), packed.data.numel()]), target, group=group)
    dist.send(layout, target, group=group)
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
    return unpack(Packed(pickle.loads(layout.numpy().tobytes()), data))
