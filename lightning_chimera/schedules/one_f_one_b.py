"""1F1B: after a warm-up, every rank runs one forward and one backward in turn.

Four stages, four microbatches, a backward twice as long as a forward:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .
    rank 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .
    rank 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .

The bubble is GPipe's, but rank r holds at most (num_stages - r) microbatches, however many there are.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """Return the 1F1B schedule with a flush (also called DAPPLE or PipeDream-Flush).

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    check_counts("1f1b", num_stages, num_microbatches)
    rows = tuple(_row(stage, num_stages, num_microbatches) for stage in range(num_stages))
    return Schedule("1f1b", Placement.down(num_stages), num_microbatches, rows)


def _row(stage: int, num_stages: int, num_microbatches: int) -> tuple[Action, ...]:
    forwards = [Action(stage, Kind.FORWARD, microbatch) for microbatch in range(num_microbatches)]
    backwards = [Action(stage, Kind.BACKWARD, microbatch) for microbatch in range(num_microbatches)]
    warm_up = min(num_microbatches, num_stages - 1 - stage)
    steady = zip(forwards[warm_up:], backwards, strict=False)
    drain = backwards[num_microbatches - warm_up :]
    return (*forwards[:warm_up], *(action for pair in steady for action in pair), *drain)
