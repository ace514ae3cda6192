"""List scheduling: an order that is found by running the pipeline on paper, each rank taking what it prefers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, producers

Stream = Sequence[Action]
"""Actions of one rank that run in this order among themselves."""


def list_schedule(
    name: str,
    placement: Placement,
    num_microbatches: int,
    streams: Sequence[Sequence[Stream]],
    preference: Callable[[Action], tuple[int, ...]],
) -> Schedule:
    """Merge the streams of each rank: a free rank starts, of the first actions that are ready, the most preferred one.

    On paper a forward takes 1 and a backward 2, and messages take no time. The order that is found is frozen: it does
    not depend on how long things take when it is run.

    Args:
        name: the name of the schedule.
        placement: which rank runs which stage.
        num_microbatches: microbatches of a step.
        streams: for each rank, its streams.
        preference: what a rank prefers, the least value first.
    """
    takes = producers(action for of_rank in streams for stream in of_rank for action in stream)
    left = [[list(reversed(stream)) for stream in of_rank] for of_rank in streams]
    rows: list[list[Action]] = [[] for _ in streams]
    free = [0] * len(streams)
    ends: dict[Action, int] = {}
    now = 0
    while any(stream for of_rank in left for stream in of_rank):
        for rank, of_rank in enumerate(left):
            ready = [stream for stream in of_rank if stream and _is_ready(stream[-1], takes, ends, now)]
            if free[rank] <= now and ready:
                action = min(ready, key=lambda stream: preference(stream[-1])).pop()
                rows[rank].append(action)
                free[rank] = ends[action] = now + (1 if action.kind is Kind.FORWARD else 2)
        # The streams of a pipe are in one order on all of its ranks, so there is always something that runs or can run.
        now = min(time for time in free if time > now)
    return Schedule(name, placement, num_microbatches, tuple(map(tuple, rows)))


def _is_ready(action: Action, takes: Mapping[Action, Action], ends: Mapping[Action, int], now: int) -> bool:
    """Return whether the input of an action is there and, for a backward, its own forward has run."""
    needed = [takes[action]] if action in takes else []
    needed += [] if action.kind is Kind.FORWARD else [action._replace(kind=Kind.FORWARD)]
    return all(other in ends and ends[other] <= now for other in needed)
