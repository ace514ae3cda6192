"""ZB-V, V-Half and V-Min: one pipe in the shape of a V, split backwards, and the memory that one asks for.

A pipe of 2D stages runs down the D ranks and up again, so rank r holds stages r and 2D - 1 - r and the first rank has
the loss. All three repeat one block of slots every six slots, the four below on each rank and two for the weight
gradients. A microbatch goes down in steps of a slots, up in steps of b, its input gradient down again in steps of c and
up in steps of d, with as few slots at the three turns as let no two actions of a rank meet:

    schedule   a b c d   activations kept    idle for each rank, F = I = W
    zb_v       4 2 4 2   D                   (D - 1)/2
    v_half     2 1 2 1   about (D + 2)/2     about half of 1F1B's 3 (D - 1)
    v_min      1 1 1 1   about (D + 4)/3     about two thirds of it

A microbatch is held for D (a + b + c + d) slots by a rank's two stages together, the same on every rank where a + d
equals b + c; at one microbatch every six slots that is the memory. Four ranks, four microbatches, where forward, input
gradient and weight gradient of a stage take one unit of time each:

    zb_v
    rank 0  F0 F1 F2 F3 .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 I0 W0 I1 W1 I2 W2 I3 W3 W0 W1 W2 W3
    rank 1  .  F0 F1 F2 .  .  F0 F3 F1 I0 F2 I1 F3 I2 I0 I3 I1 W0 I2 W1 I3 W2 W3 W0 W1 W2 W3
    rank 2  .  .  F0 F1 .  F0 F2 F1 F3 F2 I0 F3 I1 I0 I2 I1 I3 I2 W0 I3 W1 W2 W3 W0 W1 W2 W3
    rank 3  .  .  .  F0 F0 F1 F1 F2 F2 F3 F3 I0 I0 I1 I1 I2 I2 I3 I3 W0 W1 W2 W3 W0 W1 W2 W3

    v_half
    rank 0  F0 F1 .  .  .  .  .  F0 I0 F2 W0 .  F1 I1 F3 W1 .  F2 I2 I0 W2 W0 F3 I3 I1 W3 W1 .  I2 W2 I3 W3
    rank 1  .  F0 F1 .  .  .  F0 .  .  I0 F2 F1 W0 .  I1 F3 F2 W1 I0 I2 W2 F3 W0 I1 I3 W3 W1 I2 W2 I3 W3 .
    rank 2  .  .  F0 .  .  F0 F1 .  .  F1 I0 F2 W0 .  F2 I1 F3 I0 W1 W0 F3 I2 I1 W2 W1 I3 I2 W3 I3 W2 W3 .
    rank 3  .  .  .  F0 F0 .  .  F1 F1 .  .  I0 F2 F2 I0 W0 I1 F3 W1 F3 I1 W0 I2 I2 W2 W1 I3 I3 W3 W2 W3 .

    v_min
    rank 0  F0 F1 .  .  .  .  .  F0 I0 F2 W0 .  .  F1 I1 I0 F3 W1 W0 F2 I2 I1 W2 W1 .  F3 I3 I2 W3 W2 .  .  .  I3 W3
    rank 1  .  F0 .  .  .  .  F0 F1 .  I0 W0 .  F1 F2 I0 I1 W1 W0 F2 F3 I1 I2 W2 W1 F3 .  I2 I3 W3 W2 .  .  I3 W3 .
    rank 2  .  .  F0 .  .  F0 .  .  F1 .  I0 F1 W0 I0 F2 W0 I1 F2 W1 I1 F3 W1 I2 F3 W2 I2 W2 .  I3 W3 .  I3 W3 .  .
    rank 3  .  .  .  F0 F0 .  .  .  .  F1 F1 I0 I0 W0 W0 F2 F2 I1 I1 W1 W1 F3 F3 I2 I2 W2 W2 .  .  I3 I3 W3 W3 .  .

See Qi et al., "Pipeline Parallelism with Controllable Memory", NeurIPS'24.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts
from lightning_chimera.schedules.slots import Slots
from lightning_chimera.schedules.split import fill

_PERIOD = 6


def zb_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the ZB-V schedule: the memory of 1F1B on every rank, and a sixth of its bubble.

    Raises:
        ValueError: if there is no rank or no microbatch.
    """
    return _v_shaped("zb_v", num_ranks, num_microbatches, (4, 2, 4, 2), 2 * num_ranks)


def v_half(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the V-Half schedule: half of the memory of 1F1B, and half of its bubble.

    Raises:
        ValueError: if there is no rank or no microbatch.
    """
    return _v_shaped("v_half", num_ranks, num_microbatches, (2, 1, 2, 1), min(num_ranks + 2, 2 * num_ranks))


def v_min(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the V-Min schedule: a third of the memory of 1F1B, and two thirds of its bubble.

    Raises:
        ValueError: if there is no rank or no microbatch.
    """
    max_held = math.ceil(2 * (num_ranks + 4) / 3)
    return _v_shaped("v_min", num_ranks, num_microbatches, (1, 1, 1, 1), min(max_held, 2 * num_ranks))


def _v_shaped(
    name: str, num_ranks: int, num_microbatches: int, steps: tuple[int, int, int, int], max_held: int
) -> Schedule:
    check_counts(name, num_ranks, num_microbatches)
    placement = Placement.zigzag(num_ranks)
    slots = Slots(placement)
    block = _block(num_ranks, steps)
    for microbatch in range(num_microbatches):
        for rank in range(num_ranks):
            for (stage, kind), slot in zip(_passes(rank, num_ranks), block(rank), strict=True):
                slots.put(_PERIOD * microbatch + slot, Action(stage, kind, microbatch))
    return fill(Schedule(name, placement, num_microbatches, slots.rows()), name, max_held)


def _passes(rank: int, num_ranks: int) -> tuple[tuple[int, Kind], ...]:
    """Return the stage and kind of the four passes of a microbatch over a rank."""
    down, up = rank, 2 * num_ranks - 1 - rank
    return (down, Kind.FORWARD), (up, Kind.FORWARD), (up, Kind.BACKWARD), (down, Kind.BACKWARD)


def _block(num_ranks: int, steps: tuple[int, int, int, int]) -> Callable[[int], tuple[int, ...]]:
    """Return the slots of a microbatch's four passes over a rank, with the shortest turns that keep ranks free."""
    a, b, c, d = steps
    last = num_ranks - 1

    def slots(rank: int, turns: tuple[int, ...]) -> tuple[int, ...]:
        down = a * rank
        up = a * last + turns[0] + b * (last - rank)
        down_again = (a + b) * last + turns[0] + turns[1] + c * rank
        up_again = (a + b + c) * last + sum(turns) + d * (last - rank)
        return down, up, down_again, up_again

    def is_free(turns: tuple[int, ...]) -> bool:
        return all(len({slot % _PERIOD for slot in slots(rank, turns)}) == 4 for rank in range(num_ranks))

    turns = min(filter(is_free, itertools.product(range(1, _PERIOD + 1), repeat=3)), key=sum)
    return lambda rank: slots(rank, turns)
