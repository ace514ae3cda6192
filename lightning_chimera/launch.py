"""Starts the processes of a run on one node."""

from collections.abc import Callable
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher


class ScriptLauncher(_SubprocessScriptLauncher):
    """Runs the user's script once per rank, after the module has been looked at.

    So a model that can't be cut is refused in the user's own process, once, before any other is started.

    Args:
        check: Raises for a module that can't be trained.
        *args: As the base class.
    """

    def __init__(self, check: Callable[[LightningModule], None], *args: Any) -> None:
        super().__init__(*args)
        self._check = check

    def launch(self, function: Callable[..., Any], *args: Any, trainer: Trainer | None = None, **kwargs: Any) -> Any:
        """Checks the module, starts the other ranks if nobody else does, and calls the function."""
        module = None if trainer is None else trainer.strategy.lightning_module
        if module is not None:
            self._check(module)
        return super().launch(function, *args, trainer=trainer, **kwargs)
