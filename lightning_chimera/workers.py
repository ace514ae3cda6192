"""The workers of loaders: they leave signals to the rank that has started them, and end when this one ends them.

Slurm sends its signals to every process of a job, and a terminal does so too. A worker that one ends is an error in its
rank, before anything is saved. So workers are started with the signals blocked, and ignore them as long as they run.
"""

import atexit
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.context import SpawnProcess
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any

from torch.utils.data._utils import signal_handling

_LOOP = "_worker_loop"
"""The name of what a worker runs, in torch and in loaders that were made after its own."""


class Workers:
    """Has workers of loaders ignore some signals.

    Args:
        kinds: The signals.
    """

    def __init__(self, kinds: Sequence[signal.Signals]) -> None:
        self._kinds = kinds
        self._before: Callable[[BaseProcess], None] | None = None

    def begin(self) -> None:
        """Looks after the workers that are started from now on."""
        atexit.unregister(_leave_quietly)
        atexit.register(_leave_quietly)
        kinds, self._before = self._kinds, BaseProcess.start
        before = self._before

        def start(process: BaseProcess) -> None:
            if getattr(vars(process).get("_target"), "__name__", "") == _LOOP:
                _start(process, kinds, before)
            else:
                before(process)

        BaseProcess.start = start  # type: ignore[assignment, method-assign]

    def end(self) -> None:
        """Leaves workers alone again."""
        if self._before is not None:
            BaseProcess.start = self._before  # type: ignore[assignment, method-assign]
            self._before = None


class _Loop:
    """What a worker runs, with signals ignored as soon as torch has set handlers of its own.

    Args:
        loop: The loop itself.
        kinds: The signals.
    """

    def __init__(self, loop: Callable[..., None], kinds: Sequence[signal.Signals]) -> None:
        self._loop, self._kinds = loop, kinds

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        set_handlers = vars(signal_handling)["_set_worker_signal_handlers"]

        def set_and_ignore() -> None:
            set_handlers()
            _ignore(self._kinds)

        vars(signal_handling)["_set_worker_signal_handlers"] = set_and_ignore
        self._loop(*args, **kwargs)


def _start(process: BaseProcess, kinds: Sequence[signal.Signals], start: Callable[[BaseProcess], None]) -> None:
    """Starts a worker."""
    state: dict[str, Any] = vars(process)
    method = getattr(process, "_start_method", None) or multiprocessing.get_start_method()
    if method == "forkserver":
        # The server would die of the signals, and its workers with it; blocked, it would hand that on to all processes.
        state["_Popen"] = SpawnProcess._Popen
    state["_target"] = _Loop(state["_target"], kinds)
    with _blocked(kinds):
        if method != "fork":
            resource_tracker.ensure_running()  # which unblocks some of them
            signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
        start(process)
    # It ignores SIGTERM, and torch and multiprocessing wait for the end of what they have sent it to.
    popen = state["_popen"]
    popen.terminate = popen.kill


@contextmanager
def _blocked(kinds: Sequence[signal.Signals]) -> Iterator[None]:
    before = signal.pthread_sigmask(signal.SIG_BLOCK, kinds)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _ignore(kinds: Sequence[signal.Signals]) -> None:
    """Ignores signals in this process, and in none that it starts."""
    before = {kind: signal.signal(kind, _pass_over) for kind in kinds}  # not SIG_IGN, which programs inherit
    for kind in kinds:
        signal.siginterrupt(kind, False)  # a library that reads in C need not know that a read can be interrupted

    def put_back() -> None:
        for kind, handler in before.items():
            signal.signal(kind, handler or signal.SIG_DFL)

    os.register_at_fork(after_in_child=put_back)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, kinds)


def _pass_over(number: int, frame: FrameType | None) -> None:
    """A handler that does nothing."""


def _leave_quietly() -> None:
    """At the end of the process, before multiprocessing ends the workers: to torch one that is killed is an error."""
    if getattr(signal.getsignal(signal.SIGCHLD), "__module__", "") == signal_handling.__name__:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
