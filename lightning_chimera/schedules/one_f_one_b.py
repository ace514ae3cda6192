"""1F1B: after a warm-up, every rank runs one forward and one backward in turn.

Four stages, four microbatches, a backward twice as long as a forward:

    rank 0  F0 F1 F2 F3 .  .  .  .  .  .  B0 B0 .  B1 B1 .  B2 B2 .  B3 B3
    rank 1  .  F0 F1 F2 .  .  .  .  B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 .  .
    rank 2  .  .  F0 F1 .  .  B0 B0 F2 B1 B1 F3 B2 B2 .  B3 B3 .  .  .  .
    rank 3  .  .  .  F0 B0 B0 F1 B1 B1 F2 B2 B2 F3 B3 B3 .  .  .  .  .  .

The bubble is GPipe's, but rank r holds at most (num_stages - r) microbatches, however many there are. That is DAPPLE's
policy PA, and PipeDream-Flush.

Where messages take time, these few in flight do not cover a round trip: with a latency l, each D microbatches take
2 (D - 1) l longer. A deeper warm-up hides all of that but 2 (D - 1) l once: a rank that holds K microbatches where the
next one holds K' needs K >= K' + 1 + 2 l / (F + B). DAPPLE's policy PB holds 2 (D - r) - 1, enough while l is at most
half of F + B; BaPipe's 1F1B-SO holds 2 (D - r).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def one_f_one_b(num_stages: int, num_microbatches: int, *, depths: Sequence[int] | None = None) -> Schedule:
    """Return the 1F1B schedule with a flush (also called DAPPLE or PipeDream-Flush).

    Args:
        num_stages: stages, and ranks.
        num_microbatches: microbatches of a step.
        depths: for each rank, the most microbatches that it holds; (num_stages - rank) unless told otherwise.

    Raises:
        ValueError: if there is no stage or no microbatch, or the depths are not one for each stage, at least 1, and
            each larger than the next.
    """
    check_counts("1f1b", num_stages, num_microbatches)
    depths = range(num_stages, 0, -1) if depths is None else depths
    if len(depths) != num_stages or any(a <= b for a, b in zip(depths, [*depths[1:], 0], strict=True)):
        raise ValueError(
            f"The depths of 1f1b are one for each of {num_stages} stages, and each holds at least one microbatch more"
            f" than the next stage, the last one at least 1; got {list(depths)}."
        )
    rows = tuple(alternate(stage, range(num_microbatches), depth) for stage, depth in enumerate(depths))
    return Schedule("1f1b", Placement.down(num_stages), num_microbatches, rows)


def one_f_one_b_pb(num_stages: int, num_microbatches: int) -> Schedule:
    """Return 1F1B with DAPPLE's deep warm-up PB, which hides a latency of up to half a forward and backward.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    return _named("1f1b_pb", num_stages, num_microbatches, range(2 * num_stages - 1, 0, -2))


def one_f_one_b_so(num_stages: int, num_microbatches: int) -> Schedule:
    """Return BaPipe's 1F1B-SO, which holds twice as many microbatches as 1F1B.

    Raises:
        ValueError: if there is no stage or no microbatch.
    """
    return _named("1f1b_so", num_stages, num_microbatches, range(2 * num_stages, 0, -2))


def depths_that_hide(latency: float, work: float, num_stages: int) -> tuple[int, ...]:
    """Return the least depths of 1F1B with which a latency costs no more than once through the pipe and back.

    Args:
        latency: time of a message between two stages.
        work: time of a forward and a backward of a stage.
        num_stages: number of stages.
    """
    step = 1 + math.ceil(2 * latency / work)
    return tuple(1 + step * (num_stages - 1 - stage) for stage in range(num_stages))


def alternate(stage: int, microbatches: Sequence[int], depth: int, pipe: int = 0) -> tuple[Action, ...]:
    """Return the actions of a stage that runs one forward and one backward in turn and holds ``depth`` microbatches."""
    forwards = [Action(stage, Kind.FORWARD, microbatch, pipe) for microbatch in microbatches]
    backwards = [Action(stage, Kind.BACKWARD, microbatch, pipe) for microbatch in microbatches]
    warm_up = min(len(microbatches), depth - 1)
    steady = zip(forwards[warm_up:], backwards, strict=False)
    drain = backwards[len(microbatches) - warm_up :]
    return (*forwards[:warm_up], *(action for pair in steady for action in pair), *drain)


def _named(name: str, num_stages: int, num_microbatches: int, depths: Sequence[int]) -> Schedule:
    check_counts(name, num_stages, num_microbatches)
    return dataclasses.replace(one_f_one_b(num_stages, num_microbatches, depths=depths), name=name)
