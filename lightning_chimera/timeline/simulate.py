"""Simulates a schedule with given costs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_chimera.schedules.action import Action, Kind, Schedule
from lightning_chimera.schedules.validate import validate
from lightning_chimera.timeline.timeline import Span, Timeline

Time = float | Sequence[float]


@dataclass(frozen=True)
class Costs:
    """How long things take, in seconds or in any other unit of the caller.

    Attributes:
        forward: time of a forward: for each stage, or one number for an equal share of the model for each rank, of
            which a stage takes its part where a pipe has several stages on a rank.
        backward: time of a whole backward, in the same way.
        latency: time from the end of a compute until another rank has its output.
        weight: the part of a backward that the weight gradients take, in the same way; half of it unless told
            otherwise. The rest is the input gradient.

    Raises:
        ValueError: if a time is negative or not finite, or a part takes longer than the whole backward.
    """

    forward: Time = 1.0
    backward: Time = 2.0
    latency: float = 0.0
    weight: Time | None = None

    def __post_init__(self) -> None:
        """Check each time."""
        for noun in ("forward", "backward", "latency", "weight"):
            value = getattr(self, noun)
            for time in [0.0 if value is None else value] if isinstance(value, int | float | None) else value:
                if not (math.isfinite(time) and time >= 0):
                    raise ValueError(f"The {noun} time must be a finite number, 0 or more; got {time}.")
        if self.weight is not None:
            stages = max((len(time) for time in (self.backward, self.weight) if isinstance(time, Sequence)), default=1)
            for stage in range(stages):
                part, whole = _of_stage(self.weight, stage), _of_stage(self.backward, stage)
                if part > whole:
                    raise ValueError(f"The weight time is a part of the backward time; got {part} of {whole}.")

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
        return cls(forward, sum(backward), latency, backward[1] if len(backward) == 2 else None)

    def of(self, action: Action, share: float = 1.0) -> float:
        """Return how long an action takes, where a stage is the given part of an equal share of the model."""
        if action.kind is Kind.FORWARD:
            return _of_stage(self.forward, action.stage, share)
        whole = _of_stage(self.backward, action.stage, share)
        if action.kind is Kind.BACKWARD:
            return whole / 2 if action.half else whole
        weight = whole / 2 if self.weight is None else _of_stage(self.weight, action.stage, share)
        return weight if action.kind is Kind.WEIGHT else whole - weight


def _of_stage(time: Time, stage: int, share: float = 1.0) -> float:
    return float(time[stage] if isinstance(time, Sequence) else time * share)


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
    for noun, times in (("forward", costs.forward), ("backward", costs.backward), ("weight", costs.weight)):
        if isinstance(times, Sequence) and len(times) != schedule.num_stages:
            raise ValueError(f"{len(times)} {noun} times for {schedule.num_stages} stages: give one, or one for each.")
    validate(schedule)

    share = float(schedule.placement.share)
    ends: dict[Action, tuple[float, int]] = {}
    rows: list[list[Span]] = [[] for _ in schedule.rows]
    # The schedule is valid, so every round moves at least one rank.
    while any(len(spans) < len(row) for spans, row in zip(rows, schedule.rows, strict=True)):
        for rank, spans in enumerate(rows):
            for action in schedule.rows[rank][len(spans) :]:
                arrival = _arrival(schedule.producers.get(action), rank, ends, costs.latency)
                if arrival is None:
                    break
                start = max(arrival, spans[-1].end if spans else 0.0)
                spans.append(Span(rank, action, start, start + costs.of(action, share)))
                ends[action] = (spans[-1].end, rank)
    return Timeline(schedule.name, schedule.num_ranks, tuple(span for spans in rows for span in spans))


def _arrival(producer: Action | None, rank: int, ends: dict[Action, tuple[float, int]], latency: float) -> float | None:
    """Return when the output of an action is on a rank; None while the action has not run."""
    if producer is None:
        return 0.0
    if producer not in ends:
        return None
    end, source = ends[producer]
    return end + latency if source != rank else end
