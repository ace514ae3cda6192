"""Every schedule with stages that sleep, against the simulator.

Each rank is a process, with the executor, the links and the lowered schedules of the product; only the work of an
action is replaced by sleep, so that any number of ranks keep their own pace on a few cores. F, I and W take 20 ms for
an equal share of the model on each rank, a whole backward 40 ms, and a stage that is smaller its part of that. Every
message is a tensor of 64 KiB.

The simulator is given what the actions took on average, and the latency of a message: what one microbatch alone, which
never waits for another, loses at a boundary between ranks. So the two differ by what the runtime adds where
microbatches meet: the work between two actions, messages in the wrong order, receives that are posted late.
"""

import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.ranks import TIMEOUT, run
from benchmarks.report import Bar, Report, Row, arguments
from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Lowered,
    Placement,
    Schedule,
    get_family,
    lower,
)
from lightning_chimera.timeline import Costs, Span, Timeline, simulate

WARM_UP = 2
"""Steps that are not counted."""

QUICK = ("1f1b", "chimera_halving", "chimera_split", "chimera_split_v")
"""Schedules with one pipe and with two, with whole, halved and split backwards, and with several stages on a rank."""

_HEAD_START = 0.005
"""Seconds from the moment when the last rank is ready until all start."""


@dataclass(frozen=True)
class Pace:
    """How a world of sleeping ranks is measured.

    Attributes:
        unit: Seconds of F, I and W, each for an equal share of the model.
        boundary: Bytes of a message.
        steps: Steps that are counted.
    """

    unit: float = 0.02
    boundary: int = 64 * 1024
    steps: int = 5

    @property
    def costs(self) -> Costs:
        """How long each action sleeps."""
        return Costs(self.unit, 2 * self.unit, weight=self.unit)


class Sleep:
    """The work of a step whose actions sleep.

    Args:
        schedule: What is run.
        pace: How long actions sleep, and how large their messages are.
    """

    def __init__(self, schedule: Schedule, pace: Pace) -> None:
        self._costs, self._share = pace.costs, float(schedule.placement.share)
        self._takes, self._gives = set(schedule.producers), set(schedule.producers.values())
        self._whole = torch.zeros(2, pace.boundary // 8)

    def boundary(self, action: Action) -> Boundary:
        """Shape and type of what enters or leaves an action: one of two rows, where it works on half of them."""
        return Boundary(torch.Size((1 if action.half else 2, self._whole.shape[1])), self._whole.dtype)

    demand = boundary

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        """Waits for an action's input, sleeps, and returns what the next one takes."""
        if action in self._takes:
            incoming(self.boundary(action))
        time.sleep(self._costs.of(action, self._share))
        return self._whole[: self.boundary(action).shape[0]] if action in self._gives else None


def measure(schedule: Schedule, pace: Pace) -> tuple[list[Timeline], float]:
    """Runs a schedule in a world of its own.

    Returns:
        The timeline of each step that counts, and the latency of a message.
    """
    alone = one_microbatch(schedule.placement)
    total = (WARM_UP + pace.steps) * (simulate(schedule, pace.costs).makespan + simulate(alone, pace.costs).makespan)
    rows = run(_rank, [alone, schedule], pace, size=schedule.num_ranks, limit=60 + 4 * total)
    lone, steps = (
        [timeline(ran, [row[number][step] for row in rows]) for step in range(pace.steps)]
        for number, ran in enumerate([alone, schedule])
    )
    return steps, latency(lone)


def one_microbatch(placement: Placement) -> Schedule:
    """One microbatch, forward and backward through the first pipe of a placement."""
    rows: list[list[Action]] = [[] for _ in range(placement.num_ranks)]
    for stage in range(placement.num_stages):
        rows[placement.rank_of(stage)].append(Action(stage, Kind.FORWARD, 0))
    for stage in reversed(range(placement.num_stages)):
        rows[placement.rank_of(stage)].append(Action(stage, Kind.BACKWARD, 0))
    return Schedule("one microbatch", placement, 1, tuple(map(tuple, rows)))


def timeline(schedule: Schedule, rows: Sequence[Sequence[Span]]) -> Timeline:
    """The timeline of a step from what each rank has noted; its time starts with the first action of all."""
    origin = min(span.start for row in rows for span in row)
    spans = [span._replace(start=span.start - origin, end=span.end - origin) for row in rows for span in row]
    return Timeline(schedule.name, schedule.num_ranks, tuple(spans))


def latency(lone: Sequence[Timeline]) -> float:
    """The time from the end of an action to the start of the next on another rank, where none waits for its rank."""
    hops = []
    for step in lone:
        spans = sorted(step.spans, key=lambda span: span.start)
        hops += [taker.start - giver.end for giver, taker in pairwise(spans) if giver.rank != taker.rank]
    return statistics.median(hops)


def costs_of(steps: Sequence[Timeline], schedule: Schedule, latency: float) -> Costs:
    """What the actions took on average, for an equal share of the model; a backward is all that is no forward."""
    spent = dict.fromkeys(Kind, 0.0)
    counts = dict.fromkeys(Kind, 0)
    for span in (span for step in steps for span in step.spans):
        spent[span.action.kind] += span.duration
        counts[span.action.kind] += 1
    share = float(schedule.placement.share)
    forward = spent.pop(Kind.FORWARD) / counts[Kind.FORWARD] / share
    backward = sum(spent.values()) / counts[Kind.FORWARD] / share
    weight = spent[Kind.WEIGHT] / counts[Kind.WEIGHT] / share if counts[Kind.WEIGHT] else None
    return Costs(forward, backward, latency, weight)


# ---------------------------------------------------------------------------------------------------------------- rank


def _rank(schedules: Sequence[Schedule], pace: Pace) -> list[list[list[Span]]]:
    """Runs schedules of one placement on this rank; returns the spans of each step that counts, for each of them."""
    size = dist.get_world_size()
    topology = Topology.of_world(size, size, dist.get_rank())
    groups = Groups(topology, schedules[0].placement, [], TIMEOUT)
    links = Links(topology, groups.links, torch.device("cpu"), TIMEOUT)
    links.connect()
    executor = Executor(links, topology.position)
    return [_steps(lower(schedule), Sleep(schedule, pace), executor, pace.steps) for schedule in schedules]


def _steps(lowered: Lowered, work: Sleep, executor: Executor, num_steps: int) -> list[list[Span]]:
    kept = []
    for _ in range(WARM_UP + num_steps):
        start_together()
        executor.run(lowered, work)
        kept.append(executor.spans)
    return kept[WARM_UP:]


def start_together() -> None:
    """Sleeps until a moment that all ranks agree on; the processes of one machine share the clock of spans."""
    moment = torch.tensor(time.perf_counter() + _HEAD_START, dtype=torch.float64)
    dist.all_reduce(moment, op=dist.ReduceOp.MAX)
    time.sleep(max(0.0, moment.item() - time.perf_counter()))


# -------------------------------------------------------------------------------------------------------------- report


def cases(names: Sequence[str], num_ranks: int, *, quick: bool) -> Iterator[tuple[str, Schedule]]:
    """The schedules by name, with D and 2D microbatches; ``chimera_split``, whose bubble is promised, with 4D too."""
    for name in names:
        for units in (1,) if quick else (1, 2, 4) if name == "chimera_split" else (1, 2):
            try:
                yield name, SCHEDULES[name].build(num_ranks, units * num_ranks)
            except ValueError as error:
                print(f"left out: {name}, N = {units * num_ranks}: {error}", file=sys.stderr)


def judge(report: Report, name: str, schedule: Schedule, pace: Pace, *, limit: float | None) -> None:
    """Measures a schedule and adds its row and bars.

    Args:
        report: Takes both.
        name: The name of the schedule's family.
        schedule: What is run.
        pace: How it is measured.
        limit: The most that the makespan may differ from the simulated one; ``None`` for no bar on time.
    """
    steps, lost = measure(schedule, pace)
    simulated = simulate(schedule, costs_of(steps, schedule, lost))
    makespan = statistics.median(step.makespan for step in steps)
    peak = max(max(step.peak_activations) for step in steps)
    row = {
        "schedule": name,
        "N": schedule.num_microbatches,
        "measured_ms": makespan * 1e3,
        "simulated_ms": simulated.makespan * 1e3,
        "ratio": makespan / simulated.makespan,
        "bubble": statistics.median(step.bubble for step in steps),
        "simulated_bubble": simulated.bubble,
        "peak": float(peak),
        "schedule_peak": float(max(schedule.peak_activations)),
        **_durations(steps),
        "latency_ms": lost * 1e3,
    }
    report.rows.append(row)
    case = f"{name}, D = {schedule.num_ranks}, N = {schedule.num_microbatches}"
    report.bars.append(Bar(f"{case}: peak activations", row["peak"], row["schedule_peak"]))
    if limit is not None:
        report.bars.append(Bar(f"{case}: makespan against the simulated one", abs(row["ratio"] - 1), limit))
    if name == "chimera_split":
        report.bars += _promises(case, schedule, row, on_time=limit is not None)


def _durations(steps: Sequence[Timeline]) -> Row:
    """What actions of each kind took on average, and 0 where there is none."""
    found: dict[Kind, list[float]] = {kind: [] for kind in Kind}
    for span in (span for step in steps for span in step.spans):
        found[span.action.kind].append(span.duration * 1e3)
    return {f"{kind}_ms": statistics.fmean(times) if times else 0.0 for kind, times in found.items()}


def _promises(case: str, schedule: Schedule, row: Row, *, on_time: bool) -> Iterator[Bar]:
    """The bars of ``chimera_split``: each rank idles for D/2 - 1 units and keeps at most D activations."""
    ranks, count = schedule.num_ranks, schedule.num_microbatches
    ideal = 3 * count + ranks / 2 - 1
    idle = max(simulate(schedule, Costs(1.0, 2.0, weight=1.0)).idle)
    yield Bar(f"{case}: simulated bubble in units", idle, ranks / 2 - 1)
    yield Bar(f"{case}: peak activations against D", row["peak"], float(ranks))
    if on_time:
        units = row["measured_ms"] / statistics.fmean([row["F_ms"], row["I_ms"], row["W_ms"]])
        yield Bar(f"{case}: makespan against that of D/2 - 1 idle units", units / ideal - 1, 0.03)


def main() -> int:
    """Measures all schedules, or those that are named."""
    parser = arguments(__doc__)
    parser.add_argument("schedules", nargs="*", help="names of schedules; all of them by default")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks")
    parser.add_argument("--boundary", type=int, default=64, help="size of a message in KiB")
    parser.add_argument("--steps", type=int, default=5, help="steps that are counted")
    given = parser.parse_args()
    if min(given.ranks - 1, given.boundary, given.steps) < 1:
        parser.error("a pipeline has two ranks or more, a message 1 KiB or more, and one step or more is counted")
    try:
        names = [name for name in given.schedules if get_family(name)]
    except ValueError as error:
        parser.error(str(error))
    pace = Pace(0.02, given.boundary * 1024, given.steps)
    if given.quick:
        pace = Pace(0.002, given.boundary * 1024, min(given.steps, 2))
    report = Report(
        f"Schedules on {given.ranks} sleeping ranks, against the simulator",
        {"ranks": given.ranks, "boundary_kib": given.boundary, "steps": pace.steps, "unit_ms": pace.unit * 1e3},
    )
    limit = None if given.quick else 0.03 if given.ranks <= 4 else 0.05
    for name, schedule in cases(names or (QUICK if given.quick else tuple(SCHEDULES)), given.ranks, quick=given.quick):
        judge(report, name, schedule, pace, limit=limit)
        print(f"{name}, N = {schedule.num_microbatches}: {report.rows[-1]['ratio']:.3f}", file=sys.stderr, flush=True)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
