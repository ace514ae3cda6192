"""Messages through memory that two processes see: nothing is lost, overwritten, leaked or waited for too long."""

import errno
import gc
import os
import resource
import time
from datetime import timedelta
from threading import Thread, Timer
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_chimera.checks import check_timeout
from lightning_chimera.runtime import shared_memory
from lightning_chimera.runtime.boundary import Boundary
from lightning_chimera.runtime.links import Links
from lightning_chimera.runtime.shared_memory import Inbox, LinkError, Outbox
from lightning_chimera.runtime.topology import Groups, Topology
from lightning_chimera.schedules import get_family

from .world import World

SHAPE = torch.Size((3, 1024))
BOUNDARY = Boundary(SHAPE, torch.float32)
BOUND = timedelta(seconds=0.2)
Link = tuple[Outbox, Inbox]


@pytest.fixture
def link() -> Link:
    outbox = Outbox(BOUND)
    return outbox, Inbox(outbox.offer, BOUND)


def tensor(number: int) -> Tensor:
    return torch.full(SHAPE, float(number))


def sent(link: Link, number: int) -> Tensor | None:
    """Sends a tensor full of a number and returns what is received."""
    outbox, inbox = link
    went = outbox.send(number, tensor(number))
    received = inbox.receive(number, BOUNDARY)
    assert went == (received is not None)
    return received


def received(link: Link, number: int) -> Tensor:
    found = sent(link, number)
    assert found is not None
    return found


def test_what_is_held_is_never_overwritten(link: Link) -> None:
    held: dict[int, Tensor] = {}
    for number in range(200):
        held[number] = received(link, number)
        if number % 3:
            del held[number // 2 if number // 2 in held else number]
        assert all(bool((value == known).all()) for known, value in held.items())
    assert len(held) > 50


def test_a_slot_that_nobody_holds_is_used_again(link: Link) -> None:
    places = {received(link, number).data_ptr() for number in range(20)}
    assert len(places) == 1


def test_a_view_or_a_graph_holds_a_slot(link: Link) -> None:
    row = received(link, 1)[1:]
    weight = torch.ones(1, requires_grad=True)
    loss = (received(link, 2).view(-1)[:5] * weight).sum()
    for number in range(3, 9):
        received(link, number)
    assert bool((row == 1).all())
    loss.backward()
    assert weight.grad is not None
    assert weight.grad.item() == 10
    places = {received(link, number).data_ptr() for number in range(9, 20)}
    assert row.data_ptr() - SHAPE[1] * 4 not in places


def test_messages_may_be_taken_in_another_order(link: Link) -> None:
    outbox, inbox = link
    for number in range(6):
        outbox.send(number, tensor(number))
    for number in (4, 0, 5, 3, 1, 2):
        found = inbox.receive(number, BOUNDARY)
        assert found is not None
        assert bool((found == number).all())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int8, torch.bool, torch.complex64])
def test_values_of_any_type_and_layout_arrive_as_they_are(link: Link, dtype: torch.dtype) -> None:
    outbox, inbox = link
    for number, given in enumerate(
        [torch.randn(5, 7).mul(9).to(dtype).t(), torch.ones(1, dtype=dtype).expand(4, 3), torch.ones((), dtype=dtype)]
    ):
        outbox.send(number, given)
        found = inbox.receive(number, Boundary(given.shape, dtype))
        assert found is not None
        assert found.is_contiguous()
        assert torch.equal(found, given)


def test_messages_without_slot_or_without_bytes_go_another_way(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_memory, "MOST_SLOTS", 2)
    held = [received(link, 1), received(link, 2)]
    assert sent(link, 3) is None
    held.pop()
    assert sent(link, 4) is not None
    outbox, inbox = link
    assert not outbox.send(5, torch.empty(0, 3))
    assert inbox.receive(5, Boundary(torch.Size((0, 3)), torch.float32)) is None


def test_messages_go_another_way_where_no_memory_is_left(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: int) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", full)
        assert sent(link, 1) is None
    assert sent(link, 2) is not None


def test_sizes_that_vary_share_slots(link: Link) -> None:
    outbox, inbox = link
    places = set()
    for number, rows in enumerate([100, 99, 97, 100, 98, 101]):
        outbox.send(number, torch.ones(rows, 1024))
        found = inbox.receive(number, Boundary(torch.Size((rows, 1024)), torch.float32))
        assert found is not None
        places.add(found.data_ptr())
        del found
    assert len(places) == 1


@pytest.mark.parametrize(
    "expected", [Boundary(SHAPE, torch.int32), Boundary(SHAPE[::-1], torch.float32), Boundary(SHAPE, torch.float64)]
)
def test_a_message_of_another_shape_or_type_is_refused(link: Link, expected: Boundary) -> None:
    outbox, inbox = link
    outbox.send(0, tensor(1))
    with pytest.raises(LinkError, match=r"\(3, 1024\) torch\.float32 was sent"):
        inbox.receive(0, expected)


def test_a_sender_waits_for_a_reader_as_long_as_is_said(link: Link) -> None:
    outbox, inbox = link
    number = -1

    def fill() -> None:
        nonlocal number
        while number < 1 << 17:
            outbox.send(number + 1, torch.empty(0))
            number += 1

    start = time.monotonic()
    with pytest.raises(LinkError, match=r"the receiver has read no message for 0\.2 s, and no more fit"):
        fill()
    assert time.monotonic() - start < 30
    assert number > 500
    for read in range(number + 1):  # nothing was lost, nothing written in part
        assert inbox.receive(read, Boundary(torch.Size((0,)), torch.float32)) is None
    assert outbox.send(number + 1, tensor(5))
    found = inbox.receive(number + 1, BOUNDARY)
    assert found is not None
    assert bool((found == 5).all())


def test_a_sender_that_waits_goes_on_when_it_is_read() -> None:
    outbox = Outbox(timedelta(seconds=60))
    inbox = Inbox(outbox.offer, timedelta(seconds=60))
    nothing = Boundary(torch.Size((0,)), torch.float32)
    count = 3000  # more than the pipe holds

    def read() -> None:
        time.sleep(0.1)
        for number in range(count):
            inbox.receive(number, nothing)

    reader = Thread(target=read, daemon=True)
    reader.start()
    for number in range(count):
        outbox.send(number, torch.empty(0))
    reader.join(60)
    assert not reader.is_alive()


def test_silence_is_waited_for_as_long_as_is_said(link: Link) -> None:
    start = time.monotonic()
    with pytest.raises(LinkError, match=r"nothing has come for 0\.2 s"):
        link[1].receive(0, BOUNDARY)
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("given", [1e10, timedelta.max])
def test_the_longest_wait_is_one_that_the_system_takes(given: float | timedelta) -> None:
    bound = check_timeout(given)
    outbox = Outbox(bound)
    inbox = Inbox(outbox.offer, bound)
    sender = Timer(0.1, lambda: outbox.send(0, tensor(5)))
    sender.start()
    found = inbox.receive(0, BOUNDARY)  # there is nothing yet
    sender.join()
    assert found is not None
    assert bool((found == 5).all())
    nothing = Boundary(torch.Size((0,)), torch.float32)

    def read(count: int) -> None:
        for number in range(1, count):
            inbox.receive(number, nothing)

    reader = Timer(0.1, read, [3000])  # more than the pipe holds
    reader.start()
    for number in range(1, 3000):
        outbox.send(number, torch.empty(0))
    reader.join()


def test_both_ends_see_that_the_other_has_gone() -> None:
    outbox = Outbox(BOUND)
    inbox = Inbox(outbox.offer, timedelta(seconds=60))
    outbox.settle()
    del outbox
    with pytest.raises(LinkError, match="the sender has gone"):
        inbox.receive(0, BOUNDARY)
    outbox = Outbox(BOUND)
    inbox = Inbox(outbox.offer, timedelta(seconds=60))
    outbox.settle()
    del inbox
    with pytest.raises(LinkError, match="the receiver has gone"):
        outbox.send(0, tensor(0))


def test_a_link_leaves_no_file_behind() -> None:
    def num_files() -> int:
        gc.collect()
        return len(os.listdir("/proc/self/fd"))

    before = num_files()
    outbox = Outbox(BOUND)
    inbox = Inbox(outbox.offer, BOUND)
    outbox.settle()
    received((outbox, inbox), 1)
    assert num_files() > before
    del outbox, inbox
    assert num_files() == before


def test_what_has_come_outlives_both_ends() -> None:
    outbox = Outbox(BOUND)
    inbox = Inbox(outbox.offer, BOUND)
    found = received((outbox, inbox), 7)
    del outbox, inbox
    assert bool((found == 7).all())


def test_a_forked_process_gives_no_slot_back(link: Link) -> None:
    # As a worker of a data loader may, whose copy of the memory of this process goes with it.
    held = received(link, 1)
    child = os.fork()
    if not child:
        del held
        os._exit(0)
    os.waitpid(child, 0)
    received(link, 2)
    assert bool((held == 1).all())


def test_memory_of_another_process_is_not_taken_for_that_of_the_offer() -> None:
    outbox = Outbox(BOUND)
    process, memory, *pipes, name = outbox.offer
    offers = [process, memory, *pipes, name + 1], [1 << 22, memory, *pipes, name], [process, pipes[0], *pipes, name]
    for wrong in offers:
        with pytest.raises(OSError):  # noqa: PT011
            Inbox(wrong, BOUND)


def connect_in_little_room() -> tuple[int, int]:
    """Links without and with a limit on address space; how many go through memory."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank)
    topology = Topology(2, 1, rank)
    groups = Groups(topology, get_family("1f1b").build(2, 2).placement, [], timedelta(seconds=30))
    counts = []
    for limit in (resource.RLIM_INFINITY, 1 << 33):
        if rank:
            resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
        links = Links(topology, groups.links, torch.device("cpu"), timedelta(seconds=30))
        links.connect()
        counts.append(len(links.shared))
    dist.barrier()
    return counts[0], counts[1]


def test_links_do_without_memory_where_one_end_has_no_room(world: World) -> None:
    assert world.run(connect_in_little_room, size=2) == [(2, 0), (2, 0)]


def connect_with_one_unwilling_rank() -> int:
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank)
    topology = Topology(2, 1, rank)
    groups = Groups(topology, get_family("1f1b").build(2, 2).placement, [], timedelta(seconds=30))
    links = Links(topology, groups.links, torch.device("cpu"), timedelta(seconds=30), shared_memory=rank == 0)
    links.connect()
    dist.barrier()
    return len(links.shared)


def test_links_do_without_memory_where_one_end_does_not_want_it(world: World) -> None:
    assert world.run(connect_with_one_unwilling_rank, size=2) == [0, 0]
