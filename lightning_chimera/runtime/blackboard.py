"""What every rank says about something, read by all through the store: for the start, and for when messages fail."""

from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

LINGER = timedelta(seconds=5)
"""How long global rank 0, which may keep the store, stays for the others to read."""


_world: dist.ProcessGroup | None = None
_run = 0


def begin_run() -> None:
    """Counts the runs that this process group is used for, so that none reads what was said in an earlier one.

    A process may have had other groups before, as the one that runs the jobs of a sweep has, and its fellows not: so
    what the ranks count together begins with the group.
    """
    global _world, _run
    if dist.group.WORLD is not _world:
        _world, _run = dist.group.WORLD, 0
    _run += 1


def current_run() -> int:
    """The number of the run that goes on, the same on all ranks."""
    return _run


def exchange(topic: str, own: str, patience: timedelta) -> list[str | None]:
    """Posts what this rank says, and reads what all others do.

    Args:
        topic: The same on every rank that takes part, and never used before.
        own: What this rank says.
        patience: How long the others are waited for.

    Returns:
        In the order of the global ranks; ``None`` for those that have said nothing.
    """
    ranks = range(dist.get_world_size())
    said = [f"chimera/{topic}/{rank}" for rank in ranks]
    read = [f"chimera/{topic}/{rank}/read" for rank in ranks]
    here: list[int] = []
    values: list[str | None] = [None for _ in ranks]
    with suppress(RuntimeError):  # of the store, if the rank that keeps it has gone
        store = _get_default_store()
        store.set(said[dist.get_rank()], own)
        with suppress(RuntimeError):  # of the wait, if a rank is late
            store.wait(said, patience)
        here = [rank for rank in ranks if store.check([said[rank]])]
        values = [store.get(said[rank]).decode() if rank in here else None for rank in ranks]
        store.set(read[dist.get_rank()], "yes")
        if dist.get_rank() == 0:
            store.wait([read[rank] for rank in here], LINGER)
    return values


def name_ranks(ranks: list[int]) -> str:
    """Ranks in words: ``rank 3``, or ``ranks 0-2, 5``."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    named = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
    return f"rank {named}" if len(ranks) == 1 else f"ranks {named}"
