"""The two ends of a link between processes of one host, through memory that both have mapped.

The sender copies a tensor into a slot of the memory and rings: it writes a record of where it lies to a pipe, at which
the receiver sleeps. The receiver uses the slot itself as the tensor, without a copy; when autograd and all others have
let go of it, the slot goes back through a second pipe. A sender without a free slot makes one more. Where it can't, the
record says that the message comes another way. So nobody waits for a slot. A record says of what shape and type the
tensor is, so that both ends are known to mean the same.

Memory and pipes have no names: they go with the last process that has them, however that ends. The receiver opens them
among the open files of the sender, which proves that both see the same memory. That is allocated before it is written
to, so it is an error that can be handled if there is none left.
"""

import mmap
import os
import secrets
import select
import struct
import time
import weakref
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

from lightning_chimera.runtime.boundary import NUM_NUMBERS, Boundary

MOST_SLOTS = 256
"""Of a link; while the receiver has that many, messages go another way."""

ROOM = 1 << 34
"""Bytes of address space for the slots of a link; only what is in use is backed by memory."""

Offer = list[int]
"""How the receiver finds the memory and its ends of the pipes: a process, three of its files, the memory's name."""

OFFER_LENGTH = 5

_RECORD = struct.Struct(f"<{2 + NUM_NUMBERS}q")  # number of the message, where it lies, its shape and type
_MOST_RECORDS = 64
"""That are read at once."""
_ELSEWHERE = -1
_CREDIT = struct.Struct("<q")  # where the slot lies


class LinkError(RuntimeError):
    """A message did not come, or could not be sent."""


class BoundaryError(LinkError):
    """A message is not of the shape and type that its receiver expects.

    Args:
        sent: Those that it has.
    """

    def __init__(self, sent: Boundary) -> None:
        super().__init__(f"{sent} was sent")
        self.sent = sent


class Outbox:
    """The sending end.

    Args:
        timeout: Bound on every wait.

    Attributes:
        offer: Lets the receiver find its end.

    Raises:
        OSError: There is no room.
        AttributeError: The system has no memory without a name.
    """

    def __init__(self, timeout: timedelta) -> None:
        name = secrets.randbits(62)
        self._memory = os.memfd_create(_named(name))
        bell, self._bell = os.pipe()
        self._credits, credits = os.pipe()
        self.offer: Offer = [os.getpid(), self._memory, bell, credits, name]
        self._close_theirs = weakref.finalize(self, _close, bell, credits)
        weakref.finalize(self, _close, self._memory, self._bell, self._credits)
        for file in (self._bell, self._credits):
            os.set_blocking(file, False)
        self._timeout = timeout
        os.ftruncate(self._memory, ROOM)
        self._room = torch.frombuffer(mmap.mmap(self._memory, ROOM), dtype=torch.uint8)
        self._sizes: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._slots: dict[int, Tensor] = {}
        """Where there is a slot, and as what it was used last."""
        self._end = 0

    def settle(self) -> None:
        """Gives up what the receiver has opened by now, so that each end sees when the other has gone."""
        self._close_theirs()

    def send(self, number: int, tensor: Tensor) -> bool:
        """Copies a tensor to where the receiver finds it; returns whether there was room.

        Raises:
            LinkError: The receiver has gone, or has taken nothing within the bound.
        """
        place = self._place(tensor.nbytes)
        if place is not None:
            self._slot(place, tensor).copy_(tensor)
        boundary = Boundary(tensor.shape, tensor.dtype).as_numbers()
        self._ring(_RECORD.pack(number, _ELSEWHERE if place is None else place, *boundary))
        return place is not None

    def _ring(self, record: bytes) -> None:
        """Writes a record whole, once there is room for it."""
        deadline = time.monotonic() + self._timeout.total_seconds()
        while True:
            try:
                os.write(self._bell, record)
            except BrokenPipeError:
                raise LinkError("the receiver has gone") from None
            except BlockingIOError:
                self._wait_for_room(deadline)
            else:
                return

    def _wait_for_room(self, deadline: float) -> None:
        """Waits until records have been read: about a thousand may lie unread."""
        room = select.poll()
        room.register(self._bell, select.POLLOUT)
        if not room.poll(max(0.0, deadline - time.monotonic()) * 1e3):
            raise LinkError(
                f"the receiver has read no message for {self._timeout.total_seconds():g} s, and no more fit"
            )

    def _place(self, nbytes: int) -> int | None:
        """Where a slot is free."""
        size = _rounded(nbytes)
        free = self._free[size]
        if not free:
            self._take_back()
        return free.pop() if free else self._grow(size)

    def _slot(self, place: int, tensor: Tensor) -> Tensor:
        """A slot in the shape and type of a tensor."""
        slot = self._slots.get(place)
        if slot is None or slot.shape != tensor.shape or slot.dtype != tensor.dtype:
            slot = self._room[place : place + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            self._slots[place] = slot
        return slot

    def _take_back(self) -> None:
        """Notes the slots that the receiver has given back."""
        with suppress(BlockingIOError):
            for (place,) in _CREDIT.iter_unpack(os.read(self._credits, 1 << 16)):
                self._free[self._sizes[place]].append(place)

    def _grow(self, size: int) -> int | None:
        """Makes one more slot, if there may be one and there is memory for it."""
        place = self._end
        if not size or len(self._sizes) == MOST_SLOTS or place + size > ROOM:
            return None
        try:
            os.posix_fallocate(self._memory, place, size)
        except OSError:
            return None
        self._sizes[place] = size
        self._end += size
        return place


class Inbox:
    """The receiving end.

    Args:
        offer: The sender's.
        timeout: Bound on every wait.

    Raises:
        OSError: The sender's memory can't be seen from here, or there is no room.
    """

    def __init__(self, offer: Offer, timeout: timedelta) -> None:
        process, memory, bell, credits, name = offer
        if os.readlink(_file(process, memory)) != f"/memfd:{_named(name)} (deleted)":
            raise FileNotFoundError("here another process has that number")
        self._memory, self._bell, self._credits = files = [
            os.open(_file(process, number), mode | os.O_NONBLOCK)
            for number, mode in ((memory, os.O_RDWR), (bell, os.O_RDONLY), (credits, os.O_WRONLY))
        ]
        weakref.finalize(self, _close, *files)
        self._rings = select.poll()
        self._rings.register(self._bell, select.POLLIN)
        self._timeout = timeout
        self._process = os.getpid()
        self._room = memoryview(mmap.mmap(self._memory, ROOM))
        self._arrived: dict[int, tuple[int, Boundary]] = {}

    def receive(self, number: int, boundary: Boundary) -> Tensor | None:
        """Waits for a message; returns it, or nothing where it comes another way.

        Raises:
            BoundaryError: It is of another shape or type.
            LinkError: The sender has gone, or has sent nothing within the bound.
        """
        while number not in self._arrived:
            self._read_record()
        place, sent = self._arrived.pop(number)
        if sent != boundary:
            raise BoundaryError(sent)
        if place == _ELSEWHERE:
            return None
        slot = self._room[place : place + boundary.shape.numel() * boundary.dtype.itemsize]
        weakref.finalize(slot, self._give_back, place).atexit = False  # the tensor has it, until its last view goes
        return torch.frombuffer(slot, dtype=boundary.dtype).view(boundary.shape)

    def _read_record(self) -> None:
        """Takes what has been rung so far, or waits for the next ring."""
        try:
            records = os.read(self._bell, _MOST_RECORDS * _RECORD.size)
        except BlockingIOError:
            if not self._rings.poll(self._timeout.total_seconds() * 1e3):
                raise LinkError(f"nothing has come for {self._timeout.total_seconds():g} s") from None
            return
        if not records:
            raise LinkError("the sender has gone")
        for number, place, *boundary in _RECORD.iter_unpack(records):
            self._arrived[number] = place, Boundary.of_numbers(boundary)

    def _give_back(self, place: int) -> None:
        if os.getpid() != self._process:
            return  # a forked process lets go of its copies of tensors that are still in use here
        with suppress(OSError):  # the sender has gone
            os.write(self._credits, _CREDIT.pack(place))


def _rounded(nbytes: int) -> int:
    """The size of the slot for a message: whole pages, so few sizes that messages which vary share slots."""
    step = max(mmap.PAGESIZE, 1 << max(0, nbytes.bit_length() - 4))
    return -(-nbytes // step) * step


def _named(name: int) -> str:
    return f"chimera-{name:x}"


def _file(process: int, number: int) -> str:
    """Where a process shows an open file."""
    return f"/proc/{process}/fd/{number}"


def _close(*files: int) -> None:
    for file in files:
        os.close(file)
