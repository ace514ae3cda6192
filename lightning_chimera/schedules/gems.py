"""GEMS: two opposite pipes run one microbatch at a time, by turns, so that a rank never keeps more than one.

Four stages, three microbatches, of which 0 and 2 run down and 1 runs up; a backward twice as long as a forward:

    rank 0  F0 .  .  .  .  .  .  .  .  .  B0 B0 F1 B1 B1 F2 .  .  .  .  .  .  .  .  .  .  .  .  B2 B2
    rank 1  .  F0 .  .  .  .  .  .  B0 B0 F1 .  .  .  .  B1 B1 F2 .  .  .  .  .  .  .  .  B2 B2 .  .
    rank 2  .  .  F0 .  .  .  B0 B0 F1 .  .  .  .  .  .  .  .  B1 B1 F2 .  .  .  .  B2 B2 .  .  .  .
    rank 3  .  .  .  F0 B0 B0 F1 .  .  .  .  .  .  .  .  .  .  .  .  B1 B1 F2 B2 B2 .  .  .  .  .  .

A microbatch's forward follows the backward of the one before it through the ranks. With D stages, N microbatches, and
times F and B of forward and backward, a step takes D (F + B) + (N - 1) (F + D B); for long steps and B = 2F a rank
idles for the (D - 1)/(D + 1/2)-th part of it. Memory is all that it saves.

See Jain et al., "GEMS: GPU-Enabled Memory-Aware Model-Parallelism System for Distributed DNN Training", SC'20.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Schedule, check_counts
from lightning_chimera.schedules.chimera import opposite_pipes


def gems(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the GEMS schedule: even microbatches run down, odd ones up, and a rank holds one at a time.

    Raises:
        ValueError: if there is no stage or no microbatch, or the number of stages is odd and not 1.
    """
    check_counts("gems", num_stages, num_microbatches)
    placement = opposite_pipes("gems", num_stages)
    rows = tuple(
        tuple(
            Action(stage if pipe == 0 else num_stages - 1 - stage, kind, microbatch, pipe)
            for microbatch in range(num_microbatches)
            for pipe in [microbatch % placement.num_pipes]
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        )
        for stage in range(num_stages)
    )
    return Schedule("gems", placement, num_microbatches, rows)
