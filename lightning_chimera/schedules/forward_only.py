"""Forward only: the first pipe of a placement runs every microbatch forward, for evaluation and prediction.

Four stages on four ranks, three microbatches:

    rank 0  F0 F1 F2 .  .  .
    rank 1  .  F0 F1 F2 .  .
    rank 2  .  .  F0 F1 F2 .
    rank 3  .  .  .  F0 F1 F2

A rank with several stages runs all microbatches through one before it goes on to the next.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def forward_only(placement: Placement, num_microbatches: int) -> Schedule:
    """Return the schedule that only runs forwards, through the first pipe.

    Raises:
        ValueError: if there is no microbatch.
    """
    check_counts("forward_only", placement.num_stages, num_microbatches)
    first = Placement(placement.ranks[:1])
    rows = tuple(
        tuple(
            Action(stage, Kind.FORWARD, microbatch)
            for stage in first.stages_of(rank)
            for microbatch in range(num_microbatches)
        )
        for rank in range(first.num_ranks)
    )
    return Schedule("forward_only", first, num_microbatches, rows)
