"""Trees that all ranks of a group hand to each other, or one to all: one flat tensor where the layout is as before.

The numbers of a tree travel behind a header that says whether its layout is the one that was sent last. Where it is
not, on any rank, all ranks see that in the same exchange, and a second one brings the new layouts, pickled.
"""

import pickle
import struct
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_chimera.runtime.packing import Codec, Flat

_HEADER = struct.Struct("=qq")
"""Bytes of a new layout and of its numbers; 0 and 0 where the layout is the last one, whose numbers follow."""


class _Message:
    """What one rank has to say: the numbers at once if the last layout fits, or else the layout with them afterwards.

    Args:
        tree: The tree.
        last: That of the last layout.
    """

    def __init__(self, tree: Any, last: Codec) -> None:
        self._flat = Flat(tree)
        self._is_new = self._flat.layout != last.layout
        self._codec = Codec(self._flat.layout) if self._is_new else last
        self._layout = pickle.dumps(self._flat.layout) if self._is_new else b""

    def write(self, row: Tensor) -> None:
        """Writes the header, and the numbers if they are to follow at once."""
        _HEADER.pack_into(row.numpy().data, 0, len(self._layout), self._codec.nbytes if self._is_new else 0)
        if not self._is_new:
            self._flat.write(self._codec, row[_HEADER.size :])

    def write_new(self, row: Tensor) -> None:
        """Writes a new layout and the numbers."""
        if self._is_new:
            row[: len(self._layout)] = torch.frombuffer(bytearray(self._layout), dtype=torch.uint8)
            self._flat.write(self._codec, row[len(self._layout) :])


def _read_new(row: Tensor, layout_size: int, device: torch.device | None) -> tuple[Codec, Any]:
    codec = Codec(pickle.loads(row[:layout_size].numpy().tobytes()))
    return codec, codec.read(row[layout_size:], device)


class Gather:
    """Gives the trees of all ranks of a group to each of them.

    Args:
        group: A group on the CPU.
        device: Where to put tensors that were not on the CPU of their rank: there by default.
    """

    def __init__(self, group: ProcessGroup, device: torch.device | None = None) -> None:
        self._group = group
        self._device = device
        self._rank = dist.get_rank(group)
        self._codecs = [Codec(("fixed", None))] * dist.get_world_size(group)

    def __call__(self, tree: Any) -> list[Any]:
        """The trees in the order of the group's ranks; every rank must call it."""
        message = _Message(tree, self._codecs[self._rank])
        rows = self._rows(_HEADER.size + max(codec.nbytes for codec in self._codecs))
        message.write(rows[self._rank])
        self._gather(rows)
        sizes = [_HEADER.unpack_from(row.numpy().data) for row in rows]
        trees = [
            None if layout_size else codec.read(row[_HEADER.size :], self._device)
            for codec, row, (layout_size, _) in zip(self._codecs, rows, sizes, strict=True)
        ]
        if any(layout_size for layout_size, _ in sizes):
            rows = self._rows(max(map(sum, sizes)))
            message.write_new(rows[self._rank])
            self._gather(rows)
            for rank, (layout_size, _) in enumerate(sizes):
                if layout_size:
                    self._codecs[rank], trees[rank] = _read_new(rows[rank], layout_size, self._device)
        return trees

    def _rows(self, size: int) -> list[Tensor]:
        return list(torch.zeros(len(self._codecs), size, dtype=torch.uint8))

    def _gather(self, rows: list[Tensor]) -> None:
        if len(rows) > 1:
            dist.all_gather(rows, rows[self._rank], group=self._group)


class Broadcast:
    """Gives the trees of one rank of a group to the others.

    Args:
        group: A group on the CPU.
        source: The global rank that sends.
        is_source: Whether this rank is it.
        device: Where the others put tensors that were not on the source's CPU: there by default.
    """

    def __init__(
        self, group: ProcessGroup, source: int, *, is_source: bool, device: torch.device | None = None
    ) -> None:
        self._group = group
        self._device = device
        self._source = source
        self._is_source = is_source
        self._codec = Codec(("fixed", None))

    def __call__(self, tree: Any = None) -> Any:
        """Returns the source's tree on every rank; the argument counts on the source only."""
        if dist.get_world_size(self._group) == 1:
            return tree
        message = _Message(tree, self._codec) if self._is_source else None
        row = torch.zeros(_HEADER.size + self._codec.nbytes, dtype=torch.uint8)
        if message is not None:
            message.write(row)
        dist.broadcast(row, self._source, group=self._group)
        layout_size, data_size = _HEADER.unpack_from(row.numpy().data)
        if not layout_size:
            return tree if self._is_source else self._codec.read(row[_HEADER.size :], self._device)
        row = torch.zeros(layout_size + data_size, dtype=torch.uint8)
        if message is not None:
            message.write_new(row)
        dist.broadcast(row, self._source, group=self._group)
        self._codec, received = _read_new(row, layout_size, self._device)
        return tree if self._is_source else received
