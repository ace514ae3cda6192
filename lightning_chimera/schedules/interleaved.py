"""Interleaved 1F1B: each rank holds several smaller stages, and a microbatch passes all ranks several times.

Two ranks with two stages each, four microbatches, a backward twice as long as a forward; stage s is on rank s mod 2:

    rank 0  F0 F1 F0 F1 F2 .  B0 B0 F3 B1 B1 F2 B0 B0 F3 B1 B1 .  B2 B2 .  B3 B3 B2 B2 B3 B3
    rank 1  .  F0 F1 F0 B0 B0 F1 B1 B1 F2 B0 B0 F3 B1 B1 F2 B2 B2 F3 B3 B3 B2 B2 B3 B3 .  .

With D ranks and v chunks a pipe has v D stages, and rank r holds stages r, r + D, and so on. Forwards run in groups of
D microbatches, chunk after chunk, backwards in the same groups with the chunks reversed, and a rank begins to alternate
after 2 (D - 1 - r) + (v - 1) D forwards. Each rank idles for (D - 1)(F + B)/v, and rank 0 keeps the activations of
D + (D - 1)/v microbatches (D where D is all there are), for v times as many messages. Where D does not divide the
number of microbatches, those missing from the last group leave bubbles in their places.

See Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM", SC'21.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Placement, Schedule, check_counts


def interleaved(num_ranks: int, num_microbatches: int, *, chunks: int = 2) -> Schedule:
    """Return the interleaved 1F1B schedule.

    Args:
        num_ranks: ranks.
        num_microbatches: microbatches of a step, any number.
        chunks: stages of each rank.

    Raises:
        ValueError: if there is no rank, no microbatch or no chunk.
    """
    check_counts("interleaved", num_ranks, num_microbatches, chunks=chunks)
    placement = Placement.interleaved(num_ranks, chunks)
    rows = tuple(_row(rank, num_ranks, num_microbatches, chunks) for rank in range(num_ranks))
    return Schedule("interleaved", placement, num_microbatches, rows)


def _row(rank: int, num_ranks: int, num_microbatches: int, chunks: int) -> tuple[Action, ...]:
    """Return a rank's row, as that of whole groups from which the missing microbatches are taken."""
    groups = [range(first, first + num_ranks) for first in range(0, num_microbatches, num_ranks)]
    stages = [chunk * num_ranks + rank for chunk in range(chunks)]
    forwards = [Action(stage, Kind.FORWARD, i) for group in groups for stage in stages for i in group]
    backwards = [Action(stage, Kind.BACKWARD, i) for group in groups for stage in reversed(stages) for i in group]
    warm_up = min(len(forwards), 2 * (num_ranks - 1 - rank) + (chunks - 1) * num_ranks)
    if chunks == 1:
        warm_up = min(len(forwards), num_ranks - 1 - rank)
    steady = [action for pair in zip(forwards[warm_up:], backwards, strict=False) for action in pair]
    row = (*forwards[:warm_up], *steady, *backwards[len(forwards) - warm_up :])
    return tuple(action for action in row if action.microbatch < num_microbatches)
