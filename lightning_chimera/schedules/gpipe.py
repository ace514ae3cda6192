"""GPipe: every rank runs all forwards, then all backwards.

Four stages, four microbatches, a backward twice as long as a forward:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3
    rank 1  .  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .
    rank 2  .  .  F0 F1 F2 F3 .  .  .  B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .
    rank 3  .  .  .  F0 F1 F2 F3 B0 B0 B1 B1 B2 B2 B3 B3 .  .  .  .  .  .

Every rank idles for (num_stages - 1) forwards and as many backwards, and holds all microbatches at its peak.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def gpipe(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the GPipe schedule, backwards in the order of the forwards.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    check_counts("gpipe", num_stages, num_microbatches)
    rows = tuple(
        tuple(
            Action(stage, kind, microbatch)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
            for microbatch in range(num_microbatches)
        )
        for stage in range(num_stages)
    )
    return Schedule("gpipe", Placement.down(num_stages), num_microbatches, rows)
