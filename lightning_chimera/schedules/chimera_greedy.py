"""Chimera by list scheduling: each rank takes, of what is ready, the microbatch that is earliest in its pipe.

Four stages, eight microbatches, of which 0, 1, 4 and 5 run down; a backward twice as long as a forward:

    rank 0  F0 F1 F4 F2 B2 B2 F3 B3 B3 F5 B0 B0 F6 B6 B6 .  B1 B1 F7 B7 B7 B4 B4 .  .  B5 B5
    rank 1  .  F0 F2 F1 F3 F4 B2 B2 B0 B0 F6 B3 B3 F5 B1 B1 F7 B6 B6 B4 B4 B7 B7 B5 B5 .  .
    rank 2  .  F2 F0 F3 F1 F6 B0 B0 B2 B2 F4 B1 B1 F7 B3 B3 F5 B4 B4 B6 B6 B5 B5 B7 B7 .  .
    rank 3  F2 F3 F6 F0 B0 B0 F1 B1 B1 F7 B2 B2 F4 B4 B4 .  B3 B3 F5 B5 B5 B6 B6 .  .  B7 B7

Every stage of every pipe runs its own 1F1B order; the rank that holds several merges them as inputs arrive. Where all
microbatches are one unit this takes as long as Chimera. For more, most of the bubbles between the units are gone: with
a backward of two forwards, 4 ranks idle for 3 forwards and 8 ranks for 11, however many units there are. A rank keeps
one microbatch more, and messages are not taken in the order in which they are sent.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Kind, Schedule, check_counts
from lightning_chimera.schedules.chimera import opposite_pipes
from lightning_chimera.schedules.listing import Stream, list_schedule
from lightning_chimera.schedules.one_f_one_b import alternate
from lightning_chimera.schedules.units import units


def chimera_greedy(num_stages: int, num_microbatches: int, *, pipes: int = 2) -> Schedule:
    """Return Chimera's pipes in the order of list scheduling.

    Raises:
        ValueError: if there is no stage or no microbatch, the number of stages is odd and not 1, or they do not allow
            that number of pipes.
    """
    check_counts("chimera_greedy", num_stages, num_microbatches)
    placement = opposite_pipes("chimera_greedy", num_stages, pipes)
    entered: list[list[int]] = [[] for _ in range(placement.num_pipes)]
    places: dict[int, int] = {}
    for entry in units(num_microbatches, num_stages, placement.num_pipes):
        places[entry.microbatch] = len(entered[entry.pipe])
        entered[entry.pipe].append(entry.microbatch)
    streams: list[list[Stream]] = [[] for _ in range(num_stages)]
    for pipe, microbatches in enumerate(entered):
        for stage in range(num_stages):
            stream = alternate(stage, microbatches, num_stages - stage, pipe)
            streams[placement.rank_of(stage, pipe)].append(stream)

    def preference(action: Action) -> tuple[int, ...]:
        return places[action.microbatch], action.kind is Kind.FORWARD

    return list_schedule("chimera_greedy", placement, num_microbatches, streams, preference)
