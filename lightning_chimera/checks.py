"""What is refused, and how it is said: what was given, the rule, what to change."""

import inspect
from collections.abc import Sequence

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import LightningModule
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_chimera.schedules import Schedule


def check_sizes(**sizes: int | None) -> None:
    """Refuses numbers that are no counts.

    Raises:
        ValueError: One is neither ``None`` nor a whole number of at least 1.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1.")


def check_choice(name: str, value: str, choices: Sequence[str]) -> None:
    """Refuses a value that is not among the choices.

    Raises:
        ValueError: It is not.
    """
    if value not in choices:
        raise ValueError(f"{name}={value!r}: it must be one of {', '.join(choices)}.")


def check_fixed_schedule(schedule: Schedule, num_stages: int | None, num_microbatches: int | None) -> None:
    """Refuses sizes that contradict a schedule given as a value.

    Raises:
        ValueError: They do.
    """
    for name, given, own in (
        ("num_stages", num_stages, schedule.num_ranks),
        ("num_microbatches", num_microbatches, schedule.num_microbatches),
    ):
        if given is not None and given != own:
            raise ValueError(f"{name}={given}, but the schedule {schedule.name!r} has {own}. Leave {name} out.")


def check_module(module: LightningModule) -> None:
    """Refuses a module whose steps can't be run by a schedule.

    Raises:
        MisconfigurationException: It optimizes by hand, or draws its own batches.
    """
    if not module.automatic_optimization:
        raise MisconfigurationException(
            f"{type(module).__name__} sets automatic_optimization=False. A pipeline runs forward and backward of all"
            " microbatches inside one training step, so it needs automatic optimization: return the loss from"
            " training_step and remove manual_backward."
        )
    for step in ("training_step", "validation_step", "test_step", "predict_step"):
        if "dataloader_iter" in inspect.signature(getattr(module, step)).parameters:
            raise MisconfigurationException(
                f"{type(module).__name__}.{step} takes dataloader_iter. A pipeline draws the batch itself and splits it"
                " into microbatches: take `batch` and `batch_idx` instead."
            )


def check_trainer(precision: Precision, *, sync_batchnorm: bool) -> None:
    """Refuses options of the Trainer that are not supported.

    Raises:
        MisconfigurationException: Batch norm is to be synchronized, or the loss to be scaled.
    """
    if sync_batchnorm:
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True) is not supported by ChimeraStrategy: leave it out. GPT-2 and BERT have no"
            " batch norm."
        )
    if getattr(precision, "scaler", None) is not None:
        raise MisconfigurationException(
            f"precision={precision.precision!r} scales the loss, which ChimeraStrategy does not support. Use"
            " bf16-mixed, bf16-true or 32-true."
        )


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that call the step more than once.

    Raises:
        MisconfigurationException: There is one.
    """
    if any(isinstance(optimizer, torch.optim.LBFGS) for optimizer in optimizers):
        raise MisconfigurationException(
            "LBFGS evaluates the step several times per optimizer step, which a pipeline does not support."
            " Use a first-order optimizer."
        )
