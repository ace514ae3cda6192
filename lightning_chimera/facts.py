"""What all ranks must have alike, in words: versions, settings, model and optimizer."""

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import lightning
import torch
import transformers
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.utilities.types import LRSchedulerConfig
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_chimera.schedules import Schedule

_OF_TRAINER = ("accumulate_grad_batches", "max_epochs", "max_steps", "gradient_clip_val", "gradient_clip_algorithm")
_LIMITS = ("limit_train_batches", "limit_val_batches", "limit_test_batches", "limit_predict_batches")
_PLACES = ("_name_or_path", "name_or_path", "transformers_version")
"""Entries of a model's configuration that may differ from host to host."""
_COMPARED = 8
"""Numbers of each parameter in which checkpoints are compared."""


def facts_of_run(trainer: Trainer, module: LightningModule, schedule: Schedule, **settings: Any) -> dict[str, str]:
    """What a run depends on, before the module is cut.

    Args:
        trainer: The Trainer.
        module: The user's module, whole.
        schedule: The training schedule.
        **settings: Arguments of the strategy.
    """
    facts = {f"the version of {package.__name__}": package.__version__ for package in (torch, lightning, transformers)}
    facts["the code of lightning_chimera"] = _code()
    facts["the call of the Trainer"] = getattr(trainer.state.fn, "value", "none")
    facts |= {f"ChimeraStrategy({name}=...)": repr(value) for name, value in settings.items()}
    facts["the schedule"] = f"{schedule.name} for {schedule.num_ranks} ranks, {schedule.num_microbatches} microbatches"
    facts["the order of the schedule"] = hashlib.sha256(str(schedule.rows).encode()).hexdigest()[:10]
    facts |= {f"trainer.{name}": repr(getattr(trainer, name, None)) for name in (*_OF_TRAINER, *_LIMITS)}
    facts["Trainer(precision=...)"] = str(trainer.precision)
    facts["the checkpoint to go on from"] = _of_checkpoint(trainer._checkpoint_connector._loaded_checkpoint)
    facts["the class of the module"] = type(module).__name__
    for name, part in module.named_modules():
        config: Any = getattr(part, "config", None)
        if hasattr(config, "to_dict"):
            facts |= {
                f"{name}.config.{key}": json.dumps(value, default=str, sort_keys=True)
                for key, value in sorted(config.to_dict().items())
                if key not in _PLACES
            }
            break  # parts of a model have the same one
    return facts | _tensors("parameter", module.named_parameters()) | _tensors("buffer", module.named_buffers())


def _of_checkpoint(checkpoint: Mapping[str, Any]) -> str:
    """How far a checkpoint is: each rank reads a file by itself, and that of another machine may be another one."""
    if not checkpoint:
        return "none"
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get("epoch_loop.batch_progress", {}).get("current", {})
    counts = {
        "step": checkpoint.get("global_step"),
        "epoch": checkpoint.get("epoch"),
        "batch": progress.get("processed"),
    }
    digest = hashlib.sha256()
    for name, value in checkpoint.get("state_dict", {}).items():
        digest.update(name.encode())
        # Not what is packed in some way, whose numbers can't be had from everywhere.
        is_plain = type(value) in (Tensor, nn.Parameter) and value.layout == torch.strided and not value.is_meta
        if is_plain and value.is_floating_point():
            digest.update(str(value.flatten()[:_COMPARED].view(torch.uint8).tolist()).encode())
    return ", ".join(f"{name} {count}" for name, count in counts.items()) + f", weights {digest.hexdigest()[:10]}"


@functools.cache
def _code() -> str:
    """A digest of this package's sources: a checkout may have changed without its version."""
    digest, folder = hashlib.sha256(), Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + path.read_bytes())
    return digest.hexdigest()[:10]


def _tensors(kind: str, named: Iterable[tuple[str, Tensor | nn.Parameter]]) -> dict[str, str]:
    described = {
        f"{kind} {name!r}": f"{list(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
        + (" (frozen)" if kind == "parameter" and not tensor.requires_grad else "")
        for name, tensor in named
    }
    return {f"the number of {kind}s": str(len(described)), **described}


def facts_of_optimizers(
    optimizers: Iterable[Optimizer], schedulers: Iterable[LRSchedulerConfig] = ()
) -> dict[str, str]:
    """What steps of optimizers depend on besides gradients: the numbers of their groups, and who changes them."""
    facts: dict[str, str] = {}
    for optimizer in optimizers:
        name = type(optimizer).__name__
        facts["the optimizer"] = name
        for number, group in enumerate(optimizer.param_groups):
            facts |= {f"{name}'s group {number}, {key}": value for key, value in _scalars(group).items()}
    for config in schedulers:
        facts["the learning rate scheduler"] = type(config.scheduler).__name__
        facts["when it steps"] = f"{config.interval}, {config.frequency}, {config.monitor}"
    return facts


def _scalars(group: Mapping[str, Any]) -> dict[str, str]:
    scalars = {}
    for key, value in group.items():
        if key == "params":
            scalars["number of parameters"] = str(len(value))
        elif isinstance(value, Tensor):
            scalars[key] = str(value.tolist()) if value.numel() == 1 else f"{list(value.shape)}"
        elif value is None or isinstance(value, int | float | str | list | tuple):
            scalars[key] = repr(value)
    return scalars
