"""DualPipe and DualPipeV: a steady state in which each forward has a backward of the other direction for a partner.

DualPipe runs two opposite pipes, as Chimera does. Four ranks, eight microbatches, of which 0 to 3 run down; forward,
input gradient and weight gradient take one unit of time each:

    rank 0  F0 F1 F2 F4 I4 W4 F5 F3 B5 B5 F6 B0 B0 B6 B6 F7 .  B1 B1 B7 B7 I2 W2 I3 W3
    rank 1  .  F0 F4 F1 F5 F2 B4 B4 F6 B0 B0 F3 B5 B5 F7 B1 B1 B6 B6 B2 B2 I7 I3 W7 W3
    rank 2  .  F4 F0 F5 F1 F6 B0 B0 F2 B4 B4 F7 B1 B1 F3 B5 B5 B2 B2 B6 B6 I3 I7 W3 W7
    rank 3  F4 F5 F6 F0 I0 W0 F1 F7 B1 B1 F2 B4 B4 B2 B2 F3 .  B5 B5 B3 B3 I6 W6 I7 W7

DualPipeV cuts such a pair in the middle and folds it: one pipe in the shape of a V, so that a rank holds half of the
weights. Two ranks, four microbatches, where the parts of a stage take one unit of time each:

    rank 0  F0 F1 F2 F0 I0 W0 F1 F3 B1 B1 F2 B0 B0 B2 B2 F3 .  B1 B1 B3 B3 I2 W2 I3 W3
    rank 1  .  F0 F0 F1 F1 F2 B0 B0 F2 B0 B0 F3 B1 B1 F3 B1 B1 B2 B2 B2 B2 I3 I3 W3 W3

Both run the same eight phases. With H for half of DualPipe's ranks, or all ranks of DualPipeV, r for a rank counted
from the outside, 0 and 1 for the stage near the outside and the other one, and n for the microbatches that pass each:

    F0                                        2 (H - r - 1) times
    F0 F1                                     r + 1
    I1 W1 F1                                  H - r - 1
    F0 B1 F1 B0                               n - 2H + r + 1
    B1 F1 B0                                  H - r - 1
    B1 B0, the later ones I1 I0               r + 1
    W I0                                      H - r - 1
    W                                         r + 1

What devices may gain by running F0 with B1, and F1 with B0, at the same time is outside of this model; here one
follows the other. Then DualPipe idles for D/2 - 1 and keeps D + 1 microbatches where F = I = W, on D ranks, and
DualPipeV idles for (D - 1)/2 and keeps D + 1/2. The D - 2 of the authors is for pairs that end together, so that the
output of a forward waits for its partner.

See DeepSeek-AI, "DeepSeek-V3 Technical Report", 2024, and "DualPipe", 2025.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts
from lightning_chimera.schedules.chimera import opposite_pipes
from lightning_chimera.schedules.one_f_one_b import one_f_one_b

_F, _B, _I, _W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT

Step = tuple[Kind, int]
"""A kind of work and the side, 0 or 1, that it is done on."""


def dualpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the DualPipe schedule; with one stage, which has nothing to pair, 1F1B.

    Raises:
        ValueError: if the number of stages or of microbatches is odd, or there are fewer than two for each stage.
    """
    check_counts("dualpipe", num_stages, num_microbatches)
    placement = opposite_pipes("dualpipe", num_stages)
    if num_stages == 1:
        return replace(one_f_one_b(num_stages, num_microbatches), name="dualpipe")
    if num_microbatches % 2 or num_microbatches < 2 * num_stages:
        raise ValueError(
            f"Schedule dualpipe needs an even number of microbatches, at least twice as many as stages; got"
            f" {num_microbatches} microbatches and {num_stages} stages."
        )
    half = num_microbatches // 2
    rows = []
    for rank in range(num_stages):
        outer = min(rank, num_stages - 1 - rank)
        sides = ((outer, rank != outer), (num_stages - 1 - outer, rank == outer))
        rows.append(
            tuple(
                Action(sides[side][0], kind, place + half * sides[side][1], int(sides[side][1]))
                for kind, side, place in _numbered(_phases(outer, num_stages // 2, half))
            )
        )
    return Schedule("dualpipe", placement, num_microbatches, tuple(rows))


def dualpipe_v(num_ranks: int, num_microbatches: int) -> Schedule:
    """Return the DualPipeV schedule.

    Raises:
        ValueError: if there are fewer than two microbatches for each rank.
    """
    check_counts("dualpipe_v", num_ranks, num_microbatches)
    if num_microbatches < 2 * num_ranks:
        raise ValueError(
            f"Schedule dualpipe_v needs at least twice as many microbatches as ranks; got {num_microbatches} for"
            f" {num_ranks} ranks."
        )
    rows = tuple(
        tuple(
            Action(2 * num_ranks - 1 - rank if side else rank, kind, place)
            for kind, side, place in _numbered(_phases(rank, num_ranks, num_microbatches))
        )
        for rank in range(num_ranks)
    )
    return Schedule("dualpipe_v", Placement.zigzag(num_ranks), num_microbatches, rows)


def _phases(outer: int, half: int, passing: int) -> Iterator[Step]:
    """Yield the eight phases of a rank; a weight gradient on side -1 is the one that waits longest."""
    inner = half - outer - 1
    yield from [(_F, 0)] * (2 * inner)
    yield from [(_F, 0), (_F, 1)] * (outer + 1)
    yield from [(_I, 1), (_W, -1), (_F, 1)] * inner
    yield from [(_F, 0), (_B, 1), (_F, 1), (_B, 0)] * (passing - 2 * half + outer + 1)
    yield from [(_B, 1), (_F, 1), (_B, 0)] * inner
    for index in range(2 * (outer + 1)):
        yield (_I if index > outer else _B), 1 - index % 2
    yield from [(_W, -1), (_I, 0)] * inner
    yield from [(_W, -1)] * (outer + 1)


def _numbered(steps: Iterator[Step]) -> Iterator[tuple[Kind, int, int]]:
    """Yield each step with the place of its microbatch among those that pass its side."""
    places: Counter[tuple[bool, int]] = Counter()
    waiting: list[tuple[int, int]] = []
    for kind, side in steps:
        if kind is _W:
            yield kind, *waiting.pop(0)
            continue
        place = places[kind is _F, side]
        places[kind is _F, side] += 1
        if kind is _I:
            waiting.append((side, place))
        yield kind, side, place
