"""Chimera with a split backward: only input gradients stand in the slots, so that forward and backward are equal.

Four stages, four microbatches, of which 0 and 1 run down; forward, input gradient and weight gradient take one unit of
time each. All three variants keep at most D microbatches on D ranks, a forward until its weight gradient has run.

``chimera_split_in_place`` keeps Chimera's order, a weight gradient directly after its input gradient. A rank idles for
D/f - 2, with 2f pipes, for any number of whole units of D microbatches:

    rank 0  F0 F1 .  F2 I2 W2 F3 I3 W3 I0 W0 .  I1 W1
    rank 1  .  F0 F2 F1 F3 I2 W2 I0 W0 I3 W3 I1 W1 .
    rank 2  .  F2 F0 F3 F1 I0 W0 I2 W2 I1 W1 I3 W3 .
    rank 3  F2 F3 .  F0 I0 W0 F1 I1 W1 I2 W2 .  I3 W3

``chimera_split`` runs weight gradients where a rank would idle, or may hold no more. A rank idles for D/(2f) - 1, the
least that is possible here, since the middle ranks wait for so many forwards before their first. With two pipes and a
last unit of r microbatches, r less than D/2, it is D - 1 - 2 floor(r/2), unless a rank may keep one microbatch more:

    rank 0  F0 F1 .  F2 I2 F3 I3 I0 W2 I1 W3 W0 W1
    rank 1  .  F0 F2 F1 F3 I2 I0 I3 I1 W2 W3 W0 W1
    rank 2  .  F2 F0 F3 F1 I0 I2 I1 I3 W0 W1 W2 W3
    rank 3  F2 F3 .  F0 I0 F1 I1 I2 W0 I3 W1 W2 W3

``chimera_split_v`` gives each of the two pipes the shape of a V of 2D half-size stages. The two ends of one V and the
turn of the other are then on the same ranks, which idle for (D - 2)/4, with as many weights and twice as many messages:

    rank 0  F0 F1 .  F2 F2 F3 F3 F0 I0 F1 I1 I2 I2 I3 I3 I0 W0 I1 W1 W2 W3 W2 W3 W0 W1
    rank 1  .  F0 F2 F1 F3 F2 F0 F3 F1 I0 I2 I1 I3 I2 I0 I3 I1 W0 W1 W2 W3 W2 W3 W0 W1
    rank 2  .  F2 F0 F3 F1 F0 F2 F1 F3 I2 I0 I3 I1 I0 I2 I1 I3 W2 W3 W0 W1 W0 W1 W2 W3
    rank 3  F2 F3 .  F0 F0 F1 F1 F2 I2 F3 I3 I0 I0 I1 I1 I2 W2 I3 W3 W0 W1 W0 W1 W2 W3

With the bubbles goes the room in which plain Chimera hides the all-reduce of the gradients. So of the weight gradients
that wait, those of the stage with the larger index run first, and its all-reduce hides behind the others. Where nobody
wants two copies of the weights, ZB-V idles for (D - 1)/2 with one.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts, check_even
from lightning_chimera.schedules.chimera import chimera
from lightning_chimera.schedules.chimera_greedy import chimera_greedy
from lightning_chimera.schedules.slots import Slots
from lightning_chimera.schedules.split import fill, split_in_place
from lightning_chimera.schedules.units import units


def chimera_split_in_place(num_stages: int, num_microbatches: int, *, pipes: int = 2) -> Schedule:
    """Return Chimera with each backward split where it stands.

    Raises:
        ValueError: as ``chimera``.
    """
    return split_in_place(chimera(num_stages, num_microbatches, pipes=pipes), "chimera_split_in_place")


def chimera_split(
    num_stages: int, num_microbatches: int, *, pipes: int = 2, max_activations: int | None = None
) -> Schedule:
    """Return Chimera with weight gradients as filler.

    Args:
        num_stages: stages, and ranks.
        num_microbatches: microbatches of a step.
        pipes: number of pipes.
        max_activations: most microbatches that a rank keeps; as many as stages unless told otherwise. With one more
            the order is that of ``chimera_greedy``, whose bubble does not depend on the last unit.

    Raises:
        ValueError: as ``chimera``, or if a step needs more activations.
    """
    max_activations = num_stages if max_activations is None else max_activations
    build = chimera if max_activations <= num_stages else chimera_greedy
    return fill(build(num_stages, num_microbatches, pipes=pipes), "chimera_split", max_activations)


def chimera_split_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return two opposite pipes in the shape of a V, with weight gradients as filler.

    Raises:
        ValueError: if there is no rank or no microbatch, or the number of ranks is odd.
    """
    check_counts("chimera_split_v", num_ranks, num_microbatches)
    check_even("chimera_split_v", num_ranks)
    (down,) = Placement.zigzag(num_ranks).ranks
    pipes = (down, tuple(num_ranks - 1 - rank for rank in down))
    placement = Placement(pipes if num_ranks > 1 else (down,))
    slots = Slots(placement)
    for microbatch, pipe, unit, place in units(num_microbatches, num_ranks, placement.num_pipes):
        first = 4 * num_ranks * unit + 2 * place
        for stage in range(placement.num_stages):
            slots.put(first + stage, Action(stage, Kind.FORWARD, microbatch, pipe))
            slots.put(first + 4 * num_ranks - 1 - stage, Action(stage, Kind.BACKWARD, microbatch, pipe))
    order = Schedule("chimera_split_v", placement, num_microbatches, slots.rows())
    return fill(order, order.name, 2 * num_ranks)
