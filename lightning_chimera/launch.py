"""Starts the processes of a run on one node."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import ParallelStrategy
from lightning.pytorch.strategies.launchers import _MultiProcessingLauncher, _SubprocessScriptLauncher
from typing_extensions import override

Check = Callable[[LightningModule, Trainer], None]
"""Raises for a module that can't be trained, or not by this Trainer."""


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once per rank, after the module has been looked at.

    So a model that can't be cut is refused in the user's own process, once, before any other is started.

    Args:
        check: Looks at the module.
        *args: As the base class.
    """

    def __init__(self, check: Check, *args: Any) -> None:
        super().__init__(*args)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        return super().launch(function, *args, trainer=trainer, **kwargs)


class FunctionLauncher(_MultiProcessingLauncher):
    """Starts the ranks by spawn or fork, after the module has been looked at.

    Args:
        check: Looks at the module.
        strategy: The strategy.
        start_method: As in ``multiprocessing``.
    """

    def __init__(self, check: Check, strategy: ParallelStrategy, start_method: Any) -> None:
        super().__init__(strategy, start_method=start_method)
        self._check = check

    @override
    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        _look_at_module(trainer, self._check)
        return super().launch(function, *args, trainer=trainer, **kwargs)


def _look_at_module(trainer: Trainer | None, check: Check) -> None:
    module = None if trainer is None else trainer.strategy.lightning_module
    if trainer is not None and module is not None:
        check(module, trainer)
