"""What Lightning's own callbacks and loggers need to be told about a pipeline."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lightning.fabric.utilities.device_dtype_mixin import _update_properties
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import Checkpoint, ThroughputMonitor
from lightning.pytorch.loggers import Logger

from lightning_chimera.averaging import Average
from lightning_chimera.engine import Engine
from lightning_chimera.partition.shadows import Shadows


class StockCallbacks:
    """The callbacks of a run, as long as the module is cut.

    Args:
        callbacks: All of them, set up.
        engine: The stages of the module.
        can_save: Whether all ranks have failed with the same error, so that they can save a checkpoint together.
    """

    def __init__(
        self, callbacks: Sequence[Callback], engine: Engine, can_save: Callable[[BaseException], bool]
    ) -> None:
        self._averages = Average.of(callbacks, engine)
        for callback in callbacks:
            if isinstance(callback, Checkpoint) and _saves_on_exception(callback):
                engine.shadow(callback, on_exception=_if_possible(callback.on_exception, can_save))
            if isinstance(callback, ThroughputMonitor):
                _count_groups(callback, engine)

    def make_whole(self) -> None:
        """Gives every rank whole models again."""
        for average in self._averages:
            average.make_whole()


def _saves_on_exception(callback: Checkpoint) -> bool:
    """Whether a checkpoint callback would save after an error; ``ModelCheckpoint`` must be told to."""
    return bool(getattr(callback, "save_on_exception", True))


def _if_possible(on_exception: Callable[..., Any], can_save: Callable[[BaseException], bool]) -> Callable[..., Any]:
    """Saves after an error only where all ranks do."""

    def guarded(trainer: Any, module: Any, exception: BaseException) -> None:
        if can_save(exception):
            on_exception(trainer, module, exception)
            return
        warnings.warn(
            f"No checkpoint is saved after this {type(exception).__name__}: it has not reached every rank, and the"
            " others hold the rest of the model. Save regularly as well: ModelCheckpoint(every_n_train_steps=...).",
            stacklevel=2,
        )

    return guarded


def _count_groups(monitor: ThroughputMonitor, engine: Engine) -> None:
    """Makes a pipeline group what counts as a device: its ranks work on the same batch, not on one each."""
    topology = engine.topology
    for throughput in monitor._throughputs.values():
        throughput.world_size = topology.num_replicas
        if monitor.available_flops:
            throughput.available_flops = monitor.available_flops * topology.num_positions


def log_graphs(loggers: Sequence[Logger], module: LightningModule) -> None:
    """Lets loggers trace the module while it is whole; Lightning's call, which comes when it is cut, does nothing.

    Args:
        loggers: All loggers.
        module: The module, whole, on the CPU whatever it says of its device.
    """
    if not loggers or module.example_input_array is None:
        return
    device = module.device
    _update_properties(module, device=torch.device("cpu"))
    for logger in loggers:
        logger.log_graph(module)
        _skip_once(logger)
    _update_properties(module, device=device)


def _skip_once(logger: Logger) -> None:
    def skip(*_args: Any, **_kwargs: Any) -> None:
        shadow.__exit__()

    shadow = Shadows([(logger, "log_graph", skip)])
    shadow.__enter__()
