"""Places the all-reduce of each stage's gradients beside a schedule that was simulated.

Every rank that holds a stage takes part in its all-reduce, so opposite pipes need one even without data parallelism.
It runs beside the actions, on a rank one after the other; what does not end before the actions adds to the step. What
it takes from actions that run at the same time is not counted, so here earlier is never worse.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence

from lightning_chimera.schedules.action import Kind, Schedule
from lightning_chimera.timeline.timeline import SyncSpan, Timeline


class SyncPolicy(enum.StrEnum):
    """When a rank starts the all-reduce of a stage."""

    EAGER = "eager"
    """When the stage's last gradient on the rank is there."""
    EAGER_OPT = "eager-opt"
    """For the stages beyond the middle one as eager, for the others as lazy: the rule of Chimera's authors."""
    HIDDEN = "hidden"
    """As eager where the all-reduce ends before the last action of each of its ranks, as lazy elsewhere."""
    LAZY = "lazy"
    """When the rank has run all of its actions."""


def synchronize(
    schedule: Schedule,
    timeline: Timeline,
    policy: SyncPolicy,
    *,
    cost: float | Sequence[float] = 1.0,
    num_replicas: int = 1,
) -> Timeline:
    """Return a timeline with the all-reduces of the gradients.

    Args:
        schedule: what runs.
        timeline: when it runs, simulated or measured.
        policy: when an all-reduce starts.
        cost: how long it takes: one number for all stages, or one for each.
        num_replicas: copies of the whole pipeline, among which gradients are summed as well.

    Raises:
        ValueError: if the costs are of another number of stages.
    """
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ValueError(f"{len(costs)} costs for {schedule.num_stages} stages: give one, or one for each.")
    gradients: dict[tuple[int, int], float] = {}
    compute = [0.0] * schedule.num_ranks
    for span in timeline.spans:
        compute[span.rank] = max(compute[span.rank], span.end)
        if span.action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            key = span.rank, span.action.stage
            gradients[key] = max(gradients.get(key, 0.0), span.end)

    launches: list[tuple[float, int, tuple[int, ...]]] = []
    for stage in range(schedule.num_stages):
        ranks = tuple(sorted({pipe[stage] for pipe in schedule.placement.ranks}))
        if len(ranks) * num_replicas == 1:
            continue
        eager, lazy = max(gradients[rank, stage] for rank in ranks), max(compute[rank] for rank in ranks)
        is_eager = {
            SyncPolicy.EAGER: True,
            SyncPolicy.EAGER_OPT: stage > schedule.num_stages // 2,
            SyncPolicy.HIDDEN: all(eager + costs[stage] <= compute[rank] for rank in ranks),
            SyncPolicy.LAZY: False,
        }[policy]
        launches.append((eager if is_eager else lazy, -stage, ranks))

    free = [0.0] * schedule.num_ranks
    syncs = []
    # Of several that start together the largest index comes first, as their gradients do.
    for launch, negative, ranks in sorted(launches):
        start = max(launch, *(free[rank] for rank in ranks))
        syncs.append(SyncSpan(-negative, ranks, start, start + costs[-negative]))
        for rank in ranks:
            free[rank] = syncs[-1].end
    return dataclasses.replace(timeline, syncs=tuple(syncs))
