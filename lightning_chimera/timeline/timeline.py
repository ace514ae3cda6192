"""Timelines: start and end of every action, simulated or measured, as a value."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple

from lightning_chimera.schedules.action import Action, count_activations, plain


class Span(NamedTuple):
    """One action on one rank, with its start and end in seconds."""

    rank: int
    action: Action
    start: float
    end: float

    @property
    def duration(self) -> float:
        """Seconds from start to end."""
        return self.end - self.start


class SyncSpan(NamedTuple):
    """The all-reduce of the gradients of stages over the ranks that hold them, with its start and end in seconds.

    A measured one is that of one rank: each has its own start.
    """

    stages: tuple[int, ...]
    ranks: tuple[int, ...]
    start: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """When each action of a step ran. Time is in seconds and starts at 0.

    Attributes:
        name: what was run, such as the name of the schedule.
        num_ranks: number of ranks, idle ones included.
        spans: the actions; those of one rank do not overlap.
        labels: what the ranks are called in pictures, if it is not ``rank 0``, ``rank 1``, ...
        syncs: the all-reduces of gradients, which run beside the actions; see ``synchronize``.

    Raises:
        ValueError: if a span is on a rank that does not exist, or ends before it starts, or not every rank has a label.
    """

    name: str
    num_ranks: int
    spans: tuple[Span, ...]
    labels: tuple[str, ...] = ()
    syncs: tuple[SyncSpan, ...] = ()

    def __post_init__(self) -> None:
        """Check each span, and the labels."""
        if self.labels and len(self.labels) != self.num_ranks:
            raise ValueError(f"{len(self.labels)} labels for {self.num_ranks} ranks: give one a rank, or none.")
        for span in self.spans:
            if not 0 <= span.rank < self.num_ranks:
                raise ValueError(f"{span.action} is on rank {span.rank}, but there are {self.num_ranks} ranks.")
            if not 0 <= span.start <= span.end:
                raise ValueError(f"{span.action} on rank {span.rank} runs from {span.start} to {span.end}.")

    def label(self, rank: int) -> str:
        """Return what a rank is called in pictures."""
        return self.labels[rank] if self.labels else f"rank {rank}"

    def of_rank(self, rank: int) -> tuple[Span, ...]:
        """Return the spans of one rank in the order of time."""
        return tuple(
            sorted((span for span in self.spans if span.rank == rank), key=lambda span: (span.start, span.end))
        )

    @property
    def makespan(self) -> float:
        """Seconds until the last action ends."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def end(self) -> float:
        """Seconds until the last action and the last all-reduce have ended."""
        return max([self.makespan, *(sync.end for sync in self.syncs)])

    @property
    def busy(self) -> tuple[float, ...]:
        """For each rank, the seconds that it spends in actions."""
        return tuple(math.fsum(span.duration for span in self.of_rank(rank)) for rank in range(self.num_ranks))

    @property
    def idle(self) -> tuple[float, ...]:
        """For each rank, the seconds of the makespan that it spends in no action."""
        makespan = self.makespan
        return tuple(makespan - busy for busy in self.busy)

    @property
    def bubble(self) -> float:
        """The idle part of the makespan, from 0 to 1, averaged over the ranks."""
        makespan = self.makespan
        return math.fsum(self.idle) / (self.num_ranks * makespan) if makespan else 0.0

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most activations at one time, in the unit of ``Schedule.peak_activations``."""
        share = Fraction(
            self.num_ranks, 1 + max((span.action.stage for span in self.spans), default=self.num_ranks - 1)
        )
        rows = (tuple(span.action for span in self.of_rank(rank)) for rank in range(self.num_ranks))
        return tuple(plain(max(count_activations(row), default=Fraction()) * share) for row in rows)


def upward_stages(timeline: Timeline) -> frozenset[tuple[int, int]]:
    """Return the pairs of pipe and stage that a pipe passes on its way from higher to lower ranks.

    A stage goes the way that its pipe has come to it; where the pipe begins or turns on a rank, the way it goes on. A
    step over several ranks is one around the end of the ranks.
    """
    ranks = {(span.action.pipe, span.action.stage): span.rank for span in timeline.spans}
    upward = set()
    for (pipe, stage), rank in ranks.items():
        step = rank - ranks.get((pipe, stage - 1), rank) or ranks.get((pipe, stage + 1), rank) - rank
        if step == -1 or step > 1:
            upward.add((pipe, stage))
    return frozenset(upward)


class Grid(NamedTuple):
    """A timeline cut into columns of equal length.

    Attributes:
        column: length of a column in seconds.
        rows: ``rows[rank][column]`` is an action, or None where the rank idles.
    """

    column: float
    rows: tuple[tuple[Action | None, ...], ...]


def sample(timeline: Timeline) -> Grid:
    """Cut a timeline into columns, as narrow as its shortest action or, where that makes them exact, up to four times.

    A column shows what runs in its middle, so that every action is seen even where starts and ends do not fit.
    """
    shortest = min((span.duration for span in timeline.spans if span.duration > 0), default=1.0)
    times = {time for span in timeline.spans for time in (span.start, span.end)}
    fitting = (
        shortest / parts
        for parts in (1, 2, 3, 4)
        if all(abs(time * parts / shortest - round(time * parts / shortest)) < 1e-6 for time in times)
    )
    column = next(fitting, shortest)
    num_columns = math.ceil(timeline.makespan / column - 0.5 - 1e-6)
    return Grid(
        column, tuple(_sampled(timeline.of_rank(rank), column, num_columns) for rank in range(timeline.num_ranks))
    )


def _sampled(spans: tuple[Span, ...], column: float, num_columns: int) -> tuple[Action | None, ...]:
    row: list[Action | None] = [None] * num_columns
    for span in spans:
        # The middle of column i lies in the span where start <= (i + 1/2) * column < end.
        first, end = (math.ceil(time / column - 0.5 - 1e-6) for time in (span.start, span.end))
        row[first:end] = [span.action] * (end - first)
    return tuple(row)


def cell_text(action: Action | None) -> str:
    """Return what a cell of a time grid shows: ``F2`` for the forward of microbatch 2, ``.`` for an idle rank."""
    return f"{action.kind}{action.microbatch}{action.half}" if action else "."


def render_timeline(timeline: Timeline) -> str:
    """Draw a timeline as text, a line for each rank and a cell for each column of ``sample``."""
    grid = sample(timeline)
    width = max((len(cell_text(action)) for row in grid.rows for action in row), default=1)
    lines = (
        " ".join([f"rank {rank} ", *(cell_text(action).ljust(width) for action in row)])
        for rank, row in enumerate(grid.rows)
    )
    return "\n".join(line.rstrip() for line in lines)
