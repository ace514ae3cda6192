"""Schedules of the product and those of torch.distributed.pipelining with stages that sleep, in turns in one run.

Each rank is a process of one world, in which all schedules take turns step by step, so that what else the machine does
falls on all of them. F, I and W take 20 ms for an equal share of the model on each rank, a whole backward 40 ms, and a
stage that is smaller its part of that; every message is a tensor of 1 MiB. The product runs as in the benchmark
`schedules`. torch runs its own stages, schedules and messages; its stages are modules whose forward sleeps and whose
backward sleeps in two nodes of autograd, one on the path to the input and one on the path to the weight, so that it
parts a backward as it parts that of any module. That of its first stage it never parts: what is I and W elsewhere is a
whole backward there, in the place of W. On neither side does an action copy or compute anything.

The makespan is the median of the time from the start of the first action to the end of the last one, over all ranks;
the ideal is that of the simulator with the 20 ms and no latency, for torch with the order in which it was seen to run
its actions; the ratio is one over the other. `simulated` is the simulator with what the product's actions took, and
with the latency of a message as one microbatch alone finds it. Peak is the most activations on a rank, weights what the
rank with the most holds of them, both in units of an equal share of the model for each rank. `work` is what a rank's
actions took for each microbatch, 60 ms and what sleeping adds. Where torch refuses a number of microbatches, what it
says stands in place of the figures.
"""

import functools
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from time import perf_counter, sleep
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from benchmarks.ranks import TIMEOUT, run
from benchmarks.report import Bar, Report, Row, arguments
from benchmarks.schedules import (
    WARM_UP,
    Pace,
    Sleep,
    costs_of,
    latency,
    one_microbatch,
    start_together,
    timeline,
)
from lightning_chimera.runtime.executor import Executor
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.schedules import SCHEDULES, Action, Kind, Placement, Schedule, lower
from lightning_chimera.timeline import Span, Timeline, simulate

OURS = ("gpipe", "1f1b", "interleaved", "zb_v", "chimera", "chimera_split", "chimera_split_v")

PEERS: dict[str, Callable[[int], Placement]] = {
    "GPipe": Placement.down,
    "1F1B": Placement.down,
    "Interleaved1F1B": functools.partial(Placement.interleaved, num_chunks=2),
    "ZBVZeroBubble": Placement.zigzag,
    "InterleavedZeroBubble": functools.partial(Placement.interleaved, num_chunks=2),
    "DualPipeV": Placement.zigzag,
}
"""Where torch's schedules put their stages. The order is that of the turns, each after one of ours."""

SAME = {"gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zb_v": "ZBVZeroBubble"}
"""Schedules that both sides have."""

QUICK = ("1f1b", "zb_v", "chimera_split", "1F1B", "ZBVZeroBubble", "DualPipeV")
"""Whole and split backwards on both sides, and one that torch refuses for few microbatches."""

ADVANTAGE = {(4, 4): 0.80, (4, 8): 0.90, (4, 16): 0.92}
"""By ranks and microbatches, the most that our best makespan may be of torch's best."""

Spans = list[Span]
Steps = list[Spans]


class Candidate(NamedTuple):
    """A schedule that takes its turns.

    Attributes:
        name: What its side calls it.
        placement: Which rank runs which stage.
        schedule: What is run, where it is ours; torch makes its own.
    """

    name: str
    placement: Placement
    schedule: Schedule | None


@dataclass(frozen=True)
class Result:
    """What came of a candidate's turns.

    Attributes:
        name: What its side calls it.
        is_ours: Whether it is not torch's.
        schedule: What was run.
        steps: Each step that counts.
        latency: The latency of a message in its placement, where it is ours.
    """

    name: str
    is_ours: bool
    schedule: Schedule
    steps: list[Timeline]
    latency: float = 0.0

    @property
    def makespan(self) -> float:
        """The median over the steps, in seconds."""
        return statistics.median(step.makespan for step in self.steps)

    @property
    def simulated(self) -> float:
        """The makespan on paper, with actions and messages that take what they took."""
        return simulate(self.schedule, costs_of(self.steps, self.schedule, self.latency)).makespan

    @property
    def work(self) -> float:
        """What a rank's actions took for each microbatch, in seconds."""
        total = sum(span.duration for step in self.steps for span in step.spans)
        return total / len(self.steps) / self.schedule.num_ranks / self.schedule.num_microbatches

    @property
    def peak(self) -> float:
        """The most activations on any rank in any step."""
        return float(max(max(step.peak_activations) for step in self.steps))


class Refusal(NamedTuple):
    """What torch says of a schedule that it does not run.

    Attributes:
        name: The schedule.
        message: What torch says.
    """

    name: str
    message: str


# ---------------------------------------------------------------------------------------------------------------- peer


class SleepingStage(nn.Module):
    """A stage for torch that sleeps, forward and backward.

    Args:
        stage: Its number.
        placement: The placement of all stages.
        pace: How long it sleeps, and how large its messages are.
        rank: The rank that it is on.
    """

    def __init__(self, stage: int, placement: Placement, pace: Pace, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self._stage, self._rank = stage, rank
        self._costs, self._share = pace.costs, float(placement.share)
        self._message = torch.zeros(1, pace.boundary // 4)
        self._output = torch.zeros(1, 1) if stage == placement.num_stages - 1 else self._message
        self._spans: Spans = []
        self._next = 0
        self._input: Span | None = None

    def begin(self, spans: Spans) -> None:
        """Starts a step, whose actions are noted in the list given."""
        self._spans, self._next = spans, 0

    def forward(self, entered: Tensor) -> Tensor:
        """Sleeps, and returns what the next stage takes."""
        microbatch, self._next = self._next, self._next + 1
        self._sleep(Kind.FORWARD, microbatch)
        weight = _Weight.apply(self.weight, self, microbatch, not entered.requires_grad)  # type: ignore[no-untyped-call]
        entered = _Input.apply(entered, self, microbatch)  # type: ignore[no-untyped-call]
        left: Tensor = _Join.apply(entered, weight, self)  # type: ignore[no-untyped-call]
        return left

    @property
    def output(self) -> Tensor:
        """What leaves the stage: always the same values, in a tensor of its own that autograd may keep."""
        return self._output.data

    def back(self) -> Tensor:
        """Enters a backward, or a part of one; returns the gradient of what entered the stage."""
        self._input = None
        return self._message.data

    def input_gradient(self, microbatch: int) -> None:
        """Sleeps as long as the gradient of the input takes."""
        self._input = self._sleep(Kind.INPUT, microbatch)

    def weight_gradient(self, microbatch: int, *, whole: bool) -> None:
        """Sleeps as long as the gradient of the weight takes; it is a whole backward where the input's came with it."""
        span = self._sleep(Kind.BACKWARD if whole else Kind.WEIGHT, microbatch)
        if self._input is not None:
            action = span.action._replace(kind=Kind.BACKWARD)
            self._spans[-2:] = [span._replace(action=action, start=self._input.start)]

    def _sleep(self, kind: Kind, microbatch: int) -> Span:
        action = Action(self._stage, kind, microbatch)
        start = perf_counter()
        sleep(self._costs.of(action, self._share))
        span = Span(self._rank, action, start, perf_counter())
        self._spans.append(span)
        return span


class _Join(Function):
    """Where the paths to input and weight part: torch runs it in both halves of a backward."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, weight: Tensor, stage: SleepingStage) -> Tensor:
        ctx.stage, ctx.to_input = stage, entered.requires_grad
        return stage.output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        entered = ctx.stage.back()
        return entered if ctx.to_input else None, torch.zeros(1), None


class _Input(Function):
    """The path to what entered the stage."""

    @staticmethod
    def forward(ctx: Any, entered: Tensor, stage: SleepingStage, microbatch: int) -> Tensor:
        ctx.stage, ctx.microbatch = stage, microbatch
        return entered.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.stage.input_gradient(ctx.microbatch)
        return gradients[0], None, None


class _Weight(Function):
    """The path to the weight."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, stage: SleepingStage, microbatch: int, whole: bool) -> Tensor:
        ctx.stage, ctx.microbatch, ctx.whole = stage, microbatch, whole
        return weight.data

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        ctx.stage.weight_gradient(ctx.microbatch, whole=ctx.whole)
        return gradients[0], None, None, None


# ---------------------------------------------------------------------------------------------------------------- rank


def _our_turn(schedule: Schedule, pace: Pace, executor: Executor) -> Callable[[], Spans]:
    """Makes ready a schedule of ours; returns what runs a step of it on this rank."""
    lowered, work = lower(schedule), Sleep(schedule, pace)

    def step() -> Spans:
        executor.run(lowered, work)
        return executor.spans

    return step


def _their_turn(name: str, placement: Placement, num_microbatches: int, pace: Pace, rank: int) -> Callable[[], Spans]:
    """Makes ready a schedule of torch's; returns what runs a step of it on this rank.

    Raises:
        ValueError: If torch refuses it.
    """
    numbers = placement.stages_of(rank)
    modules = [SleepingStage(number, placement, pace, rank) for number in numbers]
    stages = [
        PipelineStage(module, number, placement.num_stages, torch.device("cpu"))
        for module, number in zip(modules, numbers, strict=True)
    ]
    schedule = get_schedule_class(name)(
        stages[0] if placement.share == 1 else stages,
        num_microbatches,
        loss_fn=lambda output, _: output.sum(),
    )
    entering = [torch.zeros(num_microbatches, 1)] if 0 in numbers else []
    target = torch.zeros(num_microbatches, 1) if placement.num_stages - 1 in numbers else None

    def step() -> Spans:
        spans: Spans = []
        for module in modules:
            module.begin(spans)
        schedule.step(*entering, target=target, return_outputs=False)
        return spans

    return step


def _rank(candidates: Sequence[Candidate], num_microbatches: int, pace: Pace) -> list[Steps | str]:
    """Runs all candidates in turns on this rank; returns each one's steps that count, or how torch refused it."""
    rank, size = dist.get_rank(), dist.get_world_size()
    topology = Topology.of_world(size, size, rank)
    executors: dict[Placement, Executor] = {}
    turns: dict[int, Callable[[], Spans]] = {}
    found: list[Steps | str] = []
    for number, candidate in enumerate(candidates):
        found.append([])
        try:
            if candidate.schedule is None:
                turns[number] = _their_turn(candidate.name, candidate.placement, num_microbatches, pace, rank)
                continue
        except ValueError as error:
            found[number] = " ".join(str(error).split())
            continue
        if candidate.placement not in executors:
            groups = Groups(topology, candidate.placement, [], TIMEOUT)
            links = Links(topology, groups.links, torch.device("cpu"), TIMEOUT)
            links.connect()
            executors[candidate.placement] = Executor(links, topology.position)
        turns[number] = _our_turn(candidate.schedule, pace, executors[candidate.placement])
    for count in range(WARM_UP + pace.steps):
        for number, step in turns.items():
            start_together()
            spans = step()
            steps = found[number]
            if count >= WARM_UP and not isinstance(steps, str):
                steps.append(spans)
    return found


# -------------------------------------------------------------------------------------------------------------- report


def candidates_of(names: Sequence[str], num_ranks: int, num_microbatches: int) -> list[Candidate]:
    """The schedules by name, one of ours and one of torch's in turn."""
    ours = {name: SCHEDULES[name].build(num_ranks, num_microbatches) for name in OURS if name in names}
    theirs = {name: placement(num_ranks) for name, placement in PEERS.items() if name in names}
    turns = zip_longest(
        (Candidate(name, schedule.placement, schedule) for name, schedule in ours.items()),
        (Candidate(name, placement, None) for name, placement in theirs.items()),
    )
    return [candidate for pair in turns for candidate in pair if candidate is not None]


def measure(
    candidates: Sequence[Candidate], num_ranks: int, num_microbatches: int, pace: Pace
) -> Iterator[Result | Refusal]:
    """Runs candidates in turns in one world; yields what came of each, or how torch refused it."""
    placements = {candidate.placement: None for candidate in candidates if candidate.schedule is not None}
    alone = {placement: one_microbatch(placement) for placement in placements}
    lone = [Candidate(schedule.name, placement, schedule) for placement, schedule in alone.items()]
    work = 3 * pace.unit * (num_microbatches + 2 * num_ranks)
    total = (WARM_UP + pace.steps) * work * (len(candidates) + len(lone))
    rows = run(_rank, [*lone, *candidates], num_microbatches, pace, size=num_ranks, limit=60 + 4 * total)

    def steps_of(number: int, schedule: Schedule) -> list[Timeline]:
        return [timeline(schedule, [row[number][step] for row in rows]) for step in range(pace.steps)]

    latencies = {
        placement: latency(steps_of(number, schedule)) for number, (placement, schedule) in enumerate(alone.items())
    }
    for number, candidate in enumerate(candidates, start=len(lone)):
        if isinstance(rows[0][number], str):
            yield Refusal(candidate.name, rows[0][number])
            continue
        is_ours = candidate.schedule is not None
        schedule = candidate.schedule or _seen(candidate, num_microbatches, [row[number] for row in rows])
        steps = steps_of(number, schedule)
        yield Result(candidate.name, is_ours, schedule, steps, latencies[candidate.placement] if is_ours else 0.0)


def _seen(candidate: Candidate, num_microbatches: int, ranks: Sequence[Steps]) -> Schedule:
    """What torch ran on each rank in each step.

    Raises:
        RuntimeError: If it was not the same in each.
    """
    rows = []
    for steps in ranks:
        row, *others = {tuple(span.action for span in spans) for spans in steps}
        if others:
            raise RuntimeError(f"{candidate.name} did not run its actions in the same order in each step.")
        rows.append(row)
    return Schedule(candidate.name, candidate.placement, num_microbatches, tuple(rows))


def row_of(result: Result, pace: Pace) -> Row:
    """The figures of a schedule."""
    ideal = simulate(result.schedule, pace.costs).makespan
    simulated = result.simulated if result.is_ours else None
    return {
        "schedule": result.name,
        "runtime": "ours" if result.is_ours else "torch",
        "N": result.schedule.num_microbatches,
        "makespan_ms": result.makespan * 1e3,
        "ideal_ms": ideal * 1e3,
        "ratio": result.makespan / ideal,
        "simulated_ms": None if simulated is None else simulated * 1e3,
        "to_simulated": None if simulated is None else result.makespan / simulated,
        "peak": result.peak,
        "weights": float(max(result.schedule.placement.weight_copies)),
        "work_ms": result.work * 1e3,
        "refused": "",
    }


def bars_of(results: Sequence[Result], limit: float | None) -> Iterator[Bar]:
    """The bars on the results of one number of microbatches.

    Args:
        results: All that ran.
        limit: The most that a makespan may differ from the simulated one; ``None`` for no bar on time.
    """
    ours = {result.name: result for result in results if result.is_ours}
    theirs = {result.name: result for result in results if not result.is_ours}
    for name, result in ours.items():
        case = f"{name}, D = {result.schedule.num_ranks}, N = {result.schedule.num_microbatches}"
        yield Bar(f"{case}: peak activations", result.peak, float(max(result.schedule.peak_activations)))
        if limit is None:
            continue
        yield Bar(f"{case}: makespan against the simulated one", abs(result.makespan / result.simulated - 1), limit)
        if SAME.get(name) in theirs:
            yield Bar(f"{case}: makespan against torch's", result.makespan / theirs[SAME[name]].makespan, 1.0)
    schedule = results[0].schedule
    size = schedule.num_ranks, schedule.num_microbatches
    light = [result for result in ours.values() if max(result.schedule.placement.weight_copies) <= 2]
    if limit is not None and size in ADVANTAGE and light and theirs:
        best, other = (min(side, key=lambda result: result.makespan) for side in (light, list(theirs.values())))
        case = f"our best ({best.name}) against torch's ({other.name}), D = {size[0]}, N = {size[1]}"
        yield Bar(case, best.makespan / other.makespan, ADVANTAGE[size])


def judge(
    report: Report, names: Sequence[str], num_ranks: int, num_microbatches: int, pace: Pace, *, quick: bool
) -> None:
    """Measures schedules with one number of microbatches and adds their rows and bars."""
    found = list(measure(candidates_of(names, num_ranks, num_microbatches), num_ranks, num_microbatches, pace))
    results = [each for each in found if isinstance(each, Result)]
    if not results:
        print(f"N = {num_microbatches}: nothing runs; {found}", file=sys.stderr)
        return
    rows = {result.name: row_of(result, pace) for result in results}
    for name, message in (each for each in found if isinstance(each, Refusal)):
        known = {"schedule": name, "runtime": "torch", "N": num_microbatches, "refused": message}
        rows[name] = dict.fromkeys(next(iter(rows.values()))) | known
    report.rows += [rows[name] for name in (*OURS, *PEERS) if name in rows]
    report.bars += bars_of(results, None if quick else 0.03 if num_ranks <= 4 else 0.05)


def main() -> int:
    """Measures all schedules with D, 2D and 4D microbatches."""
    parser = arguments(__doc__)
    parser.add_argument("schedules", nargs="*", help="names of schedules, ours and torch's; all of them by default")
    parser.add_argument("--ranks", type=int, default=4, help="number of ranks, D")
    parser.add_argument("--units", type=int, nargs="+", default=[1, 2, 4], help="microbatches, in units of the ranks")
    parser.add_argument("--boundary", type=int, default=1024, help="size of a message in KiB")
    parser.add_argument("--steps", type=int, default=10, help="steps that are counted")
    given = parser.parse_args()
    if min(given.ranks - 1, *given.units, given.boundary, given.steps) < 1:
        parser.error("a pipeline has two ranks or more, a message 1 KiB or more, and one step or more is counted")
    if given.ranks % 2:
        parser.error(f"opposite pipes need an even number of ranks; got {given.ranks}")
    unknown = [name for name in given.schedules if name not in (*OURS, *PEERS)]
    if unknown:
        parser.error(f"no such schedule here: {', '.join(unknown)}; there are {', '.join((*OURS, *PEERS))}")
    pace, units = Pace(0.02, given.boundary * 1024, given.steps), given.units
    if given.quick:
        pace, units = Pace(0.002, given.boundary * 1024, min(given.steps, 2)), [1]
    report = Report(
        f"Schedules on {given.ranks} sleeping ranks, ours and torch's",
        {"ranks": given.ranks, "boundary_kib": given.boundary, "steps": pace.steps, "unit_ms": pace.unit * 1e3},
    )
    names = given.schedules or (QUICK if given.quick else (*OURS, *PEERS))
    for unit in units:
        judge(report, names, given.ranks, unit * given.ranks, pace, quick=given.quick)
        print(f"N = {unit * given.ranks} is measured", file=sys.stderr, flush=True)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
