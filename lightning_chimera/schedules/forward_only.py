"""Forward only: one pipe that runs every microbatch forward, for evaluation and prediction.

Four stages, three microbatches:

    rank 0  F0 F1 F2 .  .  .
    rank 1  .  F0 F1 F2 .  .
    rank 2  .  .  F0 F1 F2 .
    rank 3  .  .  .  F0 F1 F2
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def forward_only(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the schedule that only runs forwards, through one pipe.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    check_counts("forward_only", num_stages, num_microbatches)
    rows = tuple(
        tuple(Action(stage, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches))
        for stage in range(num_stages)
    )
    return Schedule("forward_only", Placement.down(num_stages), num_microbatches, rows)
