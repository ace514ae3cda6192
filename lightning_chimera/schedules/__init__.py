"""Schedules: who runs what, in which order. Standard library only."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Callable
from typing import NamedTuple

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, producers, render_grid
from lightning_chimera.schedules.chimera import chimera
from lightning_chimera.schedules.chimera_doubling import chimera_doubling
from lightning_chimera.schedules.chimera_greedy import chimera_greedy
from lightning_chimera.schedules.chimera_halving import chimera_halving
from lightning_chimera.schedules.chimera_split import chimera_split, chimera_split_in_place, chimera_split_v
from lightning_chimera.schedules.dualpipe import dualpipe, dualpipe_v
from lightning_chimera.schedules.forward_only import forward_only
from lightning_chimera.schedules.gems import gems
from lightning_chimera.schedules.gpipe import gpipe
from lightning_chimera.schedules.hanayo import hanayo
from lightning_chimera.schedules.interleaved import interleaved
from lightning_chimera.schedules.lowering import Instruction, Lowered, Message, Operation, lower
from lightning_chimera.schedules.one_f_one_b import depths_that_hide, one_f_one_b, one_f_one_b_pb, one_f_one_b_so
from lightning_chimera.schedules.reading import parse_table, read_schedule
from lightning_chimera.schedules.selection import Builder, Selection
from lightning_chimera.schedules.v_shaped import v_half, v_min, zb_v
from lightning_chimera.schedules.validate import ScheduleError, validate
from lightning_chimera.schedules.zero_bubble import zb_h1, zb_h2

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
    "chimera_doubling",
    "chimera_greedy",
    "chimera_halving",
    "chimera_split",
    "chimera_split_in_place",
    "chimera_split_v",
    "default_num_microbatches",
    "depths_that_hide",
    "dualpipe",
    "dualpipe_v",
    "forward_only",
    "gems",
    "get_family",
    "gpipe",
    "hanayo",
    "interleaved",
    "lower",
    "one_f_one_b",
    "one_f_one_b_pb",
    "one_f_one_b_so",
    "parse_table",
    "producers",
    "read_schedule",
    "render_grid",
    "select",
    "v_half",
    "v_min",
    "validate",
    "zb_h1",
    "zb_h2",
    "zb_v",
]


class Family(NamedTuple):
    """A kind of schedule that is known by name.

    Attributes:
        build: makes the schedule from a number of ranks and a number of microbatches; a rank runs one stage of a pipe
            unless the schedule gives it several.
        microbatches_per_rank: the default number of microbatches, divided by the number of ranks.
        summary: one line for people.
        option: what else ``build`` takes, by keyword: ``pipes`` or ``chunks``; empty for nothing.
        short: what runs a batch of too few rows where ``build`` needs many microbatches; its stages are placed alike.
    """

    build: Callable[..., Schedule]
    microbatches_per_rank: int
    summary: str
    option: str = ""
    short: Builder | None = None


SCHEDULES: dict[str, Family] = {
    "chimera": Family(
        chimera, 1, "Two opposite pipes: least bubble for few microbatches, two copies of each stage.", "pipes"
    ),
    "gpipe": Family(gpipe, 2, "All forwards, then all backwards: the simplest, activations of all microbatches."),
    "1f1b": Family(one_f_one_b, 2, "One forward, one backward in turn: GPipe's bubble with bounded activations."),
    "1f1b_pb": Family(one_f_one_b_pb, 2, "1F1B with a deep warm-up, which hides the latency of slow links."),
    "1f1b_so": Family(one_f_one_b_so, 2, "1F1B that holds twice as many microbatches."),
    "chimera_doubling": Family(chimera_doubling, 2, "Chimera whose forwards stand in pairs: no bubbles between units."),
    "chimera_halving": Family(chimera_halving, 2, "Chimera whose backwards run in halves: no bubbles between units."),
    "chimera_greedy": Family(chimera_greedy, 2, "Chimera's pipes, merged as inputs arrive.", "pipes"),
    "chimera_split_in_place": Family(
        chimera_split_in_place, 1, "Chimera's order with input gradients sent before weight gradients.", "pipes"
    ),
    "chimera_split": Family(chimera_split, 1, "Chimera with weight gradients in its bubbles.", "pipes"),
    "chimera_split_v": Family(chimera_split_v, 1, "The same with pipes in the shape of a V: half of the bubble."),
    "gems": Family(gems, 2, "Two opposite pipes with one microbatch at a time: least memory, most bubble."),
    "interleaved": Family(interleaved, 2, "1F1B with several stages on a rank: less bubble, more messages.", "chunks"),
    "hanayo": Family(hanayo, 1, "Waves down and up the ranks: less bubble, more messages.", "chunks"),
    "zb_h1": Family(zb_h1, 2, "1F1B with weight gradients in its bubbles, within the same memory."),
    "zb_h2": Family(zb_h2, 2, "The same with twice the memory."),
    "zb_v": Family(zb_v, 2, "One pipe in the shape of a V, weight gradients in its bubbles."),
    "v_half": Family(v_half, 2, "The same with half of the memory."),
    "v_min": Family(v_min, 2, "The same with a third of the memory."),
    "dualpipe": Family(
        dualpipe,
        2,
        "Two opposite pipes that pair forwards with backwards; at least 2 microbatches a rank.",
        short=chimera,
    ),
    "dualpipe_v": Family(dualpipe_v, 2, "DualPipe folded to a V, without copies of the weights.", short=zb_v),
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


def default_num_microbatches(name: str, num_ranks: int) -> int:
    """Return the number of microbatches that a named schedule uses unless told otherwise.

    Raises:
        ValueError: if no family has the name.
    """
    return get_family(name).microbatches_per_rank * num_ranks


def select(schedule: str | os.PathLike[str] | Builder | Schedule, **options: int | None) -> Selection:
    """Return how to make the schedule that a user chose.

    Args:
        schedule: the name of a family, the path of a file that ``read_schedule`` reads, a function of (ranks,
            microbatches), or a schedule.
        options: what the family takes besides, such as ``pipes``; ``None`` for its default.

    Raises:
        ValueError: if it is none of these, the name is not known, the schedule is not valid, or takes no such option.
        OSError: if the file cannot be read.
    """
    given = {name: value for name, value in options.items() if value is not None}
    is_path = isinstance(schedule, os.PathLike) or (isinstance(schedule, str) and schedule.endswith((".csv", ".txt")))
    family = get_family(schedule) if isinstance(schedule, str) and not is_path else None
    for name, value in given.items():
        if family is None or family.option != name:
            takers = ", ".join(other for other, known in SCHEDULES.items() if known.option == name)
            raise ValueError(
                f"{name}={value}, but schedule={schedule!r} takes no {name}. Leave it out, or use a schedule that does:"
                f" {takers}."
            )
    if family is not None:
        build = functools.partial(family.build, **given) if given else family.build
        return Selection(build, family.microbatches_per_rank, short=family.short)
    if is_path:
        return Selection.of_value(read_schedule(schedule))  # type: ignore[arg-type]  # a path, as it was found to be
    if isinstance(schedule, Schedule):
        return Selection.of_value(schedule)
    if callable(schedule):
        return Selection(schedule, 2)
    raise ValueError(
        f"schedule={schedule!r}: give the name of a schedule ({', '.join(SCHEDULES)}), the path of a .csv or .txt file,"
        " a function of (ranks, microbatches), or a Schedule."
    )
