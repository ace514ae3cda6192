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

With 2f pipes, for every f that divides num_stages / 2, the k-th of f pairs of pipes is shifted by k num_stages / f
ranks, and every pipe gets 1/(2f) of a unit. A rank then holds 2f stages; with 2f = num_stages it holds the whole model.

With D stages, N = K D microbatches and a backward of two forwards, a rank idles for (K + 1) (D/f - 2) forwards: each
unit adds the same again, so the bubble of a long step does not vanish. Where a backward is as long as a forward it is
D/f - 2 for any K. A rank keeps from D - D/(2f) + 1 to D microbatches for backward.

See Li and Hoefler, "Chimera: Efficiently Training Large-Scale Neural Networks with Bidirectional Pipelines", SC'21.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts, check_even
from lightning_chimera.schedules.slots import Slots
from lightning_chimera.schedules.units import units


def chimera(num_stages: int, num_microbatches: int, *, pipes: int = 2) -> Schedule:
    """Return the Chimera schedule; more microbatches than stages run as consecutive units.

    A unit of fewer than ``num_stages`` microbatches, the last one or the only one, is split as evenly as possible; the
    down pipe gets the odd one. One stage makes one pipe, which runs F0 B0 F1 B1 and so on.

    Args:
        num_stages: stages, and ranks.
        num_microbatches: microbatches of a step.
        pipes: number of pipes, 2f for an f that divides half of the stages.

    Raises:
        ValueError: if there is no stage or no microbatch, the number of stages is odd and not 1, or they do not allow
            that number of pipes.
    """
    check_counts("chimera", num_stages, num_microbatches)
    placement = opposite_pipes("chimera", num_stages, pipes)
    slots = Slots(placement)
    for microbatch, pipe, unit, place in units(num_microbatches, num_stages, placement.num_pipes):
        first = 2 * (unit * num_stages + place)
        for stage in range(num_stages):
            slots.put(first + stage, Action(stage, Kind.FORWARD, microbatch, pipe))
            slots.put(first + 2 * num_stages - 1 - stage, Action(stage, Kind.BACKWARD, microbatch, pipe))
    return Schedule("chimera", placement, num_microbatches, slots.rows())


def opposite_pipes(name: str, num_stages: int, pipes: int = 2) -> Placement:
    """Return the placement of opposite pipes; one stage makes one pipe.

    Raises:
        ValueError: if the number of stages is odd and not 1, or does not allow that number of pipes.
    """
    check_even(name, num_stages)
    if num_stages == 1:
        return Placement.down(1)
    allowed = [2 * f for f in range(1, num_stages // 2 + 1) if num_stages // 2 % f == 0]
    if pipes not in allowed:
        raise ValueError(
            f"Schedule {name} has pairs of opposite pipes that are evenly shifted: of {num_stages} stages it makes"
            f" {', '.join(map(str, allowed))} pipes; got {pipes}."
        )
    return Placement.opposite(num_stages, pipes // 2)
