"""Chimera: two pipes run through the same ranks in opposite directions and fill each other's bubbles.

Rank r holds stage r of the down pipe and stage (num_stages - 1 - r) of the up pipe. Four stages, four microbatches, of
which 0 and 1 run down and 2 and 3 run up; a backward twice as long as a forward:

    rank 0  F0 F1 .  F2 B2 B2 F3 B3 B3 .  B0 B0 .  .  B1 B1
    rank 1  .  F0 F2 F1 F3 .  B2 B2 B0 B0 B3 B3 B1 B1 .  .
    rank 2  .  F2 F0 F3 F1 .  B0 B0 B2 B2 B1 B1 B3 B3 .  .
    rank 3  F2 F3 .  F0 B0 B0 F1 B1 B1 .  B2 B2 .  .  B3 B3

The order comes from a table of slots for units of num_stages microbatches, half of them in each pipe. In a unit, stage
s runs the forward of the pipe's i-th microbatch in slot s + 2i and its backward in slot (2 num_stages - 1 - s) + 2i;
with an even number of stages no two actions of a rank share a slot:

    slot    0  1  2  3  4  5  6  7  8  9
    rank 0  F0 F1 .  F2 B2 F3 B3 B0 .  B1
    rank 1  .  F0 F2 F1 F3 B2 B0 B3 B1 .
    rank 2  .  F2 F0 F3 F1 B0 B2 B1 B3 .
    rank 3  F2 F3 .  F0 B0 F1 B1 B2 .  B3

Each further unit takes the next (2 num_stages) slots, so its first forwards fill the last bubbles of the unit before.
Slots give the order only: an action starts as soon as its rank is free and its input is there.

See Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC'21.
"""

from __future__ import annotations

from collections.abc import Iterator

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def chimera(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the Chimera schedule with two pipes; more microbatches than stages run as consecutive units.

    A unit of fewer than ``num_stages`` microbatches, the last one or the only one, is split as evenly as possible; the
    down pipe gets the odd one. One stage makes one pipe, which runs F0 B0 F1 B1 and so on.

    Raises:
        ValueError: if there is no stage or no microbatch, or the number of stages is odd and not 1.
    """
    check_counts("chimera", num_stages, num_microbatches)
    if num_stages % 2 and num_stages > 1:
        raise ValueError(
            f"Schedule chimera needs an even number of stages, because its two pipes meet in the middle; got "
            f"{num_stages}. Use {num_stages - 1} or {num_stages + 1} stages, or the schedule gpipe or 1f1b."
        )
    placement = Placement.bidirectional(num_stages) if num_stages > 1 else Placement.down(num_stages)
    slots: list[dict[int, Action]] = [{} for _ in range(num_stages)]
    for microbatch, pipe, first_slot in _entries(num_stages, num_microbatches):
        for stage in range(num_stages):
            row = slots[placement.rank_of(stage, pipe)]
            row[first_slot + stage] = Action(stage, Kind.FORWARD, microbatch, pipe)
            row[first_slot + 2 * num_stages - 1 - stage] = Action(stage, Kind.BACKWARD, microbatch, pipe)
    rows = tuple(tuple(action for _, action in sorted(row.items())) for row in slots)
    return Schedule("chimera", placement, num_microbatches, rows)


def _entries(num_stages: int, num_microbatches: int) -> Iterator[tuple[int, int, int]]:
    """Yield each microbatch with its pipe and the slot in which it enters that pipe."""
    for first in range(0, num_microbatches, num_stages):
        size = min(num_stages, num_microbatches - first)
        num_down = (size + 1) // 2
        for position in range(size):
            pipe, place = (0, position) if position < num_down else (1, position - num_down)
            yield first + position, pipe, 2 * (first + place)
