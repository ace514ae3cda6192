"""Trains what the composed config describes: `lightning-chimera-train`, or `python -m lightning_chimera.train`.

Lightning starts the other ranks by running the same command line again, so there is no subcommand before Hydra's
arguments. torch is imported after Hydra has read them: `--help` and a misspelt option answer at once.
"""

import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import CompactHydraException, InstantiationException
from omegaconf import DictConfig

from hydra_plugins.lightning_chimera import LightningChimeraSearchPathPlugin

if TYPE_CHECKING:
    import lightning as L

_LOGGER_EXTRAS = ("tensorboard", "wandb")
"""Options of the group `logger` whose package comes with an extra of the same name."""


def run(config: DictConfig) -> float | None:
    """Builds the trainer, the data and the module, and fits.

    Args:
        config: The composed config, with the keys of `conf/train.yaml`.

    Returns:
        The last validation loss, which a sweep may minimise; None if there was no validation.

    Raises:
        CompactHydraException: If something is wrong before the first batch, with the message alone, since that is
            most likely a mistake in the config. `HYDRA_FULL_ERROR=1` shows where it came from.
    """
    from lightning_chimera.launch import leave_job

    try:
        return _fit(config)
    finally:
        leave_job()


def _fit(config: DictConfig) -> float | None:
    """As `run`; the processes of a sweep's job are still there afterwards."""
    import lightning as L
    from hydra.utils import instantiate
    from lightning.fabric.utilities.exceptions import MisconfigurationException

    from lightning_chimera.callbacks import ValidationLosses

    _leave_logging_to_hydra()
    L.seed_everything(config.seed, workers=True)
    # Plain containers, not OmegaConf's: they end up in checkpoints, which load with weights_only=True.
    datamodule = instantiate(config.data, _convert_="all")
    module = instantiate(config.model, _convert_="all")
    callbacks = [seen := ValidationLosses()]  # the first, as it notes that the run has begun
    callbacks += [instantiate(callback, _convert_="all") for callback in config.callbacks.values()]
    loggers = [_build_logger(name, logger) for name, logger in config.logger.items()]
    trainer = instantiate(config.trainer, logger=loggers, callbacks=callbacks, _convert_="all")
    try:
        if not {"LOCAL_RANK", "SLURM_LOCALID"} & os.environ.keys():
            _try_out(config, datamodule)
        # Some strategies that start processes do this themselves: with it, the batches come in one order under all.
        L.seed_everything(config.seed, workers=True, verbose=False)
        trainer.fit(module, datamodule=datamodule, ckpt_path=_checkpoint(config))
    except (ValueError, TypeError, OSError, ModuleNotFoundError, MisconfigurationException) as error:
        if seen.has_begun:
            raise
        raise CompactHydraException(f"{type(error).__name__}: {error}") from error
    # Of spawned processes this one gets the metrics only, and so the last loss.
    last = [value.item() for name, value in trainer.callback_metrics.items() if name == "val/loss"]
    losses = seen.values or last
    if trainer.is_global_zero:
        _print_summary(trainer, losses, Path(config.paths.output_dir))
    return losses[-1] if losses else None


def _check_launch(accelerator: str) -> None:
    """Refuses ranks that somebody else has started where they would not agree on the run's folder, or on their number.

    Args:
        accelerator: The Trainer's.

    Raises:
        CompactHydraException: `launch` does not say who has started them, or they were not told what it needs.
    """
    config = HydraConfig.get()
    launch, name = config.runtime.choices.get("launch"), os.environ.get("TORCHELASTIC_RUN_ID")
    if launch == "slurm" and "SLURM_NTASKS_PER_NODE" not in os.environ:
        raise CompactHydraException(
            "launch=slurm takes the number of devices from the job's --ntasks-per-node, which was not given to sbatch"
            " or srun."
        )
    alone = accelerator == "cpu" or os.environ.get("SLURM_NTASKS_PER_NODE") == "1"
    if launch == "slurm" and "SLURM_GPUS_PER_TASK" in os.environ and not alone:
        raise CompactHydraException(
            f"--gpus-per-task={os.environ['SLURM_GPUS_PER_TASK']} shows each task its own GPUs alone, and the Trainer"
            " looks for those of all tasks of a node: give sbatch --gpus-per-node, as many as --ntasks-per-node."
        )
    if any(override.startswith("hydra.run.dir=") for override in config.overrides.hydra):
        return
    is_shell = os.environ.get("SLURM_JOB_NAME") in ("bash", "interactive")
    is_task = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1 and not is_shell
    right = "torchrun" if name is not None else "slurm" if is_task else "local"
    if launch == "local" and right != launch:
        raise CompactHydraException(
            f"{'torchrun' if name is not None else 'srun'} has started this process as one of several, and each would"
            f" choose a folder by its own clock. Add launch={right}, so that all have the same."
        )
    if launch == "torchrun" and name == "none":
        raise CompactHydraException(
            "torchrun gives the run's folder its name, and was not told one: the next run would go on in the same"
            " folder. Start it with --rdzv-id=NAME, or on a single machine with --standalone, which makes one up."
        )


def _checkpoint(config: DictConfig) -> str | None:
    """The checkpoint to resume from; `auto` is the newest one in the run's folder, and none in a new folder.

    One that is given by its path is where the run has begun: a job that is run again has got further since.
    """
    from lightning_chimera.files import newest_checkpoint
    from lightning_chimera.slurm import is_run_again

    given: str | None = config.ckpt_path
    if given != "auto" and (given is None or not is_run_again()):
        return given
    newest = newest_checkpoint(Path(config.paths.output_dir))
    return str(newest) if newest is not None else None if given == "auto" else given


def _build_logger(name: str, config: DictConfig) -> Any:
    """Builds a logger; where its package is missing, says which extra brings it."""
    from hydra.utils import instantiate

    try:
        return instantiate(config, _convert_="all")
    except InstantiationException as error:
        if name not in _LOGGER_EXTRAS or not isinstance(error.__cause__, ModuleNotFoundError):
            raise
        raise CompactHydraException(
            f"The logger {name!r} needs a package that is not installed. Install it with pip install"
            f" 'lightning-chimera[{name}]', or choose another logger, such as logger=csv."
        ) from error


def _try_out(config: DictConfig, datamodule: "L.LightningDataModule") -> None:
    """Finds mistakes in the data's and the optimizer's options before other processes are started for them."""
    import torch
    from hydra.utils import instantiate

    instantiate(config.optimizer, _convert_="all")([torch.nn.Parameter(torch.zeros(()))])
    datamodule.prepare_data()


def _leave_logging_to_hydra() -> None:
    """Takes Lightning's own handlers away, which would print each message that Hydra's handlers print a second time."""
    for name in ("lightning", "lightning.fabric", "lightning.pytorch"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        logger.propagate = True


def _print_summary(trainer: "L.Trainer", losses: list[float], output_dir: Path) -> None:
    """Says where everything lies and whether it learned."""
    from rich.console import Console

    lines = []
    if losses:
        lines.append(("validation loss", " -> ".join(f"{loss:.3f}" for loss in (*losses[:-1][:1], losses[-1]))))
    best = getattr(trainer.checkpoint_callback, "best_model_path", None)
    if best:
        lines.append(("best checkpoint", best))
    lines += [("timeline picture", str(picture)) for picture in sorted(output_dir.glob("*.png"))]
    # Not trainer.log_dir, which is a broadcast: the other ranks are gone by now.
    lines += [("logged values", logger.log_dir) for logger in trainer.loggers if logger.log_dir]
    lines.append(("run folder", str(output_dir)))
    console = Console(highlight=False, soft_wrap=True)
    for label, value in lines:
        console.print(f"[bold]{label:<17}[/bold]{value}")


@hydra.main(version_base="1.3", config_path="pkg://lightning_chimera.conf", config_name="train")
def train(config: DictConfig) -> float | None:
    """Hydra's task function."""
    _check_launch(str(config.trainer.get("accelerator", "auto")))
    return run(config)


def main() -> None:
    """Runs `train` with the recipes on the search path, also where Hydra cannot discover the plugin by itself."""
    Plugins.instance().register(LightningChimeraSearchPathPlugin)
    train()


if __name__ == "__main__":
    main()
