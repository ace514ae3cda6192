"""Starts the processes of a run on one node."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

from lightning_chimera.threads import Threads

Check = Callable[[LightningModule, Trainer], None]
"""Raises for a module that can't be trained, or not by this Trainer."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once per rank, after the module has been looked at.

    So a model that can't be cut is refused in the user's own process, once, before any other is started.

    Args:
        check: Looks at the module.
        threads: The threads of this process.
        *args: As the base class.
    """

    def __init__(self, check: Check, threads: Threads, *args: Any) -> None:
        super().__init__(*args)
        self._check = check
        self._threads = threads

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        starts = not self.cluster_environment.creates_processes_externally
        with self._threads.around(self.num_processes, starts=starts):
            return super().launch(function, *args, trainer=trainer, **kwargs)


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
        with self._threads.around(self._num_processes, starts=True):
            return super().launch(function, *args, trainer=trainer, **kwargs)


def _look_at_module(trainer: Trainer | None, check: Check) -> None:
    module = None if trainer is None else trainer.strategy.lightning_module
    if trainer is not None and module is not None:
        check(module, trainer)
