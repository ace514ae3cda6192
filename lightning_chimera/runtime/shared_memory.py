"""The two ends of a link between processes of one host, through memory that both have mapped.

The sender copies a tensor into a slot of the memory and rings: it writes a record of where it lies to a pipe, at which
the receiver sleeps. The receiver uses the slot itself as the tensor, without a copy; when autograd and all others have
let go of it, the slot goes back through a second pipe. A sender without a free slot makes one more. Where it can't, the
record says that the message comes another way. So nobody waits for a slot.

Memory and pipes have no names: they go with the last process that has them, however that ends. The receiver opens them
among the open files of the sender, which proves that both see the same memory. That is allocated before it is written
to, so it is an error that can be handled if there is none left.
"""

import mmap
import os
import secrets
import select
import struct
import weakref
from collections import defaultdict
from contextlib import suppress
from datetime import timedelta

import torch
from torch import Tensor

MOST_SLOTS = 256
"""Of a link; while the receiver has that many, messages go another way."""

ROOM = 1 << 34
"""Bytes of address space for the slots of a link; only what is in use is backed by memory."""

Offer = list[int]
"""How the receiver finds the memory and its ends of the pipes: a process, three of its files, the memory's name."""

OFFER_LENGTH = 5

_RECORD = struct.Struct("<qqq")  # number of the message, where it lies, its bytes
_ELSEWHERE = -1
_CREDIT = struct.Struct("<q")  # where the slot lies


class LinkError(RuntimeError):
    """A message did not come, or is not what was expected."""


class Outbox:
    """The sending end.

    Attributes:
        offer: Lets the receiver find its end.

    Raises:
        OSError: There is no room.
        AttributeError: The system has no memory without a name.
    """

    def __init__(self) -> None:
        name = secrets.randbits(62)
        self._memory = os.memfd_create(_named(name))
        bell, self._bell = os.pipe()
        self._credits, credits = os.pipe()
        self.offer: Offer = [os.getpid(), self._memory, bell, credits, name]
        self._close_theirs = weakref.finalize(self, _close, bell, credits)
        weakref.finalize(self, _close, self._memory, self._bell, self._credits)
        os.set_blocking(self._credits, False)
        os.ftruncate(self._memory, ROOM)
        self._room = torch.frombuffer(mmap.mmap(self._memory, ROOM), dtype=torch.uint8)
        self._sizes: dict[int, int] = {}
        self._free: defaultdict[int, list[int]] = defaultdict(list)
        self._end = 0

    def settle(self) -> None:
        """Gives up what the receiver has opened by now, so that each end sees when the other has gone."""
        self._close_theirs()

    def send(self, number: int, tensor: Tensor) -> bool:
        """Copies a tensor to where the receiver finds it; returns whether there was room.

        Raises:
            LinkError: The receiver has gone.
        """
        place = self._place(tensor.nbytes)
        if place is not None:
            slot = self._room[place : place + tensor.nbytes]
            slot.view(tensor.dtype).view(tensor.shape).copy_(tensor)
        try:
            os.write(self._bell, _RECORD.pack(number, _ELSEWHERE if place is None else place, tensor.nbytes))
        except BrokenPipeError:
            raise LinkError("the receiver has gone") from None
        return place is not None

    def _place(self, nbytes: int) -> int | None:
        """Where a slot is free."""
        with suppress(BlockingIOError):
            for (place,) in _CREDIT.iter_unpack(os.read(self._credits, 1 << 16)):
                self._free[self._sizes[place]].append(place)
        size = _rounded(nbytes)
        return self._free[size].pop() if self._free[size] else self._grow(size)

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
        self._arrived: dict[int, tuple[int, int]] = {}

    def receive(self, number: int, shape: torch.Size, dtype: torch.dtype) -> Tensor | None:
        """Waits for a message; returns it, or nothing where it comes another way.

        Raises:
            LinkError: The sender has gone, has sent nothing within the bound, or something of another size.
        """
        while number not in self._arrived:
            arrived, *where = self._record()
            self._arrived[arrived] = where[0], where[1]
        place, nbytes = self._arrived.pop(number)
        if nbytes != shape.numel() * dtype.itemsize:
            raise LinkError(f"{nbytes} bytes have come")
        if place == _ELSEWHERE:
            return None
        slot = self._room[place : place + nbytes]
        weakref.finalize(slot, self._give_back, place).atexit = False  # the tensor has it, until its last view goes
        return torch.frombuffer(slot, dtype=dtype).view(shape)

    def _record(self) -> tuple[int, ...]:
        """Waits for the next ring."""
        if not self._rings.poll(self._timeout.total_seconds() * 1e3):
            raise LinkError(f"nothing has come for {self._timeout.total_seconds():g} s")
        record = os.read(self._bell, _RECORD.size)
        if not record:
            raise LinkError("the sender has gone")
        return _RECORD.unpack(record)

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
