"""When the copies of a stage sum their gradients: the four places of `gradient_sync`, in turns in one run.

The ranks are processes whose actions sleep, as in the benchmark `schedules`, and hold a gradient of 16 MiB for each of
their stages. The buckets, their order and the places where they start are those of the product. A step ends when the
last rank has all of its sums, without an optimizer's step. The policies take turns, each first as often as the others,
so that what else the machine does falls on all of them; `to lazy` is the median over the rounds of a step's time over
that of the lazy one in the same round.

`wait` is what a rank waits for sums behind its last action, on average. `sum` is one sum alone, with all ranks in one
at the same time; the simulator is given it, and what the actions take. Sums of gloo need a core, and here four
processes share two: where a core is free, as the stages sleep, sums cost the other ranks little.
"""

import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.ranks import TIMEOUT, run
from benchmarks.report import Bar, Report, arguments
from benchmarks.schedules import WARM_UP, Pace, Sleep, start_together
from lightning_chimera.partition.ownership import Ownership
from lightning_chimera.runtime.executor import Executor
from lightning_chimera.runtime.gradients import GradientSync
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.schedules import Action, Lowered, Schedule, get_family, lower
from lightning_chimera.timeline import SyncPolicy, simulate, sync_order, sync_places, synchronize

SCHEDULES = ("chimera", "chimera_split", "chimera_halving")
EARLIEST = {SyncPolicy.EAGER_OPT: 1.0, SyncPolicy.HIDDEN: 1.0}
"""The most that a step may take with these, in lazy ones."""


class Step(NamedTuple):
    """What a step took on one rank, in seconds.

    Attributes:
        start: When it started.
        ran: When its last action had ended.
        end: When it had all sums.
        wait: How long it has waited for them.
        early: How many sums it has started before its last action.
    """

    start: float
    ran: float
    end: float
    wait: float
    early: int


class Sizes(Ownership):
    """One parameter for each stage of a rank, and no module.

    Args:
        topology: Where the rank is.
        schedule: Where the stages are.
        size: Bytes of a stage's gradient.
    """

    def __init__(self, topology: Topology, schedule: Schedule, size: int) -> None:
        self.rank = topology.global_rank
        own = {stage: nn.Parameter(torch.zeros(size // 4)) for stage in schedule.placement.stages_of(topology.position)}
        for parameter in own.values():
            parameter.grad = torch.zeros_like(parameter)
        self._held = list(own.values())
        self.stages = {parameter: frozenset((stage,)) for stage, parameter in own.items()}
        self.holders = {parameter: topology.holders(schedule.placement, (stage,)) for stage, parameter in own.items()}


@dataclass(frozen=True)
class Rank:
    """One rank and its part of a schedule."""

    lowered: Lowered
    executor: Executor
    work: Sleep
    position: int

    def step(self, sync: GradientSync, order: tuple[int, ...]) -> Step:
        """Runs the schedule with its sums."""
        places = sync_places(self.lowered.schedule, self.position, order)
        early = 0

        def before(action: Action) -> None:
            nonlocal early
            sync.start(places.get(action, 0))
            early = sum(self.stage_is_here(stage) for stage in order[: places.get(action, 0)]) or early

        start_together()
        start = perf_counter()
        sync.begin({})
        self.executor.run(self.lowered, self.work, before)
        sync.start()
        ran = perf_counter()
        sync.reduce()
        return Step(start, ran, perf_counter(), sync.wait, early)

    def stage_is_here(self, stage: int) -> bool:
        """Whether this rank holds a stage."""
        return stage in self.lowered.schedule.placement.stages_of(self.position)


def _rank(schedule: Schedule, pace: Pace, size: int) -> tuple[list[dict[SyncPolicy, Step]], float]:
    """Runs all policies in turns on this rank.

    Returns:
        The steps of each round, and what a sum alone takes.
    """
    world = dist.get_world_size()
    topology = Topology.of_world(world, schedule.num_ranks, dist.get_rank())
    sizes = Sizes(topology, schedule, size)
    sets = {topology.holders(schedule.placement, (stage,)) for stage in range(schedule.num_stages)}
    groups = Groups(topology, schedule.placement, sets, TIMEOUT)
    links = Links(topology, groups.links, torch.device("cpu"), TIMEOUT)
    links.connect()
    rank = Rank(lower(schedule), Executor(links, topology.position), Sleep(schedule, pace), topology.position)
    orders = {policy: sync_order(schedule, policy) for policy in SyncPolicy}
    syncs = {policy: GradientSync(sizes, groups.holders, order) for policy, order in orders.items()}
    rounds = []
    for number in range(WARM_UP + pace.steps):
        turns = list(SyncPolicy)[number % len(SyncPolicy) :] + list(SyncPolicy)[: number % len(SyncPolicy)]
        rounds.append({policy: rank.step(syncs[policy], orders[policy]) for policy in turns})
    return rounds[WARM_UP:], statistics.median(_alone(groups, sizes, pace.steps))


def _alone(groups: Groups, sizes: Sizes, count: int) -> Iterator[float]:
    """What the sum of one stage takes while no action runs."""
    parameter = next(iter(sizes.stages))
    for _ in range(count):
        start_together()
        start = perf_counter()
        dist.all_reduce(parameter.detach(), group=groups.holders[sizes.holders[parameter]])
        yield perf_counter() - start


def judge(report: Report, name: str, schedule: Schedule, pace: Pace, size: int, *, on_time: bool) -> None:
    """Measures a schedule with all policies and adds their rows and bars."""
    simulated = simulate(schedule, pace.costs)
    limit = 60 + 10 * (WARM_UP + pace.steps) * len(SyncPolicy) * (simulated.makespan + 0.2)
    ranks = run(_rank, schedule, pace, size, size=schedule.num_ranks, limit=limit)
    alone = statistics.median(sum_alone for _, sum_alone in ranks)
    rounds = [
        {policy: [rank[number][policy] for rank, _ in ranks] for policy in SyncPolicy} for number in range(pace.steps)
    ]
    times = [{policy: _length(steps) for policy, steps in turn.items()} for turn in rounds]
    for policy in SyncPolicy:
        order = sync_order(schedule, policy)
        to_lazy = statistics.median(turn[policy] / turn[SyncPolicy.LAZY] for turn in times)
        report.rows.append(
            {
                "schedule": name,
                "gradient_sync": policy.value,
                "N": schedule.num_microbatches,
                "step_ms": statistics.median(turn[policy] for turn in times) * 1e3,
                "to_lazy": to_lazy,
                "wait_ms": statistics.median(statistics.fmean(step.wait for step in turn[policy]) for turn in rounds)
                * 1e3,
                "simulated_ms": synchronize(schedule, simulated, order, cost=alone).end * 1e3,
                "sum_ms": alone * 1e3,
                "early": sum(step.early for step in rounds[0][policy]),
            }
        )
        case = f"{name}, D = {schedule.num_ranks}, N = {schedule.num_microbatches}, {policy.value}"
        missed = _expected(schedule, order) - report.rows[-1]["early"]
        report.bars.append(Bar(f"{case}: sums that should have started within the schedule", float(missed), 0.0))
        if on_time and policy in EARLIEST:
            report.bars.append(Bar(f"{case}: step against the lazy one", to_lazy, EARLIEST[policy]))


def _length(steps: list[Step]) -> float:
    """From the first start to the last end of a step."""
    return max(step.end for step in steps) - min(step.start for step in steps)


def _expected(schedule: Schedule, order: tuple[int, ...]) -> int:
    """How many sums all ranks together start before their last actions."""
    found = 0
    for rank, row in enumerate(schedule.rows):
        counts = [number for action, number in sync_places(schedule, rank, order).items() if action in row]
        held = schedule.placement.stages_of(rank)
        found += sum(stage in held for stage in order[: max(counts, default=0)])
    return found


def main() -> int:
    """Measures some schedules, or those that are named."""
    parser = arguments(__doc__)
    parser.add_argument("schedules", nargs="*", help="names of schedules")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--size", type=int, default=16, help="size of a stage's gradient in MiB")
    parser.add_argument("--steps", type=int, default=12, help="rounds that are counted")
    given = parser.parse_args()
    if min(given.ranks - 1, given.size, given.steps) < 1:
        parser.error("a pipeline has two ranks or more, a gradient 1 MiB or more, and one round or more is counted")
    try:
        build = {name: partial(get_family(name).build, given.ranks) for name in given.schedules or SCHEDULES}
    except ValueError as error:
        parser.error(str(error))
    pace, size = Pace(steps=given.steps), given.size * 2**20
    if given.quick:
        build, pace, size = {"chimera": build.get("chimera", next(iter(build.values())))}, Pace(0.002, steps=2), 2**18
    report = Report(
        f"Sums of gradients on {given.ranks} sleeping ranks, by when they start",
        {"ranks": given.ranks, "size_mib": size / 2**20, "rounds": pace.steps, "unit_ms": pace.unit * 1e3},
    )
    for name, schedule_of in build.items():
        judge(report, name, schedule_of(given.ranks), pace, size, on_time=not given.quick)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
