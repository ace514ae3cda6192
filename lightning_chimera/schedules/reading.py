"""Reads schedules from files: the text form of this package, or a table of computes as torch writes it.

A table has a line for each rank, with its actions in order, separated by commas; an empty cell is an idle rank:

    0F0,0F1,,0B0,0B1
    1F0,1B0,1F1,1B1

Which stages a rank holds follows from the table. ``torch.distributed.pipelining`` writes such tables as
``compute_only``; its pairs, such as ``(0F7;3B2)OVERLAP_F_B``, run one after the other.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

from lightning_chimera.schedules.action import Action, Placement, Schedule
from lightning_chimera.schedules.validate import validate

_PAIR = re.compile(r"\((?P<actions>[^()]*)\)OVERLAP_F_B")


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read a schedule from a file and check it; a table is called by the name of its file.

    Raises:
        ValueError: if the file is not of either form; the message names the line.
        ScheduleError: if the schedule is not valid.
        OSError: if the file cannot be read.
    """
    path = Path(path)
    text = path.read_text(encoding="utf-8-sig")  # spreadsheets put a mark in front
    try:
        schedule = Schedule.parse(text) if text.startswith("name,") else parse_table(path.stem, text)
    except ValueError as error:
        raise ValueError(f"{path} holds no schedule. {error}") from None
    validate(schedule)
    return schedule


def parse_table(name: str, text: str) -> Schedule:
    """Read a table of computes, a line for each rank; ``validate`` judges the schedule.

    Raises:
        ValueError: if a cell is no action, or a stage of a pipe is on no rank or on several.
    """
    rows: list[tuple[Action, ...]] = []
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            rows.append(tuple(_actions(line)))
        except ValueError as error:
            raise ValueError(f"Line {number}, {error}") from None
    ranks: dict[tuple[int, int], int] = {}
    for rank, row in enumerate(rows):
        for action in row:
            owner = ranks.setdefault((action.pipe, action.stage), rank)
            if owner != rank:
                raise ValueError(
                    f"Line {rank + 1}, {action}: stage {action.stage} of pipe {action.pipe} is on rank {owner} as well,"
                    f" by line {owner + 1}. A stage of a pipe is on one rank."
                )
    if not ranks:
        raise ValueError("There is no action in it. Write a line for each rank, such as 0F0,0B0.")
    num_pipes, num_stages = (1 + max(key[part] for key in ranks) for part in (0, 1))
    for pipe in range(num_pipes):
        for stage in range(num_stages):
            if (pipe, stage) not in ranks:
                raise ValueError(f"No line has stage {stage} of pipe {pipe}, though it has later ones.")
    placement = Placement(tuple(tuple(ranks[pipe, stage] for stage in range(num_stages)) for pipe in range(num_pipes)))
    num_microbatches = 1 + max(action.microbatch for row in rows for action in row)
    return Schedule(name, placement, num_microbatches, tuple(rows))


def _actions(line: str) -> Iterator[Action]:
    for column, cell in enumerate(line.split(","), start=1):
        pair = _PAIR.fullmatch(cell.strip())
        for text in (pair["actions"] if pair else cell).split(";"):
            if text.strip():
                try:
                    yield Action.parse(text.strip())
                except ValueError as error:
                    raise ValueError(f"cell {column}: {error}") from None
