"""Splits a batch by rows."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from itertools import pairwise
from typing import Any

from torch import Tensor


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
        found: list[Any] = []
        _collect(self.data, found)
        return tuple(found)


def count_rows(batch: Any) -> int | None:
    """Number of rows of a batch: of its ``input_ids``, else of its first tensor, else the length of its first list.

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
    if isinstance(batch, list | tuple):
        return _first_rows(batch) or (len(batch) if batch and not _holds_tensors(batch) else None)
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
    count = min(num_microbatches, rows)
    bounds = [index * rows // count for index in range(count + 1)]
    return [Microbatch(_cut(batch, rows, start, end), end - start) for start, end in pairwise(bounds)]


def _first_rows(parts: Any) -> int | None:
    return next((rows for rows in map(count_rows, parts) if rows is not None), None)


def _holds_tensors(parts: Any) -> bool:
    return any(isinstance(part, Tensor | Mapping | list | tuple) for part in parts)


def _cut(part: Any, rows: int, start: int, end: int) -> Any:
    """Rows start .. end - 1 of a part of a batch."""
    if isinstance(part, Tensor):
        return part[start:end] if part.ndim and part.shape[0] == rows else part
    if isinstance(part, Mapping):
        smaller: Any = copy.copy(part)
        for key, value in part.items():
            smaller[key] = _cut(value, rows, start, end)
        return smaller
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{f.name: _cut(getattr(part, f.name), rows, start, end) for f in fields(part) if f.init})
    if isinstance(part, list | tuple):
        if len(part) == rows and not _holds_tensors(part):
            return part[start:end]
        pieces = [_cut(value, rows, start, end) for value in part]
        return type(part)(*pieces) if hasattr(part, "_fields") else type(part)(pieces)
    return part


def _collect(part: Any, found: list[Any]) -> None:
    """Adds shapes and types of the tensors of a part."""
    if isinstance(part, Tensor):
        found.append((part.shape, part.dtype))
    elif isinstance(part, Mapping):
        for key, value in part.items():
            found.append(key)
            _collect(value, found)
    elif is_dataclass(part) and not isinstance(part, type):
        for field in fields(part):
            _collect(getattr(part, field.name), found)
    elif isinstance(part, list | tuple):
        for value in part:
            _collect(value, found)
