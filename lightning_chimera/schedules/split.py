"""Splits the backwards of a schedule in two: the input gradient, which others wait for, and the weight gradient.

``split_in_place`` keeps the order. ``fill`` runs weight gradients where a rank would idle or holds as much as it may.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lightning_chimera.schedules.action import Action, Kind, Schedule, producers


def split_in_place(schedule: Schedule, name: str) -> Schedule:
    """Return a schedule in which each backward is an input gradient directly followed by its weight gradient."""
    rows = tuple(tuple(part for action in row for part in _parts(action)) for row in schedule.rows)
    return dataclasses.replace(schedule, name=name, rows=rows)


def fill(schedule: Schedule, name: str, max_held: int) -> Schedule:
    """Return a schedule in which input gradients stand for the backwards and weight gradients fill the gaps.

    The order is found on paper, with equal times of forward, input gradient and weight gradient: a free rank runs its
    next action if the input is there and, for a forward, if it holds less than it may; else a weight gradient that
    waits, or a later input gradient if only that can make room; what is left comes at the end. Of the weight gradients
    that wait, the stage with the largest index comes first: only its all-reduce can still hide behind the others.

    Args:
        schedule: a schedule with whole backwards.
        name: the name of the new one.
        max_held: most forwards of stages at one time on a rank whose weight gradient has not run.

    Raises:
        ValueError: if ranks that hold no more can not finish any microbatch.
    """
    ranks = [_Rank([_parts(action)[0] for action in row], max_held) for row in schedule.rows]
    takes = producers(action for rank in ranks for action in rank.skeleton)
    ends: dict[Action, int] = {}
    now = 0
    while any(rank.is_unfinished for rank in ranks):
        started = [action for rank in ranks if (action := rank.next_action(takes, ends, now)) is not None]
        ends.update(dict.fromkeys(started, now + 1))
        if not started:
            raise ValueError(
                f"Schedule {name} cannot run where a rank holds at most {max_held} forwards: all ranks wait for each"
                " other. Allow more."
            )
        now += 1
    return dataclasses.replace(schedule, name=name, rows=tuple(tuple(rank.row) for rank in ranks))


@dataclasses.dataclass
class _Rank:
    """A rank on paper."""

    skeleton: list[Action]
    max_held: int
    row: list[Action] = dataclasses.field(default_factory=list)
    waiting: list[Action] = dataclasses.field(default_factory=list)
    held: int = 0

    @property
    def is_unfinished(self) -> bool:
        return bool(self.skeleton or self.waiting)

    def next_action(self, takes: Mapping[Action, Action], ends: Mapping[Action, int], now: int) -> Action | None:
        """Start the next action, if any can start now, and return it."""

        def has_input(action: Action) -> bool:
            return action not in takes or ends.get(takes[action], now + 1) <= now

        if self.skeleton:
            action = self.skeleton[0]
            is_full = action.kind is Kind.FORWARD and self.held >= self.max_held
            if is_full and not self.waiting:
                # Nothing else can make room.
                ready = (later for later in self.skeleton if later.kind is Kind.INPUT and self._is_held(later))
                action = next(filter(has_input, ready), action)
                is_full = action.kind is Kind.FORWARD
            if has_input(action) and not is_full:
                self._run_skeleton(action)
                return action
        if not self.waiting:
            return None
        action = max(self.waiting, key=lambda weight: weight.stage)
        self.waiting.remove(action)
        self.held -= 1
        self.row.append(action)
        return action

    def _is_held(self, action: Action) -> bool:
        """Return whether the forward of an input gradient has run."""
        return action._replace(kind=Kind.FORWARD) in self.row

    def _run_skeleton(self, action: Action) -> None:
        self.skeleton.remove(action)
        self.row.append(action)
        if action.kind is Kind.FORWARD:
            self.held += 1
        else:
            self.waiting.append(action._replace(kind=Kind.WEIGHT))


def _parts(action: Action) -> tuple[Action, ...]:
    if action.kind is not Kind.BACKWARD:
        return (action,)
    return (action._replace(kind=Kind.INPUT), action._replace(kind=Kind.WEIGHT))
