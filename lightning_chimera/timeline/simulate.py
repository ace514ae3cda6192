"""Simulates a schedule with given costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_chimera.schedules.action import Action, Kind, Schedule
from lightning_chimera.schedules.validate import validate
from lightning_chimera.timeline.timeline import Span, Timeline


@dataclass(frozen=True)
class Costs:
    """How long things take, in seconds or in any other unit of the caller.

    Attributes:
        forward: time of a forward: one number for all stages, or one for each.
        backward: time of a backward, in the same way.
        latency: time from the end of a compute until another rank has its output.

    Raises:
        ValueError: if a time is negative or not finite.
    """

    forward: float | Sequence[float] = 1.0
    backward: float | Sequence[float] = 2.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        """Check each time."""
        for noun in ("forward", "backward", "latency"):
            value = getattr(self, noun)
            for time in [value] if isinstance(value, int | float) else value:
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"The {noun} time must be a finite number, 0 or more; got {time}.")

    @classmethod
    def parse(cls, text: str, *, latency: float = 0.0) -> Costs:
        """Read ``F:B``, or ``F:I:W`` where a backward takes I + W (input gradient and weight gradient).

        Raises:
            ValueError: if the text has another form or holds a time that cannot be.
        """
        try:
            times = [float(time) for time in text.split(":")]
        except ValueError:
            times = []
        if len(times) not in (2, 3):
            raise ValueError(
                f"{text!r} is no cost: write F:B or F:I:W, a number for each letter, such as 1:2 or 1:1:1."
            )
        forward, *backward = times
        if not (forward > 0 and sum(backward) > 0 and min(backward) >= 0):
            raise ValueError(f"{text!r} is no cost: a forward and a backward take some time, and no part less than 0.")
        return cls(forward, sum(backward), latency)

    def of(self, action: Action) -> float:
        """Return how long an action takes."""
        times = self.forward if action.kind is Kind.FORWARD else self.backward
        return float(times if isinstance(times, int | float) else times[action.stage])


def simulate(schedule: Schedule, costs: Costs | None = None) -> Timeline:
    """Run a schedule on paper: each rank in row order, each action as soon as its rank is free and its input is there.

    Args:
        schedule: a schedule that ``validate`` accepts.
        costs: how long things take; a backward is twice a forward unless told otherwise.

    Raises:
        ScheduleError: if the schedule is not valid.
        ValueError: if the costs are of another number of stages.
    """
    costs = Costs() if costs is None else costs
    for noun, times in (("forward", costs.forward), ("backward", costs.backward)):
        if not isinstance(times, int | float) and len(times) != schedule.num_stages:
            raise ValueError(f"{len(times)} {noun} times for {schedule.num_stages} stages: give one, or one for each.")
    validate(schedule)

    ends: dict[Action, tuple[float, int]] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    # The schedule is valid, so every round moves at least one rank.
    while any(len(spans) < len(row) for spans, row in zip(rows, schedule.rows, strict=True)):
        for rank, spans in enumerate(rows):
            for action in schedule.rows[rank][len(spans) :]:
                arrival = _arrival(action, rank, schedule.num_stages, ends, costs.latency)
                if arrival is None:
                    break
                start = max(arrival, spans[-1].end if spans else 0.0)
                spans.append(Span(rank, action, start, start + costs.of(action)))
                ends[action] = (spans[-1].end, rank)
    return Timeline(schedule.name, schedule.num_ranks, tuple(span for spans in rows for span in spans))


def _arrival(
    action: Action, rank: int, num_stages: int, ends: dict[Action, tuple[float, int]], latency: float
) -> float | None:
    """Return when the input of an action is on its rank; None while its producer has not run."""
    producer = action.predecessor(num_stages)
    if producer is None:
        return 0.0
    if producer not in ends:
        return None
    end, source = ends[producer]
    return end + latency if source != rank else end
