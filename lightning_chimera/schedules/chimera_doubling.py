"""Chimera with forward doubling: two forwards stand together where one backward, twice as long, stands opposite.

Four stages, eight microbatches, of which 0 to 3 run down and 4 to 7 run up; a backward twice as long as a forward:

    rank 0  F0 F1 F2 F3 F4 F5 B4 B4 F6 F7 B5 B5 .  B0 B0 B6 B6 B1 B1 B7 B7 B2 B2 .  .  B3 B3
    rank 1  .  F0 F1 F4 F5 F2 F3 F6 F7 B4 B4 B0 B0 B5 B5 B1 B1 B6 B6 B2 B2 B7 B7 B3 B3 .  .
    rank 2  .  F4 F5 F0 F1 F6 F7 F2 F3 B0 B0 B4 B4 B1 B1 B5 B5 B2 B2 B6 B6 B3 B3 B7 B7 .  .
    rank 3  F4 F5 F6 F7 F0 F1 B0 B0 F2 F3 B1 B1 .  B4 B4 B2 B2 B5 B5 B3 B3 B6 B6 .  .  B7 B7

A unit has twice as many microbatches as stages, D. Stage s runs the forwards of a pipe's microbatches 2j and 2j + 1 in
slot s + 2j and the backward of its i-th in slot (2D - 1 - s) + 2i; a further unit takes the next 3D slots. So the units
interlock without bubbles between them: with a backward of two forwards a rank idles for 3/2 (D - 2) forwards, however
many units there are, where plain Chimera idles for (N/D + 1) (D - 2).

The price are activations: a rank keeps from 3D/2 + 1 to 2D microbatches. With recomputation it keeps inputs only, each
backward takes a forward more, and a rank idles for (K + 1) (D - 2) forwards in K units, less than plain Chimera with
recomputation, which idles for (2N/D + 1) (D - 2).
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Schedule, check_counts
from lightning_chimera.schedules.chimera import opposite_pipes
from lightning_chimera.schedules.slots import Slots
from lightning_chimera.schedules.units import units


def chimera_doubling(num_stages: int, num_microbatches: int) -> Schedule:
    """Return Chimera with forward doubling, in units of twice as many microbatches as stages.

    Raises:
        ValueError: if there is no stage or no microbatch, or the number of stages is odd and not 1.
    """
    check_counts("chimera_doubling", num_stages, num_microbatches)
    placement = opposite_pipes("chimera_doubling", num_stages)
    slots = Slots(placement)
    # One stage has no second pipe whose bubbles the next unit could fill.
    length = 3 * num_stages if num_stages > 1 else 4
    for microbatch, pipe, unit, place in units(num_microbatches, 2 * num_stages, placement.num_pipes):
        # A slot has room for two forwards.
        for stage in range(num_stages):
            forward = length * unit + stage + place // 2 * 2
            backward = length * unit + 2 * num_stages - 1 - stage + 2 * place
            slots.put(2 * forward + place % 2, Action(stage, Kind.FORWARD, microbatch, pipe))
            slots.put(2 * backward, Action(stage, Kind.BACKWARD, microbatch, pipe))
    return Schedule("chimera_doubling", placement, num_microbatches, slots.rows())
