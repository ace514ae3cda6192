"""Units: how opposite pipes share the microbatches of a step."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple


class Entry(NamedTuple):
    """How a microbatch enters a pipe.

    Attributes:
        microbatch: its number.
        pipe: the pipe that it runs in.
        unit: the number of its unit.
        place: how many microbatches of the unit enter the pipe before it.
    """

    microbatch: int
    pipe: int
    unit: int
    place: int


def units(num_microbatches: int, size: int, num_pipes: int) -> Iterator[Entry]:
    """Share microbatches among pipes in units of ``size``, each of which gives every pipe consecutive numbers.

    An incomplete last unit is shared as evenly as possible. The microbatches that are left over go to a down pipe, then
    to the up pipe opposite to it, then to the next pair; pipe k is opposite to pipe k + num_pipes / 2.
    """
    by_turn = sorted(range(num_pipes), key=lambda pipe: (pipe % max(1, num_pipes // 2), pipe))
    for unit, first in enumerate(range(0, num_microbatches, size)):
        whole, left = divmod(min(size, num_microbatches - first), num_pipes)
        microbatch = first
        for pipe in range(num_pipes):
            for place in range(whole + (pipe in by_turn[:left])):
                yield Entry(microbatch, pipe, unit, place)
                microbatch += 1
