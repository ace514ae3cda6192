"""Starts the processes of a run on one node."""

import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Callable
from pickle import PicklingError
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.strategies.launchers.multiprocessing import _disable_module_memory_sharing
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from lightning_utilities.core.rank_zero import rank_zero_info, rank_zero_warn
from typing_extensions import override

from lightning_chimera.children import Children, environment, look_after_parent, restore
from lightning_chimera.commands import check_program, command, name_of_job
from lightning_chimera.rendezvous import check_rendezvous, reserve_port
from lightning_chimera.runtime.leaving import BOUND
from lightning_chimera.runtime.watch import GRACE, stop_watching
from lightning_chimera.threads import Threads

Check = Callable[[LightningModule, Trainer], None]
"""Raises for a module that can't be trained, or not by this Trainer."""

_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "LOCAL_RANK", "WORLD_SIZE")


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once per rank, after the module has been looked at.

    So a model that can't be cut is refused in the user's own process, once, before any other is started.

    Args:
        check: Looks at the module.
        threads: The threads of this process.
        patience: Seconds to wait at the end of this process for the others.
        *args: As the base class.
    """

    def __init__(self, check: Check, threads: Threads, patience: float, *args: Any) -> None:
        super().__init__(*args)
        self._check = check
        self._threads = threads
        self._patience = patience

    @property
    @override
    def is_interactive_compatible(self) -> bool:
        return True  # check_session and check_program say where it is not

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        check_rendezvous(self.cluster_environment, self.num_nodes)
        starts = not self.cluster_environment.creates_processes_externally
        if starts and self.num_processes > 1:
            check_program()
        with self._threads.around(self.num_processes, starts=starts):
            if starts:
                self._call_children_scripts()
            else:
                look_after_parent()
            try:
                return function(*args, **kwargs)
            except BaseException:
                if starts and _job is not None and not dist.is_initialized():  # nobody else tells them
                    _job.children.abandon()
                raise

    @override
    def kill(self, signum: int) -> None:
        if _job is None:
            return
        if signum == signal.SIGKILL:  # Lightning's way to leave; who is asked to end has a moment for it
            _job.children.end()
        else:
            _job.children.send(signum)

    @override
    def _call_children_scripts(self) -> None:
        global _job
        self._check_can_spawn_children()
        before = {name: os.environ.get(name) for name in _VARIABLES}
        reserve_port(self.cluster_environment)
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        children = Children(self._patience)
        children.start(
            [
                (arguments, {**os.environ, "LOCAL_RANK": str(local_rank)}, folder)
                for local_rank in range(1, self.num_processes)
                for arguments, folder in [command(local_rank)]
            ]
        )
        self.procs = children.processes
        _job = _Job(name_of_job(), children, before)


class _Job(NamedTuple):
    """A run whose processes were started by this one.

    Attributes:
        name: Tells the jobs of a sweep apart; ``None`` outside of sweeps.
        children: The processes.
        before: What the environment was.
    """

    name: str | None
    children: Children
    before: dict[str, str | None]


_job: _Job | None = None


def leave_earlier_job() -> None:
    """Ends the processes of an earlier job of a sweep that has not left itself, so that the next one starts its own."""
    if _job is not None and _job.name != name_of_job():
        code = _leave(_job)
        if code:
            rank_zero_warn(f"A process of an earlier job of this sweep has ended with exit code {code}.")


def leave_job() -> None:
    """Ends the processes of this job of a Hydra sweep, and leaves this one as the job has found it.

    To be called in the end of a job, in a ``finally``, so that the next one may train by another strategy. Outside of
    sweeps it does nothing.

    Raises:
        RuntimeError: One of the processes has failed, and no error is on its way that says so.
    """
    if _job is None or name_of_job() is None:
        return
    code = _leave(_job)
    if code and sys.exception() is None:
        raise RuntimeError(f"A process of this job has ended with exit code {code}; see what it has printed.")


def _leave(job: _Job) -> int:
    """Ends a job; returns the exit code of one of its processes that has failed, or 0."""
    global _job
    _job = None
    stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()
    code = job.children.close()
    restore(job.before)
    return code


class FunctionLauncher(_MultiProcessingLauncher):
    """Starts the ranks by spawn or fork, after the module has been looked at.

    Args:
        check: Looks at the module.
        threads: The threads of this process.
        num_processes: The processes on this node.
        num_nodes: The number of nodes.
        patience: Seconds to wait for the ranks if this process is interrupted: they end a step, and may save it.
        strategy: The strategy.
        start_method: As in ``multiprocessing``.
    """

    def __init__(
        self,
        check: Check,
        threads: Threads,
        num_processes: int,
        num_nodes: int,
        patience: float,
        strategy: ParallelStrategy,
        start_method: Any,
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._check = check
        self._threads = threads
        self._num_processes = num_processes
        self._num_nodes = num_nodes
        self._patience = patience

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        assert self._strategy.cluster_environment is not None
        check_rendezvous(self._strategy.cluster_environment, self._num_nodes)
        self.procs: list[Any] = []
        others = multiprocessing.active_children()
        with environment(_VARIABLES), self._threads.around(self._num_processes, starts=True):
            reserve_port(self._strategy.cluster_environment)
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except (AttributeError, TypeError, PicklingError) as error:
                if not self.procs:
                    raise self._refusal(error) from error
                self._end()
                raise
            except KeyboardInterrupt:
                if not self.procs:  # it has come while they were started
                    self.procs = [child for child in multiprocessing.active_children() if child not in others]
                # To all, or to this process alone. Not SIGINT: a second one would end who has got it at once.
                self.kill(signal.SIGTERM)
                rank_zero_info("The ranks end after this step. A second interrupt ends them at once.")
                self._end(self._patience)
                raise
            except BaseException:
                self._end()
                raise

    @override
    def _wrapping_function(
        self, process_idx: int, trainer: Trainer | None, function: Any, args: Any, *rest: Any, **kwargs: Any
    ) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        look_after_parent(parent, is_near=self._start_method != "forkserver")
        if self._start_method == "forkserver":  # as Lightning does for spawn: else all ranks would train one memory
            args = _disable_module_memory_sharing(args)
        try:
            super()._wrapping_function(process_idx, trainer, function, args, *rest, **kwargs)
        except BaseException as error:
            if trainer is not None:
                # Lightning does so in the parent only, and the other ranks would not be told.
                _interrupt(trainer, error)
            if isinstance(error, KeyboardInterrupt) or (isinstance(error, SystemExit) and not error.code):
                raise SystemExit(1) from error  # with 0 the parent would wait for a result
            raise

    def _refusal(self, error: Exception) -> Exception:
        """What is said where no process was started since something can't be pickled."""
        return MisconfigurationException(
            f"start_method={self._start_method!r} sends the Trainer, the module and the data to new processes, and some"
            f" of it can't be sent: {error}. Functions and classes must be at the top of a module, not inside of a"
            " function or a lambda, and what belongs to this process, such as an open file, left out; or use"
            " start_method='popen', or 'fork' on the CPU."
        )

    def _end(self, patience: float = GRACE + BOUND) -> None:
        """Ends what still runs, which this process would wait for without a bound at its end.

        Args:
            patience: Seconds to wait before, if none fails.
        """
        deadline = time.monotonic() + patience
        try:
            while time.monotonic() < deadline and any(process.is_alive() for process in self.procs):
                if any(process.exitcode for process in self.procs):
                    deadline = min(deadline, time.monotonic() + GRACE + BOUND)
                time.sleep(0.05)
        finally:
            for process in self.procs:
                process.kill()


def _look_at_module(trainer: Trainer | None, check: Check) -> None:
    module = None if trainer is None else trainer.strategy.lightning_module
    if trainer is not None and module is not None:
        check(module, trainer)
