"""The processes that a rank has started for the other ranks of its node."""

import atexit
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing.process import BaseProcess
from typing import Any

import torch.distributed as dist

from lightning_chimera.runtime.leaving import BOUND, before_leaving
from lightning_chimera.runtime.watch import GRACE

PARENT = "LIGHTNING_CHIMERA_PARENT"
"""Tells a child the process that has started it."""
_PR_SET_PDEATHSIG = 1
_LIBC: Any = ctypes.CDLL(None) if sys.platform == "linux" else None  # elsewhere no rank is started


class Children:
    """Starts the other ranks' processes and ends with them.

    If one fails, the watch of the run says so, and this process ends; what is done here is for the times in which
    there is no watch, before the process group is made and after it is left.

    Args:
        patience: Seconds to wait at this process's end for children that have not failed.
    """

    def __init__(self, patience: float) -> None:
        self.processes: list[subprocess.Popen[bytes]] = []
        self._patience = patience
        self._is_over = threading.Event()

    def start(self, commands: Sequence[tuple[Sequence[str], Mapping[str, str], str | None]]) -> None:
        """Starts each of some commands with its environment and folder."""
        for command, env, folder in commands:
            own = {**env, PARENT: str(os.getpid())}
            self.processes.append(subprocess.Popen(command, env=own, cwd=folder, preexec_fn=_die_with(os.getpid())))
        before_leaving.append(self.end)
        atexit.register(self.join)
        threading.Thread(target=self._look_after, name="chimera-children", daemon=True).start()

    def send(self, number: int) -> None:
        """Passes a signal on."""
        for process in self.processes:
            process.send_signal(number)

    def end(self) -> None:
        """Ends them, if they don't by themselves."""
        self._wait(BOUND)
        for process in self.processes:
            process.kill()
            process.wait()

    def abandon(self) -> None:
        """Ends them, as this process has failed before there was a watch that would have told them."""
        self._is_over.set()
        self.end()

    def join(self) -> None:
        """Waits for their end; if one fails, this process leaves with its exit code, as it might not by itself."""
        code = self._finish()
        if code:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(max(code, 1))

    def close(self) -> int:
        """Waits for their end, and forgets them; returns the exit code of one that has failed, or 0."""
        atexit.unregister(self.join)
        return self._finish()

    def _finish(self) -> int:
        self._is_over.set()
        before_leaving.remove(self.end)
        deadline = time.monotonic() + self._patience
        while self._running() and not self._failed() and time.monotonic() < deadline:
            time.sleep(0.02)
        self._wait(GRACE + BOUND)
        codes = [code for _, code in self._failed()] or [1] * self._running()
        self.end()
        return codes[0] if codes else 0

    def _wait(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while self._running() and time.monotonic() < deadline:
            time.sleep(0.02)

    def _running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def _failed(self) -> list[tuple[int, int]]:
        """Number and exit code of those that have failed."""
        codes = [(number, process.poll()) for number, process in enumerate(self.processes, 1)]
        return [(number, code) for number, code in codes if code]

    def _look_after(self) -> None:
        """Ends this process if a child has failed and nobody else does."""
        while not self._is_over.wait(0.1):
            if not self._failed():
                continue
            self._is_over.wait(GRACE + BOUND if dist.is_initialized() else 1.0)
            if self._is_over.is_set():
                return
            number, code = self._failed()[0]
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"has ended with exit code {code}"
            process = self.processes[number - 1]
            os.write(2, f"chimera: the process {process.pid} of local rank {number} {how}.\n".encode())
            self.send(signal.SIGTERM)
            self.end()
            os._exit(1)


def _die_with(parent: int) -> Callable[[], None]:
    """What a child does before anything else, so that it ends if its parent is killed."""

    def prepare() -> None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)

    return prepare


def look_after_parent(parent: BaseProcess | None = None, *, is_near: bool = True) -> None:
    """Ends this process some time after the one that has started it, where one has.

    It is told to end, so that in a run all ranks do so after the same step, and has to after some time. Where the
    kernel would have ended it at once, there is now time to say what has happened.

    Args:
        parent: The process that has forked or spawned this one; else it follows from the environment.
        is_near: Whether this process is a child of it; a fork server stands between. Then it is asked by the pipe
            between the two, of which forked processes would keep each other's end open.
    """
    global _looking
    pid = _launcher() if parent is None else parent.pid
    if pid is None or _looking == os.getpid():
        return
    _looking = os.getpid()
    is_alive = (lambda: os.getppid() == pid) if parent is None or is_near else parent.is_alive
    threading.Thread(target=_end_after, args=(pid, is_alive), name="chimera-parent", daemon=True).start()
    if _LIBC is not None:
        _LIBC.prctl(_PR_SET_PDEATHSIG, 0)


_looking = 0
"""The process in which a thread looks after the parent; forked ones inherit the number."""


def _launcher() -> int | None:
    """The process that has started this one as a rank: another rank, or torchrun's agent.

    Slurm ends the tasks of a step itself, and the parent of a script that a person has started is a shell.
    """
    parent = os.getppid()
    return parent if os.environ.get(PARENT) == str(parent) or "TORCHELASTIC_RUN_ID" in os.environ else None


def _end_after(parent: int, is_alive: Callable[[], bool]) -> None:
    while is_alive():
        time.sleep(0.5)
    if PARENT not in os.environ and os.environ.get("LOCAL_RANK") == "0":  # if it was a rank, the watch names it
        os.write(2, f"chimera: the process {parent} that has started the ranks has ended, and so do they.\n".encode())
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE + BOUND)
    os._exit(1)


@contextmanager
def environment(names: Sequence[str]) -> Iterator[None]:
    """Puts variables of the environment back in the end."""
    before = {name: os.environ.get(name) for name in names}
    try:
        yield
    finally:
        restore(before)


def restore(before: Mapping[str, str | None]) -> None:
    """Gives variables of the environment the values that they had."""
    for name, value in before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
