"""How many threads a rank computes with, where nobody has said so: its share of the cores of its node."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

_SAID = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
"""Where people, and torchrun, say how many threads a process has."""


class Seat(NamedTuple):
    """What a rank tells the others.

    Attributes:
        node: Its node.
        cores: The cores that it may run on.
        threads: The threads that it computes with now.
    """

    node: int
    cores: frozenset[int]
    threads: int


def own_cores() -> frozenset[int]:
    """The cores that this process may run on, each by the first of its hardware threads."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset(range(os.cpu_count() or 1))
    return frozenset(map(_first_of_core, os.sched_getaffinity(0)))


def share_of_cores(seats: Sequence[Seat], rank: int) -> int:
    """How many cores a rank has to itself, where each is shared by the ranks of its node that may run on it."""
    node, cores, _ = seats[rank]
    masks = [seat.cores for seat in seats if seat.node == node]
    return max(1, int(sum(Fraction(1, sum(core in mask for mask in masks)) for core in cores)))


class Threads:
    """The intra-op threads of this rank, from the start of a run to its end."""

    def __init__(self) -> None:
        self._is_said = True

    @contextmanager
    def around(self, num_processes: int, *, starts: bool) -> Iterator[None]:
        """Enters around a run; afterwards the process has the threads that it had before.

        Lightning's launchers divide the cores of a process by the number of processes wherever the environment says
        nothing, also where a process has cores of its own already, or where somebody has asked for fewer.

        Args:
            num_processes: The processes on this node.
            starts: Whether this process starts the others, so that they share its cores.
        """
        before = torch.get_num_threads()
        self._is_said = any(os.environ.get(name) for name in _SAID)
        if not self._is_said:
            if starts:
                torch.set_num_threads(min(before, max(1, len(own_cores()) // num_processes)))
            os.environ["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # so that Lightning leaves it at that
        try:
            yield
        finally:
            torch.set_num_threads(before)
            if not self._is_said:
                os.environ.pop("OMP_NUM_THREADS", None)

    def share(self, node: int) -> list[int]:
        """Gives this rank no more threads than its share of the cores, unless the environment says how many it has.

        Every rank must call it.

        Args:
            node: This rank's node.

        Returns:
            The threads of each rank.
        """
        seats = _gather(Seat(node, own_cores(), torch.get_num_threads()))
        if not self._is_said:
            allowed = share_of_cores(seats, dist.get_rank())
            # Where Slurm does not bind tasks to cores, a task may run on all cores of the node.
            allowed = min(allowed, int(os.environ.get("SLURM_CPUS_PER_TASK") or allowed))
            torch.set_num_threads(min(allowed, torch.get_num_threads()))
        return [seat.threads for seat in _gather(Seat(node, own_cores(), torch.get_num_threads()))]


def _gather(seat: Seat) -> list[Seat]:
    """What every rank tells, in the order of the global ranks."""
    seats: list[Seat] = [seat] * dist.get_world_size()
    dist.all_gather_object(seats, seat)
    return seats


def _first_of_core(cpu: int) -> int:
    """The first hardware thread of a core."""
    try:
        siblings = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text()
        return int(siblings.replace("-", ",").partition(",")[0])
    except (OSError, ValueError):
        return cpu
