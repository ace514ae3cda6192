"""Actions, placements and schedules: who runs what, in which order, as plain values.

The text form of an action is its stage, the letter of its kind, its microbatch and, where it is not 0, its pipe:

    2F0      stage 2, forward of microbatch 0, pipe 0
    3B1.1    stage 3, backward of microbatch 1, pipe 1
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

_NUMBER = "0|[1-9][0-9]*"
_ACTION = re.compile(rf"(?P<stage>{_NUMBER})(?P<kind>[FB])(?P<microbatch>{_NUMBER})(?:\.(?P<pipe>[1-9][0-9]*))?")


class Kind(enum.StrEnum):
    """What an action computes; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"


class Action(NamedTuple):
    """One cell of a schedule: one kind of work of one stage on one microbatch, in one pipe."""

    stage: int
    kind: Kind
    microbatch: int
    pipe: int = 0

    def __str__(self) -> str:
        """Return the text form, such as ``2F0`` or ``2F0.1``."""
        suffix = f".{self.pipe}" if self.pipe else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form of an action, the exact inverse of ``str``.

        Raises:
            ValueError: if the text is not exactly of that form.
        """
        match = _ACTION.fullmatch(text)
        if match is None:
            raise ValueError(
                f"{text!r} is not an action. An action is <stage><kind><microbatch>, followed by .<pipe> unless the "
                "pipe is 0, where the kind is F or B: for example 2F0 or 3B1.1."
            )
        return cls(int(match["stage"]), Kind(match["kind"]), int(match["microbatch"]), int(match["pipe"] or 0))

    def predecessor(self, num_stages: int) -> Action | None:
        """Return the neighbour stage's action whose output this one takes; None where the pipe begins or turns."""
        stage = self.stage - 1 if self.kind is Kind.FORWARD else self.stage + 1
        return self._replace(stage=stage) if 0 <= stage < num_stages else None

    def successor(self, num_stages: int) -> Action | None:
        """Return the neighbour stage's action that takes this one's output; None where the pipe turns or ends."""
        stage = self.stage + 1 if self.kind is Kind.FORWARD else self.stage - 1
        return self._replace(stage=stage) if 0 <= stage < num_stages else None


@dataclass(frozen=True)
class Placement:
    """Which rank runs which stage: ``ranks[pipe][stage]`` is a rank.

    Raises:
        ValueError: if there is no pipe or no stage, the pipes differ in length, or a rank holds nothing.
    """

    ranks: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        """Check the shape."""
        if not self.ranks or not self.ranks[0] or any(len(pipe) != len(self.ranks[0]) for pipe in self.ranks):
            raise ValueError(f"A placement needs at least one pipe, and the same stages in each; got {self.ranks}.")
        used = {rank for pipe in self.ranks for rank in pipe}
        if used != set(range(len(used))):
            raise ValueError(f"Ranks are numbered from 0 and each holds at least one stage; got {sorted(used)}.")

    @classmethod
    def down(cls, num_stages: int) -> Placement:
        """Return one pipe with stage s on rank s."""
        return cls((tuple(range(num_stages)),))

    @classmethod
    def bidirectional(cls, num_stages: int) -> Placement:
        """Return two pipes: pipe 0 runs down, stage s on rank s; pipe 1 runs up, stage s on rank num_stages-1-s."""
        return cls((tuple(range(num_stages)), tuple(reversed(range(num_stages)))))

    @property
    def num_pipes(self) -> int:
        """Number of pipes."""
        return len(self.ranks)

    @property
    def num_stages(self) -> int:
        """Number of stages of every pipe."""
        return len(self.ranks[0])

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline group."""
        return 1 + max(rank for pipe in self.ranks for rank in pipe)

    def rank_of(self, stage: int, pipe: int = 0) -> int:
        """Return the rank that runs a stage in a pipe."""
        return self.ranks[pipe][stage]

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the distinct stages that a rank holds over all pipes, in ascending order."""
        return tuple(sorted({stage for pipe in self.ranks for stage, owner in enumerate(pipe) if owner == rank}))


@dataclass(frozen=True)
class Schedule:
    """For each rank, its actions in execution order: a value, compared and printed, without behaviour.

    Attributes:
        name: what people call it, such as ``chimera``; one line.
        placement: which rank runs which stage of which pipe.
        num_microbatches: microbatches of one step, over all pipes.
        rows: ``rows[rank]`` holds the actions of a rank in execution order. ``validate`` judges them.

    Raises:
        ValueError: if the name is not one line of text, there is no microbatch, or the rows do not match the ranks.
    """

    name: str
    placement: Placement
    num_microbatches: int
    rows: tuple[tuple[Action, ...], ...]

    def __post_init__(self) -> None:
        """Check the shape."""
        if not self.name or not self.name.isprintable() or self.name != self.name.strip():
            raise ValueError(f"The name of a schedule is one line of text without outer blanks; got {self.name!r}.")
        if self.num_microbatches < 1:
            raise ValueError(f"A schedule has at least one microbatch; got {self.num_microbatches}.")
        if len(self.rows) != self.placement.num_ranks:
            raise ValueError(f"{len(self.rows)} rows for {self.placement.num_ranks} ranks: a rank has one row.")

    @property
    def num_ranks(self) -> int:
        """Number of ranks of the pipeline group."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return self.placement.num_stages

    @property
    def num_pipes(self) -> int:
        """Number of pipes."""
        return self.placement.num_pipes

    @property
    def forward_only(self) -> bool:
        """Whether no action at all is a backward."""
        return all(action.kind is Kind.FORWARD for row in self.rows for action in row)

    @property
    def peak_activations(self) -> tuple[int, ...]:
        """For each rank, the most forwards at one time whose backward has not run yet, in row order."""
        return tuple(max(activations, default=0) for activations in map(count_activations, self.rows))

    @functools.cached_property
    def _pipes(self) -> dict[int, int]:
        return {action.microbatch: action.pipe for row in self.rows for action in row}

    def pipe_of(self, microbatch: int) -> int:
        """Return the pipe that a microbatch runs in.

        Raises:
            ValueError: if no action runs the microbatch.
        """
        if microbatch not in self._pipes:
            raise ValueError(f"No action of schedule {self.name} runs microbatch {microbatch}.")
        return self._pipes[microbatch]

    def to_text(self) -> str:
        """Return the schedule as comma-separated lines, which ``parse`` reads back exactly.

        ```
        name,gpipe
        num_microbatches,1
        pipe,0,1
        rank,0F0,0B0
        rank,1F0,1B0
        ```
        """
        lines = [f"name,{self.name}", f"num_microbatches,{self.num_microbatches}"]
        lines += [",".join(["pipe", *map(str, ranks)]) for ranks in self.placement.ranks]
        lines += [",".join(["rank", *map(str, row)]) for row in self.rows]
        return "\n".join(lines) + "\n"

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Read what ``to_text`` wrote.

        Raises:
            ValueError: if a line is not as ``to_text`` writes it; the message says which one.
        """
        fields: dict[str, list[str]] = {key: [] for key in ("name", "num_microbatches", "pipe", "rank")}
        for number, line in enumerate(text.splitlines(), start=1):
            key, _, value = line.partition(",")
            if key not in fields:
                raise ValueError(f"Line {number} of a schedule starts with one of {', '.join(fields)}; got {line!r}.")
            fields[key].append(value)
        for key in ("name", "num_microbatches"):
            if len(fields[key]) != 1:
                raise ValueError(f"A schedule has exactly one line {key!r}; got {len(fields[key])}.")
        return cls(
            name=fields["name"][0],
            placement=Placement(tuple(tuple(map(_parse_count, value.split(","))) for value in fields["pipe"])),
            num_microbatches=_parse_count(fields["num_microbatches"][0]),
            rows=tuple(tuple(map(Action.parse, value.split(","))) if value else () for value in fields["rank"]),
        )


def count_activations(row: tuple[Action, ...]) -> Iterator[int]:
    """Yield, after each action of a row, the number of forwards so far whose backward has not run yet."""
    held = 0
    for action in row:
        held += 1 if action.kind is Kind.FORWARD else -1
        yield held


def check_counts(name: str, num_stages: int, num_microbatches: int) -> None:
    """Refuse a schedule without a stage or without a microbatch.

    Raises:
        ValueError: if either number is below 1.
    """
    for noun, count in (("stage", num_stages), ("microbatch", num_microbatches)):
        if count < 1:
            raise ValueError(f"Schedule {name} needs at least one {noun}; got {count}. Set it to 1 or more.")


def render_grid(schedule: Schedule, bad: tuple[int, int] | None = None) -> str:
    """Draw a schedule as text: a line for each rank, a column for each position in its row.

    Args:
        schedule: what to draw; it need not be valid.
        bad: rank and index of a cell to mark with ``>`` and ``<``.
    """
    columns = max(map(len, schedule.rows))
    table = [["", *(f" {index} " for index in range(columns))]]
    for rank, row in enumerate(schedule.rows):
        cells = [f">{action}<" if bad == (rank, index) else f" {action} " for index, action in enumerate(row)]
        table.append([f"rank {rank}", *cells, *[""] * (columns - len(cells))])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (" ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table)
    return "\n".join(line.rstrip() for line in lines)


def _parse_count(text: str) -> int:
    if re.fullmatch(_NUMBER, text) is None:
        raise ValueError(f"{text!r} is not a whole number.")
    return int(text)
