"""Joins what a step gave for the parts of a batch into what it would have given for the whole batch."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_chimera.notes import Addition
from lightning_chimera.reporting import weighted_mean


def join(values: Sequence[Any], shares: Sequence[float], rows: Sequence[int]) -> Any:
    """Joins the values of all parts, in the order of the rows.

    Numbers and tensors of one number are averaged by the shares; tensors and lists with an entry for each row are
    concatenated; mappings, and tuples and lists of one length, are joined entry by entry. Of anything else the first
    part's value is taken.

    Args:
        values: One for each part.
        shares: What each part counts for in a mean.
        rows: Rows of each part.
    """
    first = values[0]
    if all(isinstance(value, Tensor) and value.ndim == 0 for value in values):
        return _mean(values, shares)
    if all(isinstance(value, float) for value in values):
        return float(weighted_mean(shares, torch.tensor(values, dtype=torch.float64)))
    if all(_has_rows(value, count) for value, count in zip(values, rows, strict=True)):
        return torch.cat(list(values)) if isinstance(first, Tensor) else [item for value in values for item in value]
    if isinstance(first, Mapping):
        return {key: join([value[key] for value in values], shares, rows) for key in first}
    if isinstance(first, list | tuple) and len({len(value) for value in values}) == 1:
        return type(first)(join(entries, shares, rows) for entries in zip(*values, strict=True))
    return first


def join_grown(grown: Sequence[Sequence[Addition]], shares: Sequence[float], rows: Sequence[int]) -> list[Any]:
    """Joins what a list has grown by in each part: what was appended one by one, and what was added at once.

    Args:
        grown: What it has grown by in each part.
        shares: What each part counts for in a mean.
        rows: Rows of each part.
    """
    if len({tuple(addition.is_single for addition in additions) for additions in grown}) > 1:
        return list(join([[item for each in additions for item in each.items] for additions in grown], shares, rows))
    joined: list[Any] = []
    for additions in zip(*grown, strict=True):
        if additions[0].is_single:
            joined.append(join([addition.items[0] for addition in additions], shares, rows))
        else:
            joined += join([addition.items for addition in additions], shares, rows)
    return joined


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    mean = weighted_mean(shares, torch.stack([value.double() for value in values]))
    return mean.to(values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype())


def _has_rows(value: Any, rows: int) -> bool:
    if isinstance(value, Tensor):
        return value.ndim > 0 and value.shape[0] == rows
    return isinstance(value, list) and len(value) == rows and not any(isinstance(item, Tensor) for item in value)
