"""Joins what a step gave for the parts of a batch into what it would have given for the whole batch."""

from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from lightning_chimera.notes import Addition
from lightning_chimera.reporting import weighted_mean


def join(values: Sequence[Any], shares: Sequence[float], rows: Sequence[int]) -> Any:
    """Joins the values of all parts, in the order of the rows.

    Numbers and tensors of one number are averaged by the shares; tensors and lists with an entry for each row are
    concatenated; mappings are joined by the keys that all of them have, and tuples and lists of one length entry by
    entry. Of anything else, parts that do not match included, the first part's value is taken.

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
    if _have_rows(values, rows):
        return torch.cat(_together(values)) if isinstance(first, Tensor) else list(chain.from_iterable(values))
    if all(isinstance(value, Mapping) for value in values):
        common = [key for key in first if all(key in value for value in values)]
        return {key: join([value[key] for value in values], shares, rows) for key in common}
    if all(isinstance(value, list | tuple) for value in values) and len(set(map(len, values))) == 1:
        entries = [join(entries, shares, rows) for entries in zip(*values, strict=True)]
        return first._make(entries) if hasattr(first, "_make") else type(first)(entries)
    return first


def join_lists(
    grown: Sequence[Mapping[str, Sequence[Addition]]], shares: Sequence[float], rows: Sequence[int]
) -> dict[str, list[Any]]:
    """Joins what the lists of a module have grown by, on any part.

    Args:
        grown: For each part by the list's name what it has grown by.
        shares: What each part counts for in a mean.
        rows: Rows of each part.
    """
    names = dict.fromkeys(chain.from_iterable(grown))
    return {name: join_grown([lists.get(name, ()) for lists in grown], shares, rows) for name in names}


def join_grown(grown: Sequence[Sequence[Addition]], shares: Sequence[float], rows: Sequence[int]) -> list[Any]:
    """Joins what a list has grown by in each part: what was appended one by one, and what was added at once.

    What only some parts have appended is an entry of theirs.

    Args:
        grown: What it has grown by in each part.
        shares: What each part counts for in a mean.
        rows: Rows of each part.
    """
    having = [part for part, additions in enumerate(grown) if additions]
    if len({tuple(addition.is_single for addition in grown[part]) for part in having}) > 1:
        return _join_added([[item for each in additions for item in each.items] for additions in grown], shares, rows)
    joined: list[Any] = []
    for number in range(max(map(len, grown))):
        if grown[having[0]][number].is_single:
            entries = [grown[part][number].items[0] for part in having]
            joined.append(join(entries, [shares[part] for part in having], [rows[part] for part in having]))
        else:
            joined += _join_added([each[number].items if each else [] for each in grown], shares, rows)
    return joined


def _join_added(added: Sequence[list[Any]], shares: Sequence[float], rows: Sequence[int]) -> list[Any]:
    """Joins what was added at once. Where the numbers of entries differ they are of some of the rows: all stay."""
    if len(set(map(len, added))) > 1:
        return list(chain.from_iterable(added))
    return list(join(added, shares, rows))


def _mean(values: Sequence[Tensor], shares: Sequence[float]) -> Tensor:
    mean = weighted_mean(shares, torch.stack([value.double() for value in _together(values)]))
    return mean.to(values[0].dtype if values[0].is_floating_point() else torch.get_default_dtype())


def _together(values: Sequence[Tensor]) -> list[Tensor]:
    """The tensors on the device of the first: a step may keep some of its parts on the CPU."""
    return [value.to(values[0].device) for value in values]


def _have_rows(values: Sequence[Any], rows: Sequence[int]) -> bool:
    """Whether all parts are tensors, or lists, with an entry for each row, which can be put together."""
    if all(isinstance(value, Tensor) for value in values):
        return all(
            value.ndim > 0 and value.shape[0] == count and value.shape[1:] == values[0].shape[1:]
            for value, count in zip(values, rows, strict=True)
        )
    return all(
        isinstance(value, list) and len(value) == count and not any(isinstance(item, Tensor) for item in value)
        for value, count in zip(values, rows, strict=True)
    )
