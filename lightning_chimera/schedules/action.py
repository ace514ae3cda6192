"""Actions, placements and schedules: who runs what, in which order, as plain values.

The text form of an action is its stage, the letter of its kind, its microbatch and, where it is not 0, its pipe:

    2F0      stage 2, forward of microbatch 0, pipe 0
    3B1.1    stage 3, backward of microbatch 1, pipe 1
    3I1.1    the part of that backward which computes the gradient of the stage's input
    3W1.1    the other part, which computes the gradients of its weights
    3B1a.1   the backward of the first half of the microbatch's rows; b is the second
"""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import NamedTuple

_NUMBER = "0|[1-9][0-9]*"
_ACTION = re.compile(
    rf"(?P<stage>{_NUMBER})(?P<kind>[FBIW])(?P<microbatch>{_NUMBER})(?P<half>[ab]?)"
    rf"(?:\.(?P<pipe>[1-9][0-9]*))?"
)


class Kind(enum.StrEnum):
    """What an action computes; the value is its letter in the text form."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "I"
    """The gradient of a stage's input: what the stage before waits for."""
    WEIGHT = "W"
    """The gradients of a stage's weights: what nobody waits for. I and W together are a backward."""


class Action(NamedTuple):
    """One cell of a schedule: one kind of work of one stage on one microbatch, in one pipe.

    Attributes:
        stage: the stage that works.
        kind: what it computes.
        microbatch: the microbatch.
        pipe: the pipe of the microbatch.
        half: ``a`` or ``b`` for a backward of one half of the microbatch's rows.
    """

    stage: int
    kind: Kind
    microbatch: int
    pipe: int = 0
    half: str = ""

    def __str__(self) -> str:
        """Return the text form, such as ``2F0`` or ``2F0.1``."""
        suffix = f".{self.pipe}" if self.pipe else ""
        return f"{self.stage}{self.kind.value}{self.microbatch}{self.half}{suffix}"

    @classmethod
    def parse(cls, text: str) -> Action:
        """Read the text form of an action, the exact inverse of ``str``.

        Raises:
            ValueError: if the text is not exactly of that form.
        """
        match = _ACTION.fullmatch(text)
        if match is None or (match["half"] and match["kind"] != Kind.BACKWARD):
            raise ValueError(
                f"{text!r} is not an action. An action is <stage><kind><microbatch>, followed by .<pipe> unless the "
                "pipe is 0, where the kind is F, B, I or W: for example 2F0 or 3B1.1. A backward of half a microbatch "
                "has an a or b behind the microbatch: 3B1a.1."
            )
        half = match["half"] or ""
        return cls(int(match["stage"]), Kind(match["kind"]), int(match["microbatch"]), int(match["pipe"] or 0), half)


def producers(actions: Iterable[Action]) -> Mapping[Action, Action]:
    """Return, for each action that takes the output of a neighbour stage, the action that makes it.

    A forward takes the output of the stage before it. A backward, or the input-gradient part of one, takes the input
    gradient of the stage after it, which a whole backward or a part makes there. A weight-gradient part takes none.
    """
    forwards: dict[Action, Action] = {}
    gradients: dict[Action, Action] = {}
    for action in actions:
        if action.kind is Kind.FORWARD:
            forwards[action] = action
        elif action.kind is not Kind.WEIGHT:
            gradients[action._replace(kind=Kind.BACKWARD)] = action
    found = {}
    for outputs, step in ((forwards, -1), (gradients, 1)):
        for key, action in outputs.items():
            producer = outputs.get(key._replace(stage=key.stage + step))
            if producer is not None:
                found[action] = producer
    return found


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

    @classmethod
    def opposite(cls, num_stages: int, num_pairs: int) -> Placement:
        """Return pairs of opposite pipes, each pair shifted by an equal part of the ranks; the down pipes come first.

        Stage s of down pipe k is on rank (s + k * num_stages / num_pairs) mod num_stages; up pipe k mirrors it.
        """
        shifts = [pair * num_stages // num_pairs for pair in range(num_pairs)]
        down = [tuple((shift + stage) % num_stages for stage in range(num_stages)) for shift in shifts]
        return cls((*down, *(tuple(num_stages - 1 - rank for rank in pipe) for pipe in down)))

    @classmethod
    def interleaved(cls, num_ranks: int, num_chunks: int) -> Placement:
        """Return one pipe that passes the ranks num_chunks times in the same direction."""
        return cls((tuple(range(num_ranks)) * num_chunks,))

    @classmethod
    def zigzag(cls, num_ranks: int, num_waves: int = 1) -> Placement:
        """Return one pipe that runs down the ranks and up again, num_waves times; one wave is a V."""
        down = tuple(range(num_ranks))
        return cls(((*down, *reversed(down)) * num_waves,))

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

    @property
    def is_paired(self) -> bool:
        """Whether each rank that runs a stage runs the one that is as far from the other end as well."""
        mirrored = Placement(tuple(tuple(reversed(pipe)) for pipe in self.ranks))
        return all(self.stages_of(rank) == mirrored.stages_of(rank) for rank in range(self.num_ranks))

    @property
    def share(self) -> Fraction:
        """The size of a stage in units of an equal share of the model for each rank; 1 where stages are ranks."""
        return Fraction(self.num_ranks, self.num_stages)

    @property
    def weight_copies(self) -> tuple[float, ...]:
        """For each rank, the weights that it holds in units of an equal share of the model for each rank."""
        return tuple(plain(len(self.stages_of(rank)) * self.share) for rank in range(self.num_ranks))


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
    def split_backward(self) -> bool:
        """Whether a backward comes in two parts, input gradient and weight gradient."""
        return any(action.kind is Kind.WEIGHT for row in self.rows for action in row)

    @property
    def halved_backward(self) -> bool:
        """Whether a backward comes in two halves of its microbatch's rows."""
        return any(action.half for row in self.rows for action in row)

    def with_whole_backwards(self) -> Schedule:
        """Return the same with one backward in the place of the first of two halves."""
        rows = tuple(tuple(action._replace(half="") for action in row if action.half != "b") for row in self.rows)
        return replace(self, rows=rows)

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """For each rank, the most activations at one time, in row order.

        The unit is what an equal share of the model for each rank keeps for one microbatch, from its forward until its
        backward, or the weight-gradient part of it, has run.
        """
        share = self.placement.share
        return tuple(plain(max(count_activations(row), default=Fraction()) * share) for row in self.rows)

    @functools.cached_property
    def producers(self) -> Mapping[Action, Action]:
        """For each action that takes the output of a neighbour stage, the action that makes it."""
        return producers(action for row in self.rows for action in row)

    @property
    def num_messages(self) -> int:
        """Number of outputs that go from one rank to another in a step."""
        rank_of = self.placement.rank_of
        ends = ((rank_of(a.stage, a.pipe), rank_of(b.stage, b.pipe)) for a, b in self.producers.items())
        return sum(source != target for target, source in ends)

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


def count_activations(row: tuple[Action, ...]) -> Iterator[Fraction]:
    """Yield, after each action of a row, the number of forwards so far whose backward has not ended yet."""
    held = Fraction()
    for action in row:
        held += _held_by(action)
        yield held


def _held_by(action: Action) -> Fraction:
    """Return how many forwards more are held after an action; a backward of half the rows gives half of one back."""
    if action.kind is Kind.FORWARD:
        return Fraction(1)
    return Fraction(0) if action.kind is Kind.INPUT else Fraction(-1, 2) if action.half else Fraction(-1)


def plain(number: Fraction) -> float:
    """Return a number as an int where it is whole and as a float elsewhere, which prints as people write it."""
    return int(number) if number.denominator == 1 else float(number)


def check_counts(name: str, num_stages: int, num_microbatches: int, *, chunks: int = 1) -> None:
    """Refuse a schedule without a stage, without a microbatch, or without a chunk of the model on each rank.

    Raises:
        ValueError: if a number is below 1.
    """
    for noun, count in (("stage", num_stages), ("microbatch", num_microbatches), ("chunk", chunks)):
        if count < 1:
            raise ValueError(f"Schedule {name} needs at least one {noun}; got {count}. Set it to 1 or more.")


def check_even(name: str, num_stages: int) -> None:
    """Refuse a schedule of opposite pipes with an odd number of stages; one stage alone is left to the schedule.

    Raises:
        ValueError: if the number is odd and not 1.
    """
    if num_stages % 2 and num_stages > 1:
        raise ValueError(
            f"Schedule {name} needs an even number of stages, because its two pipes meet in the middle; got "
            f"{num_stages}. Use {num_stages - 1} or {num_stages + 1} stages, or the schedule gpipe or 1f1b."
        )


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
