"""Signals as flags: what has come is noted in the handler, and all ranks act on it together at the end of a batch.

A handler runs between any two instructions, so it must neither wait for another rank nor save anything: at that moment
the others may be in another part of the step.
"""

import logging
import mmap
import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.utils.data._utils import signal_handling

log = logging.getLogger(__name__)

REQUEUE = signal.SIGUSR1
"""What Slurm sends before a job's time is over, as in ``--signal=USR1@120``."""

KINDS = (REQUEUE, signal.SIGTERM, signal.SIGINT)
"""The signals that are taken, the one that counts most first."""


class Interrupted(SIGTERMException):
    """A signal has ended the run, on every rank after the same batch.

    Args:
        kind: The signal.
        code: The exit code of the process, if nobody catches this.
    """

    def __init__(self, kind: signal.Signals, code: int) -> None:
        super().__init__(code)
        self.kind = kind


class Signals:
    """Takes the signals of this process while a run goes on.

    A second SIGINT ends the process at once. Processes that are forked in the meantime, such as a loader's workers,
    inherit the handlers: they leave signals to this process as long as the run goes on.

    Args:
        requeues: Whether ``REQUEUE`` is taken; where nobody would requeue, it keeps its meaning.
    """

    def __init__(self, *, requeues: bool) -> None:
        self.requeues = requeues
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0
        self._received: set[signal.Signals] = set()
        self._runs = mmap.mmap(-1, 1)  # shared with the processes that are forked
        self._connector: Any = None
        self._set_in_worker: Any = None

    def install(self, trainer: Trainer) -> None:
        """Takes the signals of a run, instead of Lightning: its own handlers save, and wait for other ranks.

        While a run is set up there is nothing to save, and ranks wait until all have come: who is told to end then ends
        at once, as without these handlers. ``REQUEUE`` alone would end a process, so it is noted from the start.
        """
        if self._connector is not None or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._received.clear()
        self._runs[0] = 1
        self._connector = trainer._signal_connector
        self._connector.__dict__["register_signal_handlers"] = self._take_rest
        if self.requeues:
            self._handle(REQUEUE)

    def _take_rest(self) -> None:
        """Takes the other signals, where Lightning would: the run has been set up."""
        self._connector.received_sigterm = False
        for kind in (signal.SIGTERM, signal.SIGINT):
            self._handle(kind)
        # torch gives a worker a handler of its own, which ends it: and that would be an error in this process.
        self._set_in_worker = vars(signal_handling)["_set_worker_signal_handlers"]
        vars(signal_handling)["_set_worker_signal_handlers"] = self._start_worker

    def _handle(self, kind: signal.Signals) -> None:
        previous = signal.getsignal(kind)
        if previous == signal.SIG_IGN or (kind == REQUEUE and callable(previous)):
            return  # ignored, as in the background of a shell, or the user's own
        self._previous[kind] = previous
        signal.signal(kind, self._note)

    def _start_worker(self) -> None:
        self._set_in_worker()
        if signal.SIGTERM in self._previous:
            signal.signal(signal.SIGTERM, self._note)

    def remove(self, *, deliver: bool) -> None:
        """Puts the handlers back.

        Args:
            deliver: Whether a signal that was noted, but not acted on, is sent again to who took it before.
        """
        if self._connector is None:
            return
        self._runs[0] = 0
        for kind, handler in self._previous.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        self._previous = {}
        if self._set_in_worker is not None:
            vars(signal_handling)["_set_worker_signal_handlers"] = self._set_in_worker
            self._set_in_worker = None
        self._connector.__dict__.pop("register_signal_handlers", None)
        self._connector = None
        left = [kind for kind in KINDS[1:] if kind in self._received]
        self._received.clear()
        if deliver and left:
            os.kill(self._pid, left[0])

    def _note(self, number: int, frame: FrameType | None) -> None:
        kind = signal.Signals(number)
        if os.getpid() != self._pid:
            self._note_elsewhere(kind)
            return
        if kind == signal.SIGINT:
            signal.signal(kind, signal.SIG_DFL)  # the second one ends the process, whatever it waits for
        self._received.add(kind)
        previous = self._previous.get(kind)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    def _note_elsewhere(self, kind: signal.Signals) -> None:
        """In a forked process: a signal to the whole group is the rank's business until the run is over."""
        if not self._runs[0]:
            signal.signal(kind, signal.SIG_DFL)
            os.kill(os.getpid(), kind)

    @property
    def received(self) -> list[int]:
        """For each of ``KINDS`` whether it has come to this process."""
        return [int(kind in self._received) for kind in KINDS]

    def take(self, votes: list[int]) -> signal.Signals | None:
        """The signal to act on.

        Args:
            votes: For each of ``KINDS`` how many ranks it has come to.
        """
        kinds = [kind for kind, count in zip(KINDS, votes, strict=True) if count]
        if not kinds:
            return None
        self._received.clear()
        return kinds[0]

    def __getstate__(self) -> dict[str, Any]:
        """Handlers, and the memory that tells forked processes, belong to one process."""
        return {"requeues": self.requeues}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]
