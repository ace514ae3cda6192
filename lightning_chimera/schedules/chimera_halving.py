"""Chimera with backward halving: a backward runs in two halves, each as long as a forward.

Four stages, four microbatches, of which 0 and 1 run down and 2 and 3 run up; a and b are the halves of their rows, and
the backward of a half is as long as a forward of the whole:

    rank 0  F0  F1  .   F2  B2a F3  B2b B0a B3a B0b B3b B1a .   B1b
    rank 1  .   F0  F2  F1  F3  B2a B0a B2b B0b B3a B1a B3b B1b .
    rank 2  .   F2  F0  F3  F1  B0a B2a B0b B2b B1a B3a B1b B3b .
    rank 3  F2  F3  .   F0  B0a F1  B0b B2a B1a B2b B1b B3a .   B3b

The order is that of forward doubling, with one forward in the place of two and a half in the place of a whole backward:
in a unit of D microbatches, stage s runs the forward of a pipe's j-th in slot s + 2j and the halves of its backward in
slots (2D - 1 - s) + 4j and two later; a further unit takes the next 3D slots. A rank idles for D - 2 forwards, however
many units there are, and keeps at most D microbatches, as plain Chimera does: what it costs is that devices are slower
on half as many rows. It pays while a half takes less than 1/2 + (D - 2)/(6D - 4) of a whole backward.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Schedule, check_counts
from lightning_chimera.schedules.chimera import opposite_pipes
from lightning_chimera.schedules.slots import Slots
from lightning_chimera.schedules.units import units


def chimera_halving(num_stages: int, num_microbatches: int) -> Schedule:
    """Return Chimera with backward halving, in units of as many microbatches as stages.

    Raises:
        ValueError: if there is no stage or no microbatch, or the number of stages is odd and not 1.
    """
    check_counts("chimera_halving", num_stages, num_microbatches)
    placement = opposite_pipes("chimera_halving", num_stages)
    slots = Slots(placement)
    # One stage has no second pipe whose bubbles the next unit could fill.
    length = 3 * num_stages if num_stages > 1 else 4
    for microbatch, pipe, unit, place in units(num_microbatches, num_stages, placement.num_pipes):
        for stage in range(num_stages):
            first = length * unit
            slots.put(first + stage + 2 * place, Action(stage, Kind.FORWARD, microbatch, pipe))
            for half, later in (("a", 0), ("b", 2)):
                slot = first + 2 * num_stages - 1 - stage + 4 * place + later
                slots.put(slot, Action(stage, Kind.BACKWARD, microbatch, pipe, half))
    return Schedule("chimera_halving", placement, num_microbatches, slots.rows())
