"""Trains the same module plainly and as a pipeline, and compares what training did to every parameter.

The change of a parameter is compared, not its value: at small learning rates the values hide an error of a percent in
the gradient. The optimizer is SGD, since AdamW hides wrong scales.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_chimera import ChimeraStrategy
from lightning_chimera.schedules import get_family

from . import mutations
from .users import BLOCKS, ROWS, LanguageModule, Row, make_loader, make_rows
from .world import World

STEPS = 5
CLIP = 0.15
"""About a quarter of the gradients' norms."""

SILENT = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
    "num_sanity_val_steps": 0,
}


@dataclass(frozen=True)
class Cell:
    """One training, with all features on.

    Attributes:
        schedule: Name of the schedule; ``plain`` for a training without any strategy of ours.
        stages: Number of stages.
        replicas: Number of replicas.
        microbatches: Number of microbatches.
        model: Kind of the model.
        precision: As in the Trainer.
        tied: Whether the embeddings are the head's weights.
        padded: Whether rows have uneven lengths, with labels to be ignored.
        attention: HuggingFace's name of the implementation.
        clip: Whether gradients are clipped, by a norm that they exceed.
        accumulate: Batches per step.
        blocks: Blocks of the model.
        strategy: Further arguments of the strategy.
    """

    schedule: str = "chimera"
    stages: int = 2
    replicas: int = 1
    microbatches: int = 4
    model: str = "gpt2"
    precision: Any = "64-true"
    tied: bool = True
    padded: bool = True
    attention: str = "sdpa"
    clip: bool = True
    accumulate: int = 2
    blocks: int = BLOCKS
    strategy: tuple[tuple[str, Any], ...] = ()

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.stages * self.replicas

    @property
    def reference(self) -> "Cell":
        """What a plain training depends on: of the layout only the number of replicas, whose batches it joins."""
        return replace(self, schedule="plain", stages=1, microbatches=1, strategy=())

    @property
    def batch_size(self) -> int:
        """Rows of a batch of the loader: a plain training takes those of all replicas at once."""
        return ROWS * (self.replicas if self.schedule == "plain" else 1)

    def __str__(self) -> str:
        usual = Cell()
        parts = [self.schedule, f"D{self.stages}", f"W{self.replicas}", f"N{self.microbatches}", self.model]
        parts += [
            f"{name}={getattr(self, name)}"
            for name in ("precision", "tied", "padded", "attention", "clip", "accumulate", "blocks")
            if getattr(self, name) != getattr(usual, name)
        ]
        parts += [f"{name}={value}" for name, value in self.strategy]
        return "-".join(parts)


def label(value: Any) -> str | None:
    """The id of a test's argument: cells say what they are, functions and classes have names."""
    return str(value) if isinstance(value, Cell) else None


@dataclass
class Experiment:
    """What is trained.

    Attributes:
        module: The user's module.
        loader: The training data, or arguments of ``Trainer.fit``.
        options: Further arguments of the Trainer.
    """

    module: L.LightningModule
    loader: Any
    options: dict[str, Any] = field(default_factory=dict)


Make = Callable[[Cell], Experiment] | type[L.LightningModule]
"""A function of a module, called by the plain and the piped training; or a class to be trained on the usual rows."""


@dataclass
class Trained:
    """What one rank saw of a training.

    Attributes:
        before: The parameters at the start, by name.
        after: The parameters at the end.
        asked: The sum of what SGD was asked to change, of the parameters on this rank.
        losses: The loss of each batch that callbacks are handed.
        logged: The loss of each batch that the module logged.
        clip: The norm by which gradients were clipped.
        norms: For each step the gradients' norm before that, in a plain training.
        unused: For each step the names on this rank that have no gradient.
        hashes: For each step the hash of each parameter on this rank.
        keys: Names in the state dict of what is on this rank.
        peaks: For each batch the most activations held at one time.
        notes: What the module has noted in its own ``notes``.
    """

    before: dict[str, Tensor] = field(default_factory=dict)
    after: dict[str, Tensor] = field(default_factory=dict)
    asked: dict[str, Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    logged: list[float] = field(default_factory=list)
    clip: float | None = None
    norms: list[float] = field(default_factory=list)
    unused: list[set[str]] = field(default_factory=list)
    hashes: list[dict[str, str]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    peaks: list[float] = field(default_factory=list)
    notes: Any = None


class Spy(Callback):
    """Notes what the checks need."""

    def __init__(self) -> None:
        self.seen = Trained()

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.seen.clip = trainer.gradient_clip_val
        self.seen.keys = [name for name, value in module.state_dict().items() if not value.is_meta]
        held = {name: parameter for name, parameter in module.named_parameters() if not parameter.is_meta}
        self.seen.asked = {name: torch.zeros(parameter.shape).double() for name, parameter in held.items()}

        def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
            lr = optimizer.param_groups[0]["lr"]
            for name, parameter in held.items():
                if parameter.grad is not None:
                    self.seen.asked[name] -= lr * parameter.grad.double()

        for optimizer in trainer.optimizers:
            optimizer.register_step_post_hook(note)  # Lightning makes the gradients inside of the step

    def on_before_optimizer_step(self, trainer: L.Trainer, module: L.LightningModule, optimizer: Any) -> None:
        held = {name: parameter.grad for name, parameter in module.named_parameters() if not parameter.is_meta}
        self.seen.unused.append({name for name, gradient in held.items() if gradient is None})
        gradients = [gradient for gradient in held.values() if gradient is not None]
        self.seen.norms.append(float(torch.nn.utils.get_total_norm(gradients)) if gradients else 0.0)

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self.seen.losses.append(float(outputs.get("loss", math.nan)))  # nothing, of a step that left its batch out
        if "train_loss" in trainer.callback_metrics:
            self.seen.logged.append(float(trainer.callback_metrics["train_loss"]))
        if (batch_idx + 1) % trainer.accumulate_grad_batches == 0:
            self.seen.hashes.append(hash_parameters(module))
        if isinstance(trainer.strategy, ChimeraStrategy):
            self.seen.peaks.append(trainer.strategy.peak_activations)


def hash_parameters(module: torch.nn.Module) -> dict[str, str]:
    """A hash of each parameter that is on this rank."""
    return {
        name: hashlib.sha1(parameter.detach().reshape(-1).view(torch.uint8).numpy()).hexdigest()
        for name, parameter in module.named_parameters()
        if not parameter.is_meta
    }


def snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the parameters, in double precision."""
    return {name: parameter.detach().double().clone() for name, parameter in module.named_parameters()}


def make_trainer(cell: Cell, **options: Any) -> L.Trainer:
    """A quiet trainer for the layout of a cell."""
    if cell.schedule == "plain":
        return L.Trainer(**{"devices": 1, **SILENT, **options})
    strategy = ChimeraStrategy(
        **{
            "schedule": cell.schedule,
            "num_stages": cell.stages,
            "num_microbatches": cell.microbatches,
            "print_plan": False,
            "timeout": 30,
            **dict(cell.strategy),
        }
    )
    return L.Trainer(**{"devices": cell.size, "strategy": strategy, **SILENT, **options})


def usual_rows(cell: Cell, *, padded: bool = True) -> list[Row]:
    """Rows for the usual number of steps."""
    return make_rows(cell.model, STEPS * cell.accumulate * cell.replicas * ROWS, padded=padded)


def usual(cell: Cell, module: L.LightningModule, rows: list[Row] | None = None, **options: Any) -> Experiment:
    """Trains a module on the usual rows, or on others."""
    return Experiment(module, make_loader(usual_rows(cell) if rows is None else rows, cell.batch_size), options)


def language_model(cell: Cell) -> Experiment:
    """The training of the whole matrix."""
    exact = cell.precision == "64-true"
    module = LanguageModule(cell.model, exact=exact, tied=cell.tied, attention=cell.attention, blocks=cell.blocks)
    return usual(cell, module, usual_rows(cell, padded=cell.padded))


def train(cell: Cell, make: Make = language_model, mutation: str | None = None) -> Trained:
    """Trains on this rank."""
    if mutation is not None:
        getattr(mutations, mutation)()
    torch.manual_seed(0)
    experiment = usual(cell, make()) if isinstance(make, type) else make(cell)
    module, spy = experiment.module, Spy()
    spy.seen.before = snapshot(module)
    options = {
        "precision": cell.precision,
        "max_steps": STEPS,
        "gradient_clip_val": CLIP if cell.clip else None,
        "accumulate_grad_batches": cell.accumulate,
        **experiment.options,
    }
    options["callbacks"] = [spy, *options.get("callbacks", [])]
    fit = experiment.loader if isinstance(experiment.loader, dict) else {"train_dataloaders": experiment.loader}
    make_trainer(cell, **options).fit(module, **fit)
    spy.seen.after = snapshot(module)
    spy.seen.notes = getattr(module, "notes", None)
    return spy.seen


@functools.cache
def train_plainly(world: World, cell: Cell, make: Make = language_model) -> Trained:
    """The plain training that a cell must equal."""
    (seen,) = world.run(train, cell.reference, make, size=1)
    return seen


def check(
    world: World, cell: Cell, make: Make = language_model, mutation: str | None = None
) -> tuple[Trained, list[Trained]]:
    """Checks that training a cell does what a plain training does, on every rank.

    Returns:
        The plain training, and that of each rank.
    """
    plain = train_plainly(world, cell.reference, make)
    assert plain.clip is None or min(plain.norms) > 2 * plain.clip, f"clipping would do little: {plain.norms}"
    ranks = world.run(train, cell, make, mutation, size=cell.size)
    for seen in ranks[:1] if cell.precision == "64-true" else ranks:  # whole modules are compared, or each rank's part
        same_changes(seen, plain, cell.precision)
    same_losses(ranks, plain, cell.precision)
    same_copies(ranks)
    assert set().union(*(seen.keys for seen in ranks)) == set(plain.keys)
    assert [len(seen.peaks) for seen in ranks] == [len(plain.losses)] * cell.size
    options = {name: value for name, value in cell.strategy if name in ("pipes", "chunks")}
    schedule = get_family(cell.schedule).build(cell.stages, cell.microbatches, **options)
    ascending = schedule.placement.rank_of(schedule.num_stages - 1) == 0
    by_replica = dict(cell.strategy).get("innermost") == "replicas"
    for rank, seen in enumerate(ranks):
        place = rank // cell.replicas if by_replica else rank % cell.stages
        bound = schedule.peak_activations[place if ascending else cell.stages - 1 - place]
        assert max(seen.peaks) <= bound
    return plain, ranks


def same_changes(piped: Trained, plain: Trained, precision: Any = "64-true", absolute_in_single: float = 1e-8) -> None:
    """Checks the change of every parameter against the plain one's.

    Args:
        piped: What a rank saw.
        plain: What a plain training saw.
        precision: As in the Trainer.
        absolute_in_single: Tolerance relative to the whole change, in single precision.
    """
    assert piped.before.keys() == plain.before.keys()
    changes = {name: plain.after[name] - plain.before[name] for name in plain.before}
    errors = {name: piped.after[name] - piped.before[name] - change for name, change in changes.items()}
    relative, absolute = (1e-10, 1e-14) if precision == "64-true" else (1e-5, absolute_in_single)
    if precision != "64-true":
        # Near 1, as in a norm's scale, single precision numbers are 1e-7 apart: what is stored there can't tell a
        # change to 1e-5 of itself, in the plain training either. What the optimizer was asked to change can.
        changes = {name: plain.asked[name] for name in piped.asked}
        errors = {name: piped.asked[name] - change for name, change in changes.items()}
    whole = torch.stack([change.norm() for change in changes.values()]).norm()
    assert whole > 0
    wrong = [
        f"{name}: change {float(changes[name].norm()):.3g}, off by {float(error.norm()):.3g}"
        for name, error in errors.items()
        if not error.norm() <= relative * changes[name].norm() + absolute * whole
    ]
    assert not wrong, f"{len(wrong)} of {len(changes)} parameters changed otherwise:\n" + "\n".join(wrong)


def same_losses(ranks: Iterable[Trained], plain: Trained, precision: Any) -> None:
    """Checks the loss of every batch, handed out and logged, on every rank."""
    tolerance = 1e-10 if precision == "64-true" else 1e-5
    for seen in ranks:
        torch.testing.assert_close(seen.losses, plain.losses, rtol=tolerance, atol=0.0)
        torch.testing.assert_close(seen.logged, plain.logged, rtol=max(tolerance, 1e-6), atol=0.0)  # logged in float32


def same_copies(ranks: Iterable[Trained]) -> None:
    """Checks that after every step all ranks that hold a parameter hold the same bits."""
    for number, step in enumerate(zip(*(seen.hashes for seen in ranks), strict=True)):
        for name in set().union(*step):
            copies = {hashes[name] for hashes in step if name in hashes}
            assert len(copies) == 1, f"step {number}: the copies of {name} differ"
