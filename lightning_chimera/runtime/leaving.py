"""How a process is left whose run can't go on: at once, and with nothing of the run left on this machine."""

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch.distributed as dist
from torch.distributed.distributed_c10d import _abort_process_group

from lightning_chimera.runtime.members import Member
from lightning_chimera.runtime.verdicts import Verdict

BOUND = 3.0
"""Seconds for what should take none: an answer of the store, buffers that are flushed."""


before_leaving: list[Callable[[], None]] = []
"""Called before a process is left."""


def exit_later() -> None:
    """Ends the process if something that should be quick is not."""
    time.sleep(2 * BOUND)
    os._exit(1)


@contextmanager
def leaving_after(seconds: float, text: str) -> Iterator[None]:
    """Leaves the process if what is done in it takes longer: for waits that can't be ended otherwise.

    Args:
        seconds: How long it may take.
        text: What the screen says then.
    """

    def leave() -> None:
        os.write(2, text.encode())
        _call_before_leaving()
        os._exit(1)

    timer = threading.Timer(seconds, leave)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def leave_nothing(verdict: Verdict, members: Mapping[int, Member], own: Member) -> None:
    """Ends what would be left of the run on this machine.

    Args:
        verdict: Why the run can't go on.
        members: The processes of all ranks.
        own: That of this one.
    """
    member = members.get(verdict.rank)
    if member is not None and member.is_near(own) and _is_stuck(verdict, member):
        with suppress(ProcessLookupError):
            os.kill(member.pid, signal.SIGKILL)
    _call_before_leaving()
    for child in multiprocessing.active_children():  # such as workers of a loader, which would notice only later
        child.kill()
    if dist.is_initialized() and dist.get_backend() == "nccl":
        with suppress(Exception):
            _abort_process_group()
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):
            stream.flush()


def _is_stuck(verdict: Verdict, member: Member) -> bool:
    """Whether a process can't leave by itself: it is stopped, or holds the interpreter lock for ever."""
    if verdict.kind == "store":  # another thread answers for the store, also where the lock is held
        return member.is_stopped()
    return verdict.kind == "stalled" and not member.is_gone()


def _call_before_leaving() -> None:
    for call in before_leaving:
        with suppress(Exception):
            call()
