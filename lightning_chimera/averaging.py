"""Callbacks that average a module's weights: every rank averages what it holds."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import StochasticWeightAveraging, WeightAveraging
from torch import nn
from torch.optim.swa_utils import AveragedModel

from lightning_chimera.engine import Engine
from lightning_chimera.partition.shadows import Shadows

_HOOKS = (
    "on_train_batch_end",
    "on_train_epoch_start",
    "on_train_epoch_end",
    "on_train_end",
    "on_validation_epoch_start",
    "on_validation_epoch_end",
)
"""Where Lightning's callbacks go through the parameters of the module and of its average, pair by pair."""


class Average:
    """The copy of a module in which a callback averages weights, cut as the module is.

    In the callback's own hooks both modules show only the parameters that this rank holds. The average's state is that
    of the whole model, on global rank 0.

    Args:
        callback: A callback that is set up.
        engine: The stages of the module.
    """

    def __init__(self, callback: Callback, engine: Engine) -> None:
        self._engine = engine
        self._average: nn.Module = vars(callback)["_average_model"]
        is_wrapped = isinstance(self._average, AveragedModel)
        self._copy = self._average.module if is_wrapped else self._average
        self._ownership = engine.cut_copy(self._copy)
        engine.shadow(callback, **{name: self._on_held(getattr(callback, name)) for name in _HOOKS})
        self._own_state_dict = self._average.state_dict
        engine.shadow(self._average, state_dict=self._state_dict, to=self._to)

    @classmethod
    def of(cls, callbacks: Sequence[Callback], engine: Engine) -> "list[Average]":
        """Those of all callbacks that have one."""
        averaging = [one for one in callbacks if isinstance(one, WeightAveraging | StochasticWeightAveraging)]
        return [cls(one, engine) for one in averaging if vars(one).get("_average_model") is not None]

    def make_whole(self) -> None:
        """Gives every rank the whole average again, on the CPU."""
        self._engine.fill_copy(self._copy, self._ownership)

    def _on_held(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        def restricted(*args: Any, **kwargs: Any) -> Any:
            module = self._engine.module
            held = self._ownership.held()
            with (
                _parameters(module, self._engine.ownership.held()),
                _parameters(self._copy, held),
                _parameters(self._average, held),
            ):
                return hook(*args, **kwargs)

        return restricted

    def _state_dict(self, *_args: Any, **_kwargs: Any) -> dict[str, Any]:
        with Shadows([(self._average, "state_dict", self._own_state_dict)]):
            return self._engine.copy_state(self._average, self._ownership)

    def _to(self, device: torch.device) -> nn.Module:
        """Moves what this rank holds."""
        for tensor in (*self._ownership.held(), *self._copy.buffers()):
            tensor.data = tensor.data.to(device)
        return self._average


def _parameters(module: nn.Module, shown: list[nn.Parameter]) -> Shadows:
    """Shows some of a module's parameters as if there were no others."""
    return Shadows([(module, "parameters", lambda recurse=True: iter(shown))])
