"""Whether all ranks have the same facts: compared by a digest, and named one by one where they differ."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_chimera.runtime.blackboard import current_run, exchange, name_ranks

Facts = Mapping[str, str]

_SHOWN = 3
"""How many differences are named; the first is the cause more often than not."""


class RanksDisagree(RuntimeError):
    """The ranks do not run the same; raised on every one of them."""


def check_at_start(facts: Facts, when: str, timeout: timedelta) -> None:
    """Compares facts through the store, before there is a group; every rank must call it.

    Args:
        facts: What should be equal, in the order in which differences are named.
        when: Where in the run this is, for the message.
        timeout: How long the others are waited for.

    Raises:
        RanksDisagree: They differ, or ranks have not come.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    topic = f"agreement/{current_run()}"
    digests = exchange(f"{topic}/digest", _digest(facts), timeout)
    missing = [rank for rank, digest in enumerate(digests) if digest is None]
    if missing:
        raise RanksDisagree(
            f"{when.capitalize()}, {name_ranks(missing)} did not come within {timeout.total_seconds():g} s. All"
            " processes of a run must run the same script and make the same calls of the Trainer."
        )
    if len(set(digests)) > 1:
        said = exchange(f"{topic}/facts", json.dumps(dict(facts)), timeout)
        _refuse([json.loads(one) if one is not None else {} for one in said], range(len(said)), when)


def check_in_group(facts: Facts, when: str, group: ProcessGroup) -> None:
    """Compares facts by one small message between the ranks of a group; every one of them must call it.

    Args:
        facts: What should be equal.
        when: Where in the run this is, for the message.
        group: A group on the CPU.

    Raises:
        RanksDisagree: They differ.
    """
    size = dist.get_world_size(group)
    if size == 1:
        return
    own = torch.tensor(int(_digest(facts)[:15], 16))
    digests = [torch.zeros_like(own) for _ in range(size)]
    dist.all_gather(digests, own, group=group)
    if len({int(digest) for digest in digests}) > 1:
        said: list[Any] = [None] * size
        dist.all_gather_object(said, dict(facts), group=group)
        _refuse(said, dist.get_process_group_ranks(group), when)


def describe(batch: Any, name: str = "batch") -> dict[str, str]:
    """The keys of a batch, with the shapes and types of its tensors."""
    if isinstance(batch, Tensor):
        return {name: f"{list(batch.shape)} {str(batch.dtype).removeprefix('torch.')}"}
    if isinstance(batch, Mapping):
        parts: Any = batch.items()
    elif isinstance(batch, list | tuple):
        parts = enumerate(batch)
    else:
        return {name: type(batch).__name__}
    found = {f"number of entries of {name}": str(len(batch))}
    for key, value in parts:
        found |= describe(value, f"{name}[{key!r}]")
    return found


def _digest(facts: Facts) -> str:
    return hashlib.sha256(json.dumps(dict(facts)).encode()).hexdigest()


def _refuse(said: Sequence[Facts], ranks: Sequence[int], when: str) -> None:
    """Names what differs, and the ranks on each side."""
    names = list(dict.fromkeys(name for facts in said for name in facts))
    differing = [name for name in names if len({facts.get(name) for facts in said}) > 1]
    lines = [f"  {name}: {_sides(name, said, ranks)}" for name in differing[:_SHOWN]]
    if not differing:
        lines = ["  the order of what they have"]
    if len(differing) > _SHOWN:
        lines.append(f"  and {len(differing) - _SHOWN} more")
    raise RanksDisagree(
        f"{when.capitalize()}, the ranks do not have the same:\n" + "\n".join(lines) + "\nAll ranks of a run must have"
        " the same model, settings and code, and must treat a batch alike: look for what depends on the rank, the host,"
        " its environment variables or its files."
    )


def _sides(name: str, said: Sequence[Facts], ranks: Sequence[int]) -> str:
    sides: dict[str, list[int]] = {}
    for rank, facts in zip(ranks, said, strict=True):
        sides.setdefault(facts.get(name, "none"), []).append(rank)
    return "; ".join(f"{value} on {name_ranks(side)}" for value, side in sides.items())
