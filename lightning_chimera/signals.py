"""Signals as flags: what has come is noted in the handler, and all ranks act on it together at the end of a batch.

A handler runs between any two instructions, so it must neither wait for another rank nor save anything: at that moment
the others may be in another part of the step.
"""

import os
import signal
import threading
from types import FrameType
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_chimera.workers import Workers


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

    A second SIGINT ends the process at once. Processes that are forked in the meantime have the handlers that this one
    had before, but for the workers of loaders, which leave signals to this process.

    Args:
        requeue: What is sent before a job's time is over, as in Slurm's ``--signal=USR1@120``; ``None`` where nobody
            would requeue, so that it keeps its meaning.

    Attributes:
        kinds: The signals that are taken, the one that counts most first.
    """

    def __init__(self, requeue: signal.Signals | None) -> None:
        self.requeue = requeue
        first = [] if requeue is None else [requeue]
        self.kinds = list(dict.fromkeys([*first, signal.SIGTERM, signal.SIGINT]))
        self._previous: dict[signal.Signals, Any] = {}
        self._pid = 0
        self._received: set[signal.Signals] = set()
        self._workers = Workers(self.kinds)
        self._connector: Any = None

    def install(self, trainer: Trainer) -> None:
        """Takes the signals of a run, instead of Lightning: its own handlers save, and wait for other ranks.

        While a run is set up there is nothing to save, and ranks wait until all have come: who is told to end then ends
        at once, as without these handlers. What asks for a requeue would end a process, so it is noted from the start.
        """
        if self._connector is not None or threading.current_thread() is not threading.main_thread():
            return
        self._pid = os.getpid()
        self._received.clear()
        self._connector = trainer._signal_connector
        self._connector.__dict__["register_signal_handlers"] = self._take_rest
        _installed.append(self)
        if self.requeue is not None:
            self._handle(self.requeue)

    def _take_rest(self) -> None:
        """Takes the other signals, where Lightning would: the run has been set up."""
        self._connector.received_sigterm = False
        for kind in self.kinds:
            if kind not in self._previous and kind != self.requeue:
                self._handle(kind)
        self._workers.begin()

    def _handle(self, kind: signal.Signals) -> None:
        previous = signal.getsignal(kind)
        is_users = callable(previous) and previous is not signal.default_int_handler
        if previous == signal.SIG_IGN or (kind == self.requeue and is_users):
            return  # ignored, as in the background of a shell, or the user's own
        self._previous[kind] = previous
        signal.signal(kind, self._note)

    def remove(self, *, deliver: bool) -> None:
        """Puts the handlers back.

        Args:
            deliver: Whether a signal that was noted, but not acted on, is sent again to who took it before.
        """
        if self._connector is None:
            return
        self._put_back()
        self._connector.__dict__.pop("register_signal_handlers", None)
        self._connector = None
        _installed.remove(self)
        left = [kind for kind in self.kinds if kind in self._received and kind != self.requeue]
        self._received.clear()
        if deliver and left:
            os.kill(self._pid, left[0])

    def _put_back(self) -> None:
        self._workers.end()
        for kind, handler in self._previous.items():
            signal.signal(kind, signal.SIG_DFL if handler is None else handler)
        self._previous = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        kind = signal.Signals(number)
        if kind == signal.SIGINT:
            signal.signal(kind, signal.SIG_DFL)  # the second one ends the process, whatever it waits for
        self._received.add(kind)
        previous = self._previous.get(kind)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)

    @property
    def received(self) -> list[int]:
        """For each of ``kinds`` whether it has come to this process."""
        return [int(kind in self._received) for kind in self.kinds]

    def take(self, votes: list[int]) -> signal.Signals | None:
        """The signal to act on.

        Args:
            votes: For each of ``kinds`` how many ranks it has come to.
        """
        kinds = [kind for kind, count in zip(self.kinds, votes, strict=True) if count]
        if not kinds:
            return None
        self._received.clear()
        return kinds[0]


_installed: list[Signals] = []
"""Those of the runs that go on in this process: of a second one within a hook as well."""


def _put_all_back() -> None:
    """In a process that has been forked: signals to it are none of the run's business."""
    while _installed:
        _installed.pop()._put_back()


os.register_at_fork(after_in_child=_put_all_back)
