"""Places the all-reduce of each stage's gradients beside a schedule that was simulated.

Every rank that holds a stage takes part in its all-reduce, so opposite pipes need one even without data parallelism.
It runs beside the actions, on a rank one after the other; what does not end before the actions adds to the step. What
it takes from actions that run at the same time is not counted, so here earlier is never worse.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence

from lightning_chimera.schedules.action import Action, Kind, Schedule
from lightning_chimera.timeline.simulate import simulate
from lightning_chimera.timeline.timeline import SyncSpan, Timeline

_NOMINAL_COST = 1.0
"""What an all-reduce is taken to cost before anything is measured, in forwards of an equal share of the model."""


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
    policy: SyncPolicy | Collection[int],
    *,
    cost: float | Sequence[float] = 1.0,
    num_replicas: int = 1,
) -> Timeline:
    """Return a timeline with the all-reduces of the gradients.

    Args:
        schedule: what runs.
        timeline: when it runs, simulated or measured.
        policy: when an all-reduce starts, or the stages whose all-reduce starts with their last gradient.
        cost: how long it takes: one number for all stages, or one for each.
        num_replicas: copies of the whole pipeline, among which gradients are summed as well.

    Raises:
        ValueError: if the costs are of another number of stages.
    """
    costs = list(cost) if isinstance(cost, Sequence) else [cost] * schedule.num_stages
    if len(costs) != schedule.num_stages:
        raise ValueError(f"{len(costs)} costs for {schedule.num_stages} stages: give one, or one for each.")
    ready, ends = _ends(timeline)
    early = eager_stages(schedule, timeline, policy, costs) if isinstance(policy, SyncPolicy) else policy
    launches: list[tuple[float, int, tuple[int, ...]]] = []
    for stage in range(schedule.num_stages):
        ranks = _holders(schedule, stage)
        if len(ranks) * num_replicas == 1:
            continue
        launch = max(ready[rank, stage] if stage in early else ends[rank] for rank in ranks)
        launches.append((launch, -stage, ranks))

    free = [0.0] * schedule.num_ranks
    syncs = []
    # Of several that start together the largest index comes first, as their gradients do.
    for launch, negative, ranks in sorted(launches):
        start = max(launch, *(free[rank] for rank in ranks))
        syncs.append(SyncSpan((-negative,), ranks, start, start + costs[-negative]))
        for rank in ranks:
            free[rank] = syncs[-1].end
    return dataclasses.replace(timeline, syncs=tuple(syncs))


def eager_stages(schedule: Schedule, timeline: Timeline, policy: SyncPolicy, costs: Sequence[float]) -> frozenset[int]:
    """Return the stages whose all-reduce starts as soon as their gradients are there.

    Args:
        schedule: what runs.
        timeline: when it runs.
        policy: when an all-reduce starts.
        costs: how long the all-reduce of each stage takes.
    """
    ready, ends = _ends(timeline)

    def is_early(stage: int) -> bool:
        ranks = _holders(schedule, stage)
        end = max(ready[rank, stage] for rank in ranks) + costs[stage]
        return {
            SyncPolicy.EAGER: True,
            SyncPolicy.EAGER_OPT: stage > schedule.num_stages // 2,
            SyncPolicy.HIDDEN: all(end <= ends[rank] for rank in ranks),
            SyncPolicy.LAZY: False,
        }[policy]

    return frozenset(filter(is_early, range(schedule.num_stages)))


def sync_order(schedule: Schedule, policy: SyncPolicy) -> tuple[int, ...]:
    """Return the stages whose all-reduce starts within the schedule, in the order in which every rank starts them.

    It is the order in which the simulator has their gradients ready, of a backward that takes two forwards. All ranks
    start theirs in this one order, whatever their own times, and so does every group of ranks: one that is ready before
    its turn waits for those before it to be started, never for them to end. A stage is left out where that does not
    prove the schedule free of deadlocks; see ``meets_in_order``.

    Args:
        schedule: the schedule of a batch with enough rows; the order holds for all others.
        policy: when an all-reduce starts.
    """
    timeline = simulate(schedule)
    ready, _ = _ends(timeline)
    costs = [_NOMINAL_COST] * schedule.num_stages

    def is_ready(stage: int) -> tuple[float, int]:
        return max(ready[rank, stage] for rank in _holders(schedule, stage)), -stage

    order: tuple[int, ...] = ()
    for stage in sorted(eager_stages(schedule, timeline, policy, costs), key=is_ready):
        if meets_in_order(schedule, (*order, stage)):
            order = (*order, stage)
    return order


def sync_starts(schedule: Schedule, rank: int, order: Sequence[int]) -> tuple[int, ...]:
    """Return before which place of its row a rank starts each all-reduce of an order, or past its end.

    Each starts behind the last action that adds to the stage's gradients on the rank, and none before those that come
    before it in the order.
    """
    last = {
        action.stage: place + 1
        for place, action in enumerate(schedule.rows[rank])
        if action.kind in (Kind.BACKWARD, Kind.WEIGHT)
    }
    held = schedule.placement.stages_of(rank)
    return tuple(itertools.accumulate((last.get(stage, 0) if stage in held else 0 for stage in order), max))


def sync_places(schedule: Schedule, rank: int, order: Sequence[int]) -> Mapping[Action, int]:
    """Return before which actions of its row a rank starts all-reduces, and how many of the order it has started then.

    What is not started before an action is started at the end of the row: all, if the order is not proved there.
    """
    if not meets_in_order(schedule, order):
        return {}
    starts = sync_starts(schedule, rank, order)
    row = schedule.rows[rank]
    return {row[place]: sum(start <= place for start in starts) for place in set(starts) if place < len(row)}


def meets_in_order(schedule: Schedule, order: Sequence[int]) -> bool:
    """Whether a schedule can't wait for ever though an all-reduce held up all that its ranks start behind it.

    That is more than gloo does, and the worst that NCCL may do, where kernels of several communicators share a device.
    It is told by induction: given that the all-reduces before one have ended, every rank that holds its stage must come
    to its start, while no rank goes on beyond the start of it or of a later one. Since a later one is never needed, it
    also holds between replicas that run schedules for other numbers of microbatches, if all of these meet in the order.
    """
    starts = [sync_starts(schedule, rank, order) for rank in range(schedule.num_ranks)]
    stages = [schedule.placement.stages_of(rank) for rank in range(schedule.num_ranks)]
    places = [0] * schedule.num_ranks
    ran: set[Action] = set()
    for number, stage in enumerate(order):
        limits = [
            min((own[later] for later in range(number, len(order)) if order[later] in held), default=len(row))
            for own, row, held in zip(starts, schedule.rows, stages, strict=True)
        ]
        _advance(schedule, places, limits, ran)
        if any(places[rank] < starts[rank][number] for rank in _holders(schedule, stage)):
            return False
    return True


def _advance(schedule: Schedule, places: list[int], limits: Sequence[int], ran: set[Action]) -> None:
    """Run each rank as far as its limit, or until it waits for what others have not run."""
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(schedule.rows):
            while places[rank] < limits[rank] and _is_due(schedule, row[places[rank]], ran):
                ran.add(row[places[rank]])
                places[rank] += 1
                moved = True


def _is_due(schedule: Schedule, action: Action, ran: set[Action]) -> bool:
    producer = schedule.producers.get(action)
    return producer is None or producer in ran


def _ends(timeline: Timeline) -> tuple[Mapping[tuple[int, int], float], Mapping[int, float]]:
    """Return when the gradients of each rank's stages are there, and when each rank has run all of its actions.

    A copy that trains no microbatch, as one of Chimera's if there is a single one, has nothing to wait for.
    """
    ready: dict[tuple[int, int], float] = defaultdict(float)
    ends = dict.fromkeys(range(timeline.num_ranks), 0.0)
    for span in timeline.spans:
        ends[span.rank] = max(ends[span.rank], span.end)
        if span.action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            key = span.rank, span.action.stage
            ready[key] = max(ready[key], span.end)
    return ready, ends


def _holders(schedule: Schedule, stage: int) -> tuple[int, ...]:
    """Return the ranks that hold a stage."""
    return tuple(sorted({pipe[stage] for pipe in schedule.placement.ranks}))
