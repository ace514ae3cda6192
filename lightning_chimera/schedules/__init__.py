"""Schedules: who runs what, in which order. Standard library only."""

from __future__ import annotations

import difflib
from typing import NamedTuple

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, render_grid
from lightning_chimera.schedules.chimera import chimera
from lightning_chimera.schedules.forward_only import forward_only
from lightning_chimera.schedules.gpipe import gpipe
from lightning_chimera.schedules.lowering import Instruction, Lowered, Message, Operation, lower
from lightning_chimera.schedules.one_f_one_b import one_f_one_b
from lightning_chimera.schedules.selection import Builder, Selection
from lightning_chimera.schedules.validate import ScheduleError, validate

__all__ = [
    "SCHEDULES",
    "Action",
    "Builder",
    "Family",
    "Instruction",
    "Kind",
    "Lowered",
    "Message",
    "Operation",
    "Placement",
    "Schedule",
    "ScheduleError",
    "Selection",
    "chimera",
    "default_num_microbatches",
    "forward_only",
    "get_family",
    "gpipe",
    "lower",
    "one_f_one_b",
    "render_grid",
    "select",
    "validate",
]


class Family(NamedTuple):
    """A kind of schedule that is known by name.

    Attributes:
        build: makes the schedule from a number of stages and a number of microbatches.
        microbatches_per_stage: the default number of microbatches, divided by the number of stages.
        summary: one line for people.
    """

    build: Builder
    microbatches_per_stage: int
    summary: str


SCHEDULES: dict[str, Family] = {
    "chimera": Family(chimera, 1, "Two opposite pipes: least bubble for few microbatches, two copies of each stage."),
    "gpipe": Family(gpipe, 2, "All forwards, then all backwards: the simplest, activations of all microbatches."),
    "1f1b": Family(one_f_one_b, 2, "One forward, one backward in turn: GPipe's bubble with bounded activations."),
}


def get_family(name: str) -> Family:
    """Return the schedule family of a name.

    Raises:
        ValueError: if no family has the name; it lists the known names and suggests the nearest.
    """
    if name in SCHEDULES:
        return SCHEDULES[name]
    nearest = difflib.get_close_matches(name.lower(), SCHEDULES, n=1)
    hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"There is no schedule {name!r}. Known schedules: {', '.join(SCHEDULES)}.{hint}")


def default_num_microbatches(name: str, num_stages: int) -> int:
    """Return the number of microbatches that a named schedule uses unless told otherwise.

    Raises:
        ValueError: if no family has the name.
    """
    return get_family(name).microbatches_per_stage * num_stages


def select(schedule: str | Builder | Schedule) -> Selection:
    """Return how to make the schedule that a user chose.

    Args:
        schedule: the name of a family, a function of (stages, microbatches), or a schedule.

    Raises:
        ValueError: if it is none of these, the name is not known, or the schedule is not valid.
    """
    if isinstance(schedule, str):
        family = get_family(schedule)
        return Selection(family.build, family.microbatches_per_stage)
    if isinstance(schedule, Schedule):
        return Selection.of_value(schedule)
    if callable(schedule):
        return Selection(schedule, 2)
    raise ValueError(
        f"schedule={schedule!r}: give the name of a schedule ({', '.join(SCHEDULES)}), a function of (stages,"
        " microbatches), or a Schedule."
    )
