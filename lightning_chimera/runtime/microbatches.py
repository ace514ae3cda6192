"""Splits a batch by rows."""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence


@dataclass(frozen=True)
class Microbatch:
    """Some rows of a batch.

    Attributes:
        data: The rows, in the structure of the batch.
        rows: How many.
    """

    data: Any
    rows: int

    def signature(self) -> tuple[Any, ...]:
        """Shapes and types of the tensors inside: what the boundary tensors' shape follows from."""
        return signature_of(self.data)


def signature_of(batch: Any) -> tuple[Any, ...]:
    """Shapes and types of the tensors in a batch, in order."""
    return tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else None for leaf in leaves(batch))


def count_rows(batch: Any) -> int | None:
    """Number of rows of a batch: of its ``input_ids``, else of its first tensor, else the length of its first list.

    A list of samples (mappings or tensors without a dimension for rows) has a row for each.

    Returns:
        ``None`` where nothing in the batch has rows.
    """
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    if isinstance(batch, Mapping):
        ids = batch.get("input_ids")
        if isinstance(ids, Tensor) and ids.ndim:
            return ids.shape[0]
        return _first_rows(batch.values())
    if is_dataclass(batch) and not isinstance(batch, type):
        return _first_rows(getattr(batch, field.name) for field in fields(batch))
    if isinstance(batch, PackedSequence):
        return int(batch.batch_sizes[0])
    if isinstance(batch, list | tuple):
        return len(batch) if batch and _is_list_of_rows(batch) else _first_rows(batch)
    return None


def split(batch: Any, num_microbatches: int) -> list[Microbatch]:
    """Splits a batch into microbatches whose rows differ by at most one.

    Tensors and lists with one entry per row are cut; all else (shared masks, position ids of one row, numbers,
    ``None``) goes to every microbatch as it is.

    Args:
        batch: Any nesting of mappings, lists, tuples and dataclasses.
        num_microbatches: How many; a batch of fewer rows gives one microbatch per row.
    """
    rows = count_rows(batch)
    if rows is None or rows < 2 or num_microbatches == 1:
        return [Microbatch(batch, rows or 1)]
    return [Microbatch(cut(batch, rows, start, end), end - start) for start, end in row_ranges(rows, num_microbatches)]


def split_together(batches: Sequence[Any], num_microbatches: int) -> list[tuple[list[Any], int]]:
    """Splits batches that several loaders gave for one step, each by its own rows, so that no part is left without.

    Args:
        batches: One of each loader; ``None`` for one that has ended.
        num_microbatches: How many; where a batch has fewer rows, as many as the smallest has.

    Returns:
        For each microbatch its part of each batch, and the rows of all of them together.
    """
    counts = [count_rows(batch) for batch in batches]
    sizes = [rows for rows in counts if rows]
    count = min([num_microbatches, *sizes]) if sizes else 1
    ranges = [row_ranges(rows, count) if rows else None for rows in counts]
    parts = []
    for number in range(count):
        pieces, total = [], 0
        for batch, rows, own in zip(batches, counts, ranges, strict=True):
            if own is None or rows is None or count == 1:
                pieces.append(batch)
            else:
                pieces.append(cut(batch, rows, *own[number]))
            total += own[number][1] - own[number][0] if own is not None else 0
        parts.append((pieces, total or 1))
    return parts


def row_ranges(rows: int, num_parts: int) -> list[tuple[int, int]]:
    """Start and end of the rows of each part; the parts differ by at most one row, and none is empty."""
    count = min(num_parts, rows)
    return list(pairwise(index * rows // count for index in range(count + 1)))


def cut(part: Any, rows: int, start: int, end: int) -> Any:
    """Rows start .. end - 1 of a part of a batch of so many rows."""
    check_dense(part)
    if isinstance(part, Tensor):
        return part[start:end] if part.ndim and part.shape[0] == rows else part
    if isinstance(part, Mapping):
        smaller: Any = copy.copy(part)
        for key, value in part.items():
            smaller[key] = cut(value, rows, start, end)
        return smaller
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: cut(getattr(part, f.name), rows, start, end) for f in fields(part) if f.init})
    if isinstance(part, list | tuple):
        if len(part) == rows and _is_list_of_rows(part):
            return part[start:end]
        pieces = [cut(value, rows, start, end) for value in part]
        return type(part)(*pieces) if hasattr(part, "_fields") else type(part)(pieces)
    return part


def check_dense(part: Any) -> None:
    """Refuses what has rows that can't be cut, or no plain numbers that can be sent.

    Raises:
        TypeError: It is a packed sequence, or a sparse or nested tensor.
    """
    kind = type(part).__name__ if isinstance(part, PackedSequence) else ""
    if isinstance(part, Tensor) and (part.layout is not torch.strided or part.is_nested):
        kind = f"nested tensor ({part.layout})" if part.is_nested else f"sparse tensor ({part.layout})"
    if kind:
        raise TypeError(
            f"The batch holds a {kind}. A pipeline sends batches between its ranks and cuts them by rows, so a batch is"
            " made of dense tensors: pad in the data loader, and pack or make it sparse in the step."
        )


def leaves(part: Any) -> Iterator[Any]:
    """What a part of a batch is made of, in order: tensors, and the keys and values that are no containers."""
    if isinstance(part, Mapping):
        for key, value in part.items():
            yield key
            yield from leaves(value)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            yield from leaves(getattr(part, field.name))
    elif isinstance(part, list | tuple) and not isinstance(part, PackedSequence):
        for value in part:
            yield from leaves(value)
    else:
        yield part


def _first_rows(parts: Any) -> int | None:
    return next((rows for rows in map(count_rows, parts) if rows is not None), None)


def _is_list_of_rows(parts: list[Any] | tuple[Any, ...]) -> bool:
    """Whether a list has an entry for each row: no containers or tensors in it, or samples."""
    if hasattr(parts, "_fields"):  # a named tuple has fields, not rows
        return False
    if all(isinstance(part, Tensor) for part in parts):
        return all(part.ndim <= 1 for part in parts) and len({part.shape for part in parts}) > 1
    if all(isinstance(part, Mapping | list | tuple) for part in parts):
        tensors = [leaf for part in parts for leaf in leaves(part) if isinstance(leaf, Tensor)]
        return bool(tensors) and all(tensor.ndim <= 1 for tensor in tensors)
    return not any(isinstance(part, Tensor | Mapping | list | tuple) for part in parts)
