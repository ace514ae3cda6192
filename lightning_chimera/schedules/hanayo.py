"""Hanayo: one pipe that runs down and up the ranks in several waves, without copies of the weights.

Two ranks, one wave, four microbatches, a backward twice as long as a forward; rank 0 holds stages 0 and 3:

    rank 0  F0 F1 F2 F0 B0 B0 F1 B1 B1 F3 B0 B0 .  .  B1 B1 F2 B2 B2 F3 B3 B3 .  B2 B2 .  .  B3 B3
    rank 1  .  F0 F0 F1 F1 F2 B0 B0 B0 B0 B1 B1 B1 B1 F2 F3 F3 .  .  B2 B2 B2 B2 B3 B3 B3 B3 .  .

With D ranks and w waves a pipe has 2 w D stages. A free rank prefers backwards to forwards, and of each the earliest
microbatch. More waves leave smaller bubbles and take more messages: for D = N = 4 and B = 2F a rank idles for 6, 3.25
and 1.625 with 1, 2 and 4 waves, where 1F1B idles for 9. No rank keeps more than D microbatches where N is D.

See Liu et al., "Hanayo: Harnessing Wave-like Pipeline Parallelism for Enhanced Large Model Training Efficiency", SC'23.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts
from lightning_chimera.schedules.listing import list_schedule


def hanayo(num_ranks: int, num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return the Hanayo schedule.

    Args:
        num_ranks: ranks.
        num_microbatches: microbatches of a step.
        chunks: stages of each rank, two for each wave.

    Raises:
        ValueError: if there is no rank or no microbatch, or the number of chunks is odd.
    """
    check_counts("hanayo", num_ranks, num_microbatches, chunks=chunks)
    if chunks % 2:
        raise ValueError(f"Schedule hanayo runs in waves: a rank has two chunks for each; got {chunks} chunks.")
    placement = Placement.zigzag(num_ranks, chunks // 2)
    streams = [
        [
            [Action(stage, kind, microbatch) for microbatch in range(num_microbatches)]
            for stage in placement.stages_of(rank)
            for kind in (Kind.FORWARD, Kind.BACKWARD)
        ]
        for rank in range(num_ranks)
    ]

    def preference(action: Action) -> tuple[int, ...]:
        return action.kind is Kind.FORWARD, action.microbatch

    return list_schedule("hanayo", placement, num_microbatches, streams, preference)
