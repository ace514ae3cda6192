"""Messages between stages arrive, in every schedule, whatever their size and whatever the ranks' timing."""

import os
import random
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_chimera.runtime import shared_memory
from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.executor import Executor, Incoming
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.schedules import SCHEDULES, Action, Kind, Operation, get_family, lower

from .fidelity import Cell, check
from .users import LanguageModule, Row
from .world import World

SMALL, LARGE = 8 * 1024, 4 * 1024 * 1024
"""Bytes of a message: of those that a connection buffers, and of those that it does not."""
FIRST = ("chimera", "gpipe", "1f1b")
SEVERAL_STAGES = ("interleaved", "dualpipe_v", "chimera_halving")
"""Stages that hand over on a rank; messages that are not taken in the order in which they come; halves."""
BOUND = timedelta(seconds=30)
WAYS = ("gloo", "memory", "both")
"""How messages go; through memory with one slot, those that find it taken go by gloo."""


@dataclass
class Relay:
    """Stages without any model: each adds a number that tells who has been there, and checks what it receives.

    Attributes:
        num_stages: Number of stages.
        nbytes: Bytes of a message; microbatches have slightly different ones.
        pause: Longest pause of a stage in seconds.
        known: Whether shapes are known before a microbatch has been seen.
        generator: Draws the pauses.
    """

    num_stages: int
    nbytes: int
    pause: float
    known: bool
    generator: random.Random

    def boundary(self, action: Action) -> Boundary | None:
        return self.demand(action) if self.known else None

    def demand(self, action: Action) -> Boundary:
        size = self.nbytes // 4 - action.microbatch
        return Boundary(torch.Size((size // 2 if action.half else size,)), torch.float32)

    def run(self, action: Action, incoming: Incoming) -> Tensor | None:
        self.known = True  # as in training: the shape is seen when the model is called
        if action.kind is Kind.WEIGHT:
            self.sleep()
            return None
        forward = action.kind is Kind.FORWARD
        passed = action.stage if forward else self.num_stages - 1 - action.stage
        sign = 1 if forward else -1
        tensor = torch.full(self.demand(action).shape, float(sign * action.microbatch))
        if passed:
            tensor = incoming(self.demand(action))
        assert bool((tensor == sign * (action.microbatch + 1000 * passed)).all()), action
        self.sleep()
        return tensor + sign * 1000 if passed < self.num_stages - 1 else None

    def sleep(self) -> None:
        if self.pause:
            time.sleep(self.generator.uniform(0, self.pause))


def relay(name: str, num_ranks: int, num_microbatches: int, nbytes: int, seeds: list[int], pause: float) -> int:
    """Runs this rank's row for some seeds, whichever way messages go, and tells how many actions it has run."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank)
    schedule = get_family(name).build(num_ranks, num_microbatches)
    topology = Topology(num_ranks, 1, rank)
    groups = Groups(topology, schedule.placement, [], BOUND)
    lowered = lower(schedule)
    count = 0
    for way in WAYS:
        shared_memory.MOST_SLOTS = 1 if way == "both" else 256
        links = Links(topology, groups.links, torch.device("cpu"), BOUND, shared_memory=way != "gloo")
        links.connect()
        assert set(links.shared) == {link for link in groups.links if way != "gloo" and topology.position in link}
        executor = Executor(links, topology.position)
        for seed in seeds_of(way, nbytes, seeds):
            work = Relay(schedule.num_stages, nbytes, pause, seed % 2 == 0, random.Random(100 * seed + rank))
            executor.run(lowered, work, new=() if work.known else range(num_microbatches))
            count += len(executor.spans)
            assert [span.action for span in executor.spans] == list(schedule.rows[topology.position])
    dist.barrier()
    return count


def seeds_of(way: str, nbytes: int, seeds: list[int]) -> list[int]:
    """Only gloo posts receives, for which it matters when shapes are known; only memory is fast with large messages."""
    if way == "both" and nbytes == LARGE:
        return []
    return seeds if way == "gloo" else seeds[:: 2 if way == "memory" else -2]


def check_relay(world: World, *args: Any, stages: int, microbatches: int, seeds: list[int]) -> None:
    name, nbytes, pause = args
    counts = world.run(relay, name, stages, microbatches, nbytes, seeds, pause, size=stages)
    schedule = get_family(name).build(stages, microbatches)
    runs = sum(len(seeds_of(way, nbytes, seeds)) for way in WAYS)
    assert sum(counts) == runs * sum(map(len, schedule.rows))


@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("name", [*FIRST, *SEVERAL_STAGES])
def test_messages_of_any_size_arrive_in_order(world: World, name: str, nbytes: int) -> None:
    check_relay(world, name, nbytes, 0.0, stages=4, microbatches=8, seeds=[0, 1])


@pytest.mark.parametrize("name", [*FIRST, *SEVERAL_STAGES])
def test_messages_arrive_at_any_timing(world: World, name: str) -> None:
    check_relay(world, name, SMALL, 0.02, stages=4, microbatches=8, seeds=[0, 1])


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("microbatches", [1, 2, 3, 4, 5, 7, 8, 16])
@pytest.mark.parametrize(("name", "stages"), [("chimera", 8), ("gpipe", 3), *((name, 2) for name in FIRST)])
def test_messages_arrive_for_any_numbers(world: World, name: str, stages: int, microbatches: int, nbytes: int) -> None:
    check_relay(world, name, nbytes, 0.0, stages=stages, microbatches=microbatches, seeds=[0, 1])


@pytest.mark.long
@pytest.mark.parametrize("nbytes", [SMALL, LARGE])
@pytest.mark.parametrize("name", [*SCHEDULES])
def test_messages_arrive_at_twenty_timings(world: World, name: str, nbytes: int) -> None:
    check_relay(world, name, nbytes, 0.03, stages=4, microbatches=8, seeds=list(range(20)))


def send_another_shape(known: Boundary, sent: Boundary) -> str:
    """Position 0 sends to position 1 what that does not expect; tells the error."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank)
    lowered = lower(get_family("gpipe").build(2, 1))
    topology = Topology(2, 1, rank)
    groups = Groups(topology, lowered.schedule.placement, [], timedelta(seconds=5))
    links = Links(topology, groups.links, torch.device("cpu"), timedelta(seconds=5), shared_memory=False)
    links.connect()
    message = next(subject for operation, subject in lowered.rows[0] if operation is Operation.SEND)
    links.begin()
    told = "nothing"
    try:
        if topology.position == 0:
            links.send(message, torch.ones(sent.shape, dtype=sent.dtype), known)
        else:
            links.post(message, known)
            links.receive(message, sent)
    except RuntimeError as error:
        told = str(error)
    dist.barrier()
    return told


@pytest.mark.parametrize(
    "sent", [Boundary(torch.Size((2, 5)), torch.float32), Boundary(torch.Size((3, 5)), torch.int32)]
)
def test_a_message_of_another_shape_or_type_is_refused_on_both_sides(world: World, sent: Boundary) -> None:
    # Gloo itself would take the bytes as they come.
    known = Boundary(torch.Size((3, 5)), torch.float32)
    receiver, sender = world.run(send_another_shape, known, sent, size=2)
    both = (str(tuple(sent.shape)), str(sent.dtype), "(3, 5)", "torch.float32")
    for told in (sender, receiver):
        assert all(part in told for part in both), told


class Sleepy(LanguageModule):
    """Takes its time, another on each rank and for each microbatch."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.pauses = getattr(self, "pauses", None) or random.Random(os.getpid())
        time.sleep(self.pauses.uniform(0, 0.02))
        loss = super().training_step(batch, batch_idx)
        time.sleep(self.pauses.uniform(0, 0.02))
        return loss


@pytest.mark.parametrize("cell", [Cell("chimera_split", 4, strategy=(("shared_memory", False),))], ids=str)
def test_training_over_gloo_alone_is_the_same(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.parametrize("cell", [Cell("chimera", 4)], ids=str)
def test_training_does_not_depend_on_timing(world: World, cell: Cell) -> None:
    check(world, cell, Sleepy)


@pytest.mark.long
@pytest.mark.parametrize("repeat", range(3))
@pytest.mark.parametrize("name", FIRST)
def test_no_training_depends_on_timing(world: World, name: str, repeat: int) -> None:
    check(world, Cell(name, 4, replicas=2, microbatches=5), Sleepy)
