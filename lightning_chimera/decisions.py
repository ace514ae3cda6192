"""Decisions about the run that hooks take: where one rank takes one, all ranks follow.

Code that runs on one rank only is common (``if trainer.is_global_zero``). A rank that left the loop by itself would
let the others wait for it.
"""

from collections.abc import Callable, Sequence
from typing import Any

from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, EarlyStopping
from lightning.pytorch.utilities.model_helpers import is_overridden

_STOPS = ("on_fit_start", "on_train_epoch_start", "on_train_batch_end", "on_train_epoch_end")
"""Hooks behind which Lightning looks at ``should_stop``, besides those that a strategy has itself."""

_MONITORS = (Checkpoint, EarlyStopping)
"""Callbacks whose ``on_train_epoch_end`` Lightning calls after the module's."""


class Decisions:
    """Makes the decisions of a module's and the callbacks' hooks those of every rank.

    At each place Lightning calls the module's hook after those of the callbacks, so it is there that ranks agree: on
    ``should_stop``, on the -1 of ``on_train_batch_start`` if any rank returned it, and on the value that a scheduler
    follows, which is global rank 0's.

    Where no hook of the module comes after those of the callbacks, the last callback's is the place.

    Args:
        module: The user's module.
        callbacks: The Trainer's callbacks.
        agree_on_stop: Makes ``trainer.should_stop`` that of every rank.
        end_batch: The same at the end of a training batch.
        any_rank: Whether something holds on any rank.
        of_rank_zero: The value of global rank 0.
    """

    def __init__(
        self,
        module: LightningModule,
        callbacks: Sequence[Callback],
        agree_on_stop: Callable[[], None],
        end_batch: Callable[[], None],
        any_rank: Callable[[bool], bool],
        of_rank_zero: Callable[[Any], Any],
    ) -> None:
        self._own: list[tuple[Any, str, Any]] = []
        for name in _STOPS:
            agree = end_batch if name == "on_train_batch_end" else agree_on_stop
            self._replace(module, name, _then(getattr(module, name), agree))
        monitors = [callback for callback in callbacks if isinstance(callback, _MONITORS)]
        for last, name in ((callbacks[-1:], "on_sanity_check_end"), (monitors[-1:], "on_train_epoch_end")):
            for callback in last:
                self._replace(callback, name, _then(getattr(callback, name), agree_on_stop))
        if is_overridden("on_train_batch_start", module):
            self._replace(module, "on_train_batch_start", _skip_on_every_rank(module.on_train_batch_start, any_rank))
        self._replace(module, "lr_scheduler_step", _with_value(module.lr_scheduler_step, of_rank_zero))

    def remove(self) -> None:
        """Puts the own hooks of the module and the callbacks back."""
        for owner, name, own in self._own:
            del owner.__dict__[name]
            if own is not None:  # the user had put it on the instance as well
                owner.__dict__[name] = own
        self._own = []

    def _replace(self, owner: Any, name: str, hook: Callable[..., Any]) -> None:
        self._own.append((owner, name, owner.__dict__.get(name)))
        owner.__dict__[name] = hook


def _then(hook: Callable[..., Any], agree: Callable[[], None]) -> Callable[..., Any]:
    def agreed(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        agree()
        return result

    return agreed


def _skip_on_every_rank(hook: Callable[..., Any], any_rank: Callable[[bool], bool]) -> Callable[..., Any]:
    def shared(*args: Any, **kwargs: Any) -> Any:
        result = hook(*args, **kwargs)
        return -1 if any_rank(result == -1) else result

    return shared


def _with_value(step: Callable[..., Any], of_rank_zero: Callable[[Any], Any]) -> Callable[..., Any]:
    def shared(scheduler: Any, metric: Any) -> Any:
        return step(scheduler, None if metric is None else of_rank_zero(metric))

    return shared
