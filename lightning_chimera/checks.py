"""What is refused, and how it is said: what was given, the rule, what to change."""

import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.callbacks import BatchSizeFinder, ModelPruning
from lightning.pytorch.plugins.precision import (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    Precision,
    TransformerEnginePrecision,
    XLAPrecision,
)
from torch import nn
from torch.optim import Optimizer
from torchmetrics import Metric

from lightning_chimera.schedules import Schedule, validate

_OTHER_PRECISIONS = (
    BitsandbytesPrecision,
    DeepSpeedPrecision,
    FSDPPrecision,
    TransformerEnginePrecision,
    XLAPrecision,
)

_SAM = ("first_step", "second_step")
"""What sharpness-aware optimizers have."""

_SUMS_UP = ("Prodigy", "DAdapt")
"""How the names of those begin whose learning rate comes from sums over all parameters."""

_LONGEST_WAIT = timedelta(days=24)
"""The system polls for milliseconds in 31 bits."""


def check_sizes(**sizes: int | None) -> None:
    """Refuses numbers that are no counts.

    Raises:
        ValueError: One is neither ``None`` nor a whole number of at least 1.
    """
    for name, size in sizes.items():
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 1):
            raise ValueError(f"{name}={size!r}: it must be a whole number of at least 1.")


def check_cuts_type(cuts: Any) -> None:
    """Refuses cuts that are no list of whole numbers; whether they fit is known when the model is.

    Raises:
        ValueError: They are something else.
    """
    is_list = isinstance(cuts, Sequence) and not isinstance(cuts, str)
    if cuts is not None and not (is_list and all(type(cut) is int for cut in cuts)):
        raise ValueError(f"cuts={cuts!r}: give a list of whole numbers, the first block of each stage but the first.")


def check_recompute(recompute: Any) -> None:
    """Refuses what says neither what is recomputed nor nothing.

    Raises:
        ValueError: It does.
    """
    is_list = isinstance(recompute, Sequence) and not isinstance(recompute, str)
    if recompute in (None, "blocks", "stages") or (is_list and all(type(stage) is int for stage in recompute)):
        return
    raise ValueError(
        f"recompute={recompute!r}: give 'blocks' to keep the inputs of blocks only, 'stages' to keep those of stages"
        " only, or a list of the stages of which only the input is kept."
    )


def recomputed_stages(recompute: str | Sequence[int] | None, num_stages: int) -> frozenset[int]:
    """The stages of which only the input is kept.

    Raises:
        ValueError: One of them does not exist.
    """
    if recompute is None or recompute == "blocks":
        return frozenset()
    if isinstance(recompute, str):
        return frozenset(range(num_stages))
    outside = [stage for stage in recompute if not 0 <= stage < num_stages]
    if outside:
        raise ValueError(
            f"recompute={list(recompute)}: there is no stage {outside[0]}, they are 0 to {num_stages - 1}."
        )
    return frozenset(recompute)


def check_timeout(timeout: Any, name: str = "timeout") -> timedelta:
    """A bound on waiting, as a duration; one that no system call takes is cut to the longest that all take.

    Args:
        timeout: What was given.
        name: The argument's name.

    Raises:
        ValueError: It is no positive number of seconds.
    """
    if isinstance(timeout, int | float) and not isinstance(timeout, bool) and 0 < timeout < timedelta.max.days * 86400:
        return min(timedelta(seconds=timeout), _LONGEST_WAIT)
    if isinstance(timeout, timedelta) and timeout > timedelta(0):
        return min(timeout, _LONGEST_WAIT)
    raise ValueError(f"{name}={timeout!r}: it must be a positive number of seconds.")


def check_backend(backend: str | None) -> None:
    """Refuses a backend that this build of torch does not have.

    Raises:
        ValueError: It has not.
    """
    if backend is not None and not dist.is_backend_available(backend):
        known = ", ".join(name for name in dist.Backend.backend_list if dist.is_backend_available(name))
        raise ValueError(f"process_group_backend={backend!r} is not available here. This build of torch has: {known}.")


def check_built(schedule: Any, num_stages: int, num_microbatches: int) -> Schedule:
    """Refuses what is no training schedule for these sizes.

    Raises:
        ValueError: It is something else, is for other sizes, or has no backward.
        ScheduleError: It is not valid.
    """
    if not isinstance(schedule, Schedule):
        raise ValueError(f"The schedule's builder returned {type(schedule).__name__}; it must return a Schedule.")
    for noun, wanted, own in (
        ("ranks", num_stages, schedule.num_ranks),
        ("microbatches", num_microbatches, schedule.num_microbatches),
    ):
        if wanted != own:
            raise ValueError(
                f"The schedule {schedule.name!r} is for {own} {noun}, but this run needs one for {wanted}. Give"
                " num_stages (the ranks of a pipeline) and num_microbatches that fit, or a schedule by name."
            )
    if schedule.forward_only:
        raise ValueError(f"The schedule {schedule.name!r} has no backward, so nothing would be trained by it.")
    last = schedule.placement.rank_of(schedule.num_stages - 1)
    if last not in (0, schedule.num_ranks - 1):
        raise ValueError(
            f"The schedule {schedule.name!r} has the last stage of its first pipe on rank {last}; it must be on the"
            " first or on the last rank, where people look for what it logs. Number the ranks accordingly."
        )
    validate(schedule)
    return schedule


def check_placed(schedule: Schedule, usual: Schedule) -> Schedule:
    """Refuses a schedule that has the stages elsewhere than they are.

    Args:
        schedule: The schedule of a batch of another number of microbatches.
        usual: What the module was cut for.

    Raises:
        ValueError: It has.
    """
    if schedule.placement != usual.placement:
        raise ValueError(
            f"The schedule's builder places the stages otherwise for {schedule.num_microbatches} microbatches"
            f" ({schedule.name!r}, {schedule.num_stages} stages, {schedule.num_pipes} pipes), which a batch of few rows"
            f" needs, than for {usual.num_microbatches} ({usual.name!r}, {usual.num_stages} stages, {usual.num_pipes}"
            " pipes). Place them alike for every number, or leave such batches out (DataLoader(drop_last=True))."
        )
    return schedule


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


def check_callbacks(callbacks: Sequence[Callback]) -> None:
    """Refuses callbacks that need the whole model, or every rank's memory, on one rank.

    Raises:
        MisconfigurationException: There is one.
    """
    for callback in callbacks:
        name = type(callback).__name__
        if isinstance(callback, BatchSizeFinder):
            raise MisconfigurationException(
                f"{name} (and Tuner.scale_batch_size) tries sizes until memory runs out, which in a pipeline happens to"
                " one rank while the others wait for it. Leave it out and set the batch size: try one with"
                " Trainer(fast_dev_run=True), a run for each."
            )
        if isinstance(callback, ModelPruning):
            raise MisconfigurationException(
                f"{name} compares and masks the weights of the whole model, of which a rank of a pipeline holds its own"
                " stages only. Leave it out and prune after fit, when the module is whole again, or in a plain Trainer."
            )


def check_metrics(module: LightningModule) -> None:
    """Refuses metrics that communicate inside a step, where the ranks can't meet.

    Raises:
        MisconfigurationException: There is one.
    """
    for name, metric in module.named_modules():
        if isinstance(metric, Metric) and metric.dist_sync_on_step:
            raise MisconfigurationException(
                f"The metric {name!r} ({type(metric).__name__}) has dist_sync_on_step=True, which communicates inside a"
                " step, where each rank runs its own part of the pipeline: leave it out. What a step logs is of all"
                " ranks without it."
            )


def check_hyperparameters(module: LightningModule) -> None:
    """Refuses hyperparameters that hold the model: what is cut can't be put into a checkpoint as an object.

    Raises:
        MisconfigurationException: There is one.
    """
    own = set(map(id, module.parameters()))
    for name, value in module.hparams.items():
        if isinstance(value, nn.Module) and any(id(parameter) in own for parameter in value.parameters()):
            raise MisconfigurationException(
                f"The hyperparameter {name!r} of {type(module).__name__} is a model that the module trains. Checkpoints"
                " would hold it as an object, of which a rank of a pipeline has its own stages only; its weights are"
                f" saved anyway. Call self.save_hyperparameters(ignore=[{name!r}])."
            )


def check_buffers(changed: Sequence[Sequence[str]]) -> None:
    """Refuses training steps that change buffers, which they do for each microbatch and on the last stage only.

    Args:
        changed: For each rank the names of those that a step has changed.

    Raises:
        RuntimeError: There is one.
    """
    names = sorted(set().union(*changed))
    if names:
        raise RuntimeError(
            f"A training step changed the buffer {names[0]!r}. In a pipeline the step runs once for each microbatch,"
            " and behind the model's call on the last stage only, so the buffer would be another one on each rank, and"
            " not that of a whole batch. In place of a batch norm use LayerNorm or GroupNorm, or call its eval() in"
            " on_train_epoch_start; change a buffer of your own in on_train_batch_end."
        )


def check_trainer(precision: Precision, *, sync_batchnorm: bool) -> None:
    """Refuses options of the Trainer that are not supported.

    Raises:
        MisconfigurationException: Batch norm is to be synchronized, or the precision is another strategy's.
    """
    if sync_batchnorm:
        raise MisconfigurationException(
            "Trainer(sync_batchnorm=True) is not supported by ChimeraStrategy: leave it out. GPT-2 and BERT have no"
            " batch norm."
        )
    if isinstance(precision, _OTHER_PRECISIONS):
        raise MisconfigurationException(
            f"{type(precision).__name__} is not supported by ChimeraStrategy, which cuts the model as it is: the plugin"
            " replaces layers or belongs to another strategy. Use precision='bf16-mixed', '16-mixed', 'bf16-true',"
            " '16-true', '32-true' or '64-true'."
        )


@contextmanager
def one_optimizer() -> Iterator[None]:
    """Says what to do instead where Lightning refuses several optimizers: its own advice is refused here as well.

    Raises:
        MisconfigurationException: There are several.
    """
    try:
        yield
    except RuntimeError as error:
        if "multiple optimizers" not in str(error):
            raise
        raise MisconfigurationException(
            "configure_optimizers returned several optimizers. A pipeline trains with one: give it several parameter"
            " groups instead, each with its own learning rate and options."
        ) from None


def check_optimizers(optimizers: Sequence[Optimizer]) -> None:
    """Refuses optimizers that need more than the gradient of one step on one rank's parameters.

    Raises:
        MisconfigurationException: There is one.
    """
    for optimizer in optimizers:
        name = type(optimizer).__name__
        if isinstance(optimizer, torch.optim.LBFGS) or all(map(partial(hasattr, optimizer), _SAM)):
            raise MisconfigurationException(
                f"{name} evaluates the step several times per optimizer step, which a pipeline does not support."
                " Use a first-order optimizer, such as AdamW or SGD."
            )
        if name.startswith(_SUMS_UP):
            raise MisconfigurationException(
                f"{name} sums over the parameters of the whole model to find its learning rate, but each rank of a"
                " pipeline has those of its own stages. Use an optimizer that looks at each parameter by itself, such"
                " as AdamW or SGD."
            )


def check_evaluations(count: int, optimizer: Optimizer) -> None:
    """Refuses an optimizer that evaluates the step once more.

    Raises:
        RuntimeError: It does.
    """
    if count > 1:
        raise RuntimeError(
            f"{type(optimizer).__name__} evaluates the step several times per optimizer step, which a pipeline does not"
            " support. Use a first-order optimizer, such as AdamW or SGD."
        )


def check_groups(groups: Sequence[Sequence[Sequence[int]]]) -> None:
    """Refuses an optimizer that has other parameters on one rank than on another.

    Args:
        groups: For each rank the parameters of each group, by their places in the module.

    Raises:
        RuntimeError: It has.
    """
    other = next((rank for rank, own in enumerate(groups) if own != groups[0]), None)
    if other is not None:
        raise RuntimeError(
            f"The groups of the optimizer have other parameters on rank {other}, where they are"
            f" {[len(group) for group in groups[other]]}, than on rank 0, where they are"
            f" {[len(group) for group in groups[0]]}. A rank holds a part of the module, and has placeholders for the"
            " rest: choose parameters by name, from self.named_parameters() in configure_optimizers, and not by their"
            " values or by comparing them with parameters that were kept from before the fit."
        )
