"""Starts the processes of a run on one node."""

import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from lightning.pytorch.trainer.call import _interrupt
from typing_extensions import override

from lightning_chimera.children import Children, environment, look_after_parent, restore
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

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        self.cluster_environment.validate_settings(num_devices=self.num_processes, num_nodes=self.num_nodes)
        starts = not self.cluster_environment.creates_processes_externally
        with self._threads.around(self.num_processes, starts=starts):
            if starts:
                self._call_children_scripts()
            else:
                look_after_parent()
            return function(*args, **kwargs)

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
        _reserve_port(self.cluster_environment)
        os.environ["MASTER_ADDR"] = self.cluster_environment.main_address
        os.environ["MASTER_PORT"] = str(self.cluster_environment.main_port)
        os.environ["NODE_RANK"] = str(self.cluster_environment.node_rank())
        os.environ["LOCAL_RANK"] = str(self.cluster_environment.local_rank())
        os.environ["WORLD_SIZE"] = str(self.num_processes * self.num_nodes)
        children = Children(self._patience)
        children.start(
            [
                (command, {**os.environ, "LOCAL_RANK": str(local_rank)}, folder)
                for local_rank in range(1, self.num_processes)
                for command, folder in [_command(local_rank)]
            ]
        )
        self.procs = children.processes
        _job = _Job(_name_of_job(), children, before)


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
    """Ends the processes of an earlier job of a sweep, so that the next one starts its own."""
    global _job
    if _job is None or _job.name == _name_of_job():
        return
    job, _job = _job, None
    stop_watching()
    if dist.is_initialized():
        dist.destroy_process_group()
    job.children.close()
    restore(job.before)


def _name_of_job() -> str | None:
    """The job of a Hydra sweep that runs in this process now."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    if hydra_config is None or not hydra_config.HydraConfig.initialized():
        return None
    config = hydra_config.HydraConfig.get()
    return str(config.runtime.output_dir) if config.mode is not None and config.mode.name == "MULTIRUN" else None


def _command(local_rank: int) -> tuple[list[str], str | None]:
    """What runs this script once more for another rank, and where."""
    hydra_config = sys.modules.get("hydra.core.hydra_config")
    is_hydra = hydra_config is not None and hydra_config.HydraConfig.initialized()
    module = getattr(sys.modules["__main__"], "__spec__", None)
    if module is not None:
        program = ["-m", module.name.removesuffix(".__main__")]
    elif is_hydra:
        from hydra.utils import to_absolute_path

        program = [to_absolute_path(sys.argv[0])]
    else:
        program = [os.path.abspath(sys.argv[0])]
    if hydra_config is None or not is_hydra:
        return [sys.executable, *program, *sys.argv[1:]], None
    from hydra.utils import get_original_cwd

    config = hydra_config.HydraConfig.get()
    return [
        sys.executable,
        *program,
        *_arguments(sys.argv[1:], config),
        f'hydra.run.dir="{config.runtime.output_dir}"',
        f"hydra.job.name=train_ddp_process_{local_rank}",
        "hydra.output_subdir=null",
    ], get_original_cwd()


def _arguments(given: Sequence[str], config: Any) -> list[str]:
    """The arguments of a Hydra script for one job: in a sweep those of its own, instead of all."""
    if _name_of_job() is None:
        return list(given)
    from hydra._internal.utils import get_args_parser

    swept = set(get_args_parser().parse_args(list(given)).overrides)
    kept = [argument for argument in given if argument not in swept and argument not in ("-m", "--multirun")]
    own = [override for override in config.overrides.hydra if not override.startswith(("hydra.mode=", "hydra.sweep"))]
    return [*kept, *own, *config.overrides.task]


class FunctionLauncher(_MultiProcessingLauncher):
    """Starts the ranks by spawn or fork, after the module has been looked at.

    Args:
        check: Looks at the module.
        threads: The threads of this process.
        num_processes: The processes on this node.
        strategy: The strategy.
        start_method: As in ``multiprocessing``.
    """

    def __init__(
        self, check: Check, threads: Threads, num_processes: int, strategy: ParallelStrategy, start_method: Any
    ) -> None:
        super().__init__(strategy, start_method=start_method)
        self._check = check
        self._threads = threads
        self._num_processes = num_processes

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        with environment(_VARIABLES), self._threads.around(self._num_processes, starts=True):
            _reserve_port(self._strategy.cluster_environment)
            try:
                return super().launch(function, *args, trainer=trainer, **kwargs)
            except KeyboardInterrupt:
                # To all, or to this process alone. Not SIGINT: a second one would end who has got it at once.
                self.kill(signal.SIGTERM)
                self._end()
                raise
            except BaseException:
                self._end()
                raise

    @override
    def _wrapping_function(self, process_idx: int, trainer: Trainer | None, *args: Any, **kwargs: Any) -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        look_after_parent(parent.pid)
        try:
            super()._wrapping_function(process_idx, trainer, *args, **kwargs)
        except BaseException as error:
            if trainer is not None:
                # Lightning does so in the parent only, and the other ranks would not be told.
                _interrupt(trainer, error)
            raise

    def _end(self) -> None:
        """Ends what still runs, which this process would wait for without a bound at its end."""
        deadline = time.monotonic() + GRACE + BOUND
        for process in self.procs:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()


def _look_at_module(trainer: Trainer | None, check: Check) -> None:
    module = None if trainer is None else trainer.strategy.lightning_module
    if trainer is not None and module is not None:
        check(module, trainer)


_reserved: list[socket.socket] = []


def _reserve_port(environment: Any) -> None:
    """Chooses the port of a run, where nobody else does, and keeps it from others until this process ends.

    A port that was only looked for could be given to another run before this one listens on it. A socket that is bound
    and does not listen keeps it; it allows its address to be used again, so that this run can.
    """
    if type(environment) is not LightningEnvironment or "MASTER_PORT" in os.environ or environment._main_port != -1:
        return
    if "STANDALONE_PORT" in os.environ:
        return
    keeper = socket.socket()
    keeper.bind(("", 0))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.append(keeper)
    os.environ["MASTER_PORT"] = str(keeper.getsockname()[1])
