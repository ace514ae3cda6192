"""The loop goes as in one process: which hooks run, when it ends, validates, steps and follows schedules."""

import functools
import os
from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, GradientAccumulationScheduler, ModelCheckpoint
from lightning.pytorch.core.hooks import CheckpointHooks, DataHooks, ModelHooks
from lightning.pytorch.utilities import CombinedLoader

from .fidelity import Cell, Experiment, check, label, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
LONG = pytest.mark.long

# ------------------------------------------------------------------------------------------- decisions of one rank


def is_rank(trainer: L.Trainer, rank: int) -> bool:
    """Whether this is the rank that decides, as a plain training's only one is."""
    return trainer.world_size == 1 or trainer.global_rank == rank


BEFORE = ("on_fit_start", "on_sanity_check_end")
"""Hooks before any batch."""


class Stops(Callback):
    """Ends the run in one hook, on one rank."""

    def __init__(self, hook: str, rank: int) -> None:
        self.batches = 0

        def stop(trainer: L.Trainer, *_: Any) -> None:
            if is_rank(trainer, rank) and (self.batches >= 3 or hook in BEFORE):
                trainer.should_stop = True

        setattr(self, hook, stop)

    def on_train_batch_start(self, *_: Any) -> None:
        self.batches += 1


class ModuleStops(LanguageModule):
    """Ends the run in a hook of the module, on global rank 0; or only the epoch, on the last rank."""

    def on_train_epoch_end(self) -> None:
        if self.trainer.is_global_zero and self.current_epoch == 1:
            self.trainer.should_stop = True

    def on_train_batch_start(self, batch: Row, batch_idx: int) -> int | None:
        last = is_rank(self.trainer, self.trainer.world_size - 1)
        return -1 if last and self.current_epoch == 0 and batch_idx == 1 else None


class StepStops(LanguageModule):
    """Ends the run in a step, behind the model call, where one rank gets; in validation or in training."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if self.name == "training" and self.global_step == 2:
            self.trainer.should_stop = True
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        if self.name == "validation" and self.global_step == 2:
            self.trainer.should_stop = True


def run_until_stopped(cell: Cell, module: L.LightningModule, *callbacks: Callback) -> list[Any]:
    torch.manual_seed(0)
    rows = make_rows("gpt2", 4 * cell.replicas * ROWS)
    options: dict[str, Any] = {"max_epochs": 3, "val_check_interval": 2, "num_sanity_val_steps": 1}
    trainer = make_trainer(cell, callbacks=list(callbacks), **options)
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(rows[:ROWS]))
    hooks = sorted(name for name in vars(module) if name.startswith(("on_", "lr_")))
    return [trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx, hooks]


def stop_in_callback(cell: Cell, hook: str, rank: int) -> list[Any]:
    return run_until_stopped(cell, LanguageModule(), Stops(hook, rank))


class StopsLate(EarlyStopping):
    """Ends the run behind the module's hook, on one rank, by a rule of its own."""

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if is_rank(trainer, 1) and trainer.current_epoch == 1:
            trainer.should_stop = True


def stop_late(cell: Cell) -> list[Any]:
    stops = StopsLate("val_loss")
    found = run_until_stopped(cell, LanguageModule(), stops)
    return [*found, "on_train_epoch_end" in vars(stops)]


def stop_in_module(cell: Cell) -> list[Any]:
    return run_until_stopped(cell, ModuleStops())


def stop_in_step(cell: Cell, name: str) -> list[Any]:
    return run_until_stopped(cell, StepStops(name))


STOP_HOOKS = [
    pytest.param("on_fit_start", marks=LONG),
    "on_sanity_check_end",
    pytest.param("on_train_epoch_start", marks=LONG),
    pytest.param("on_before_optimizer_step", marks=LONG),
    pytest.param("on_train_batch_end", marks=LONG),
    "on_validation_batch_end",
    pytest.param("on_validation_end", marks=LONG),
    pytest.param("on_train_epoch_end", marks=LONG),
]


@pytest.mark.contract("Loop", "`trainer.should_stop` in any hook, on one rank only, ends the run on every rank")
@pytest.mark.parametrize("hook", STOP_HOOKS)
def test_a_stop_that_one_rank_asks_for_in_a_callback_ends_the_run_everywhere(world: World, hook: str) -> None:
    (plain,) = world.run(stop_in_callback, CHIMERA.reference, hook, 0, size=1)
    assert plain[0] < 12
    assert world.run(stop_in_callback, CHIMERA, hook, 1, size=2) == [plain] * 2


@pytest.mark.contract("Callbacks", "a subclass of `EarlyStopping` that stops by a rule of its own, on one rank only")
def test_a_stop_that_one_rank_asks_for_behind_the_modules_hook_ends_the_run_everywhere(world: World) -> None:
    (plain,) = world.run(stop_late, CHIMERA.reference, size=1)
    assert plain[0] == 8
    assert world.run(stop_late, CHIMERA, size=2) == [plain] * 2


@pytest.mark.contract(
    "Loop", "-1 from `on_train_batch_start`, on one rank only, skips the rest of the epoch on every rank"
)
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_what_one_rank_decides_in_a_hook_of_the_module_holds_everywhere(world: World, cell: Cell) -> None:
    (plain,) = world.run(stop_in_module, cell.reference, size=1)
    assert plain[0] == 1 + 4
    assert world.run(stop_in_module, cell, size=cell.size) == [plain] * cell.size


@pytest.mark.contract("Loop", "`trainer.should_stop` in a training or validation step ends the run on every rank")
@pytest.mark.parametrize("name", ["training", "validation"])
def test_a_step_ends_the_run_on_every_rank(world: World, name: str) -> None:
    (plain,) = world.run(stop_in_step, CHIMERA.reference, name, size=1)
    assert plain[0] < 12
    assert world.run(stop_in_step, CHIMERA, name, size=2) == [plain] * 2


# -------------------------------------------------------------------------------------------------- hooks in order

MODULE_HOOKS = [
    *(name for hooks in (ModelHooks, DataHooks, CheckpointHooks) for name in vars(hooks) if not name.startswith("_")),
    "configure_optimizers",
    "configure_gradient_clipping",
    "configure_callbacks",
    "optimizer_step",
    "optimizer_zero_grad",
    "lr_scheduler_step",
    "training_step",
    "validation_step",
    "test_step",
    "predict_step",
]
LOADER_HOOKS = {"train_dataloader", "val_dataloader", "test_dataloader", "predict_dataloader"}
CALLBACK_HOOKS = [name for name in vars(Callback) if not name.startswith("_") and name not in ("state_key",)]
STEPS = {"training_step"}
"""What runs once for each microbatch and stage."""

Event = tuple[str, ...]


def note(events: list[Event], who: str, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Notes a call with its whole numbers, which are the indices of batches and loaders."""
    given = [*args, *kwargs.values()]
    events.append((who, name, *(str(value) for value in given if isinstance(value, int | str))))


def spied(own: Any, events: list[Event], who: str, name: str) -> Any:
    """A hook that notes its calls."""

    @functools.wraps(own)
    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not events or name not in STEPS or events[-1][:2] != (who, name):
            note(events, who, name, args, kwargs)
        return own(self, *args, **kwargs)

    return hook


class Plain(LanguageModule):
    """Warms up, to have a scheduler."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__(blocks=blocks, lr=0.1)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)
        return [optimizer], [{"scheduler": scheduler, "interval": "step", "frequency": 2}]

    def validation_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(**batch).loss)


def make_spies(events: list[Event]) -> tuple[L.LightningModule, Callback]:
    """A module and a callback all of whose hooks note their calls."""
    names = [name for name in MODULE_HOOKS if name not in LOADER_HOOKS]
    module = type("Spied", (Plain,), {name: spied(getattr(Plain, name), events, "module", name) for name in names})
    hooks = {name: spied(getattr(Callback, name), events, "callback", name) for name in CALLBACK_HOOKS}
    return module(blocks=4), type("Spy", (Callback,), hooks)()


def record_hooks(cell: Cell, folder: str) -> list[Event]:
    torch.manual_seed(0)
    events: list[Event] = []
    module, spy = make_spies(events)
    rows = make_rows("gpt2", 3 * cell.replicas * ROWS)
    loaders = (rows, rows[: 2 * ROWS * cell.replicas - 3 * (cell.replicas == 1)])
    train, evaluation = (make_loader(part, cell.batch_size) for part in loaders)
    options: dict[str, Any] = {"accumulate_grad_batches": 2, "num_sanity_val_steps": 1, "gradient_clip_val": 1.0}
    trainer = make_trainer(cell, max_epochs=2, callbacks=[spy], **options)
    trainer.fit(module, train, [evaluation, evaluation])
    trainer.save_checkpoint(f"{folder}/{cell.schedule}.ckpt")
    for run in (trainer.validate, trainer.test, trainer.predict):
        run(module, evaluation, ckpt_path=f"{folder}/{cell.schedule}.ckpt")
    return events


@pytest.mark.contract(
    "Loop", "every hook of modules and callbacks runs as often and in the same order as in one process"
)
@pytest.mark.parametrize(
    "cell", [pytest.param(CHIMERA, marks=LONG), Cell("chimera", 4), pytest.param(REPLICAS, marks=LONG)], ids=str
)
def test_every_hook_runs_in_the_order_of_one_process_on_every_rank(world: World, cell: Cell, tmp_path: Any) -> None:
    (plain,) = world.run(record_hooks, cell.reference, str(tmp_path), size=1)
    assert len(plain) > 300
    assert {name for _, name, *_ in plain} >= {"on_before_optimizer_step", "on_predict_batch_end", "on_test_epoch_end"}
    for seen in world.run(record_hooks, cell, str(tmp_path), size=cell.size):
        assert [" ".join(event) for event in seen] == [" ".join(event) for event in plain]


# ------------------------------------------------------------------------------------------ options of the Trainer


class Follows(Callback):
    """Notes where the run is whenever something happens."""

    def __init__(self) -> None:
        self.events: list[tuple[Any, ...]] = []

    def note(self, trainer: L.Trainer, what: str, *more: Any) -> None:
        rate = round(trainer.optimizers[0].param_groups[0]["lr"], 9) if trainer.optimizers else None
        loss = trainer.callback_metrics.get("train_loss")
        where = (trainer.current_epoch, trainer.global_step, trainer.fit_loop.total_batch_idx)
        self.events.append((what, *more, *where, rate, None if loss is None else round(float(loss), 4)))

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, "start", trainer.num_training_batches, trainer.estimated_stepping_batches)

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.note(trainer, "batch", batch_idx, round(float(outputs["loss"]), 4), trainer.is_last_batch)

    def on_validation_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, "validation", trainer.sanity_checking)

    def on_validation_batch_end(
        self, trainer: L.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        if trainer.world_size < 4:  # with replicas each has its own share
            self.note(trainer, "validation batch", batch_idx, dataloader_idx, trainer.num_val_batches)

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        losses = {name: round(float(v), 4) for name, v in trainer.callback_metrics.items() if name.startswith("val")}
        self.note(trainer, "validated", losses)

    def on_train_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.note(trainer, "epoch")


class Scheduled(Plain):
    """Follows a scheduler, by step, epoch or what it monitors."""

    def __init__(self, kind: str = "step") -> None:
        super().__init__()
        self.kind = kind

    def configure_optimizers(self) -> Any:
        optimizer = LanguageModule.configure_optimizers(self)
        if self.kind == "plateau":
            scheduler: Any = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"}}
        if self.kind == "plateau by step":
            scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
            config = {"scheduler": scheduler, "monitor": "train_loss", "interval": "step", "frequency": 3}
            return {"optimizer": optimizer, "lr_scheduler": config}
        if self.kind == "epoch":
            return [optimizer], [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)]
        total = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, total_iters=total)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


OPTIONS: dict[str, dict[str, Any]] = {
    "accumulate 4 in epochs of 2 batches": {"accumulate_grad_batches": 4, "batches": 2, "max_epochs": 3},
    "accumulate 3 of 5, validate in the middle": {"accumulate_grad_batches": 3, "batches": 5, "val_check_interval": 2},
    "accumulation scheduler": {"callbacks": "accumulation", "batches": 5, "max_epochs": 3},
    "val_check_interval 0.5": {"val_check_interval": 0.5},
    "val_check_interval over epochs": {"val_check_interval": 6, "check_val_every_n_epoch": None, "max_epochs": 3},
    "check_val_every_n_epoch 2": {"check_val_every_n_epoch": 2, "max_epochs": 4},
    "limit_train_batches 3": {"limit_train_batches": 3},
    "limit_train_batches 0.5, limit_val_batches 0": {"limit_train_batches": 0.5, "limit_val_batches": 0},
    "limit_train_batches 0.5, limit_val_batches 0.5": {"limit_train_batches": 0.5, "limit_val_batches": 0.5},
    "limit_train_batches 0": {"limit_train_batches": 0},
    "overfit_batches 2": {"overfit_batches": 2},
    "fast_dev_run": {"fast_dev_run": True},
    "fast_dev_run 3": {"fast_dev_run": 3},
    "max_time": {"max_time": {"seconds": 0}},
    "max_steps in the middle of an epoch": {"max_steps": 5, "max_epochs": None},
    "min_steps against a stop": {"min_steps": 6, "stop": True, "max_epochs": 3},
    "min_epochs against a stop": {"min_epochs": 2, "stop": True, "max_epochs": 3},
    "detect_anomaly": {"detect_anomaly": True},
    "sanity check of all": {"num_sanity_val_steps": -1},
    "reload_dataloaders_every_n_epochs": {"reload_dataloaders_every_n_epochs": 1},
    "clip by value": {"gradient_clip_val": 0.001, "gradient_clip_algorithm": "value"},
    "scheduler by epoch": {"kind": "epoch", "max_epochs": 3},
    "scheduler by plateau": {"kind": "plateau", "max_epochs": 3},
    "scheduler by plateau of steps": {"kind": "plateau by step", "max_epochs": 3},
}
OF_REPLICAS = [
    "accumulate 4 in epochs of 2 batches",
    pytest.param("accumulate 3 of 5, validate in the middle", marks=LONG),
    pytest.param("val_check_interval 0.5", marks=LONG),
    pytest.param("limit_train_batches 3", marks=LONG),
    pytest.param(
        "limit_train_batches 0.5, limit_val_batches 0.5",
        marks=pytest.mark.contract("Loop", "parts in `limit_train_batches` and `limit_val_batches`, with replicas"),
    ),
    pytest.param("overfit_batches 2", marks=LONG),
    pytest.param("fast_dev_run", marks=LONG),
    pytest.param("scheduler by plateau", marks=LONG),
]
"""What depends on the number of batches, or on what all replicas must agree."""


class AsksToStop(Callback):
    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        if is_rank(trainer, 1):
            trainer.should_stop = True


def follow(cell: Cell, options: dict[str, Any]) -> list[tuple[Any, ...]]:
    """What happens in a training, and at its end."""
    torch.manual_seed(0)
    options = {"max_epochs": 2, **options}
    batches, stop, follows = options.pop("batches", 4), options.pop("stop", False), Follows()
    callbacks: list[Callback] = [follows, *([AsksToStop()] if stop else [])]
    if options.pop("callbacks", None):
        callbacks.append(GradientAccumulationScheduler({0: 1, 1: 3, 2: 2}))
    module = Scheduled(options.pop("kind", "step"))
    trainer = make_trainer(cell, callbacks=callbacks, precision="64-true", **options)
    rows = make_rows("gpt2", batches * cell.replicas * ROWS)
    evaluation = make_rows("gpt2", 2 * ROWS + 3, padded=False)
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(evaluation, cell.batch_size))
    follows.note(trainer, "end", trainer.fit_loop.epoch_loop.batch_progress.state_dict())
    weights = [round(float(parameter.double().norm()), 6) for parameter in module.parameters()]
    return [*follows.events, ("weights", *weights)]


def follow_option(cell: Cell, name: str) -> list[tuple[Any, ...]]:
    return follow(cell, OPTIONS[name])


def check_events(world: World, cell: Cell, name: str) -> None:
    (plain,) = world.run(follow_option, cell.reference, name, size=1)
    events = [event for event in plain if cell.replicas == 1 or event[0] != "validation batch"]
    for seen in world.run(follow_option, cell, name, size=cell.size):
        assert list(map(str, seen)) == list(map(str, events))


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            "accumulate 4 in epochs of 2 batches",
            marks=[
                LONG,
                pytest.mark.contract(
                    "Loop",
                    "`accumulate_grad_batches` longer than an epoch steps as often, and by as much, as in one process",
                    reported="Lightning#21808",
                ),
            ],
        ),
        pytest.param(
            "accumulate 3 of 5, validate in the middle",
            marks=pytest.mark.contract("Loop", "`accumulate_grad_batches`, with a short last window and validations"),
        ),
        pytest.param(
            "accumulation scheduler", marks=[LONG, pytest.mark.contract("Loop", "`GradientAccumulationScheduler`")]
        ),
        pytest.param(
            "val_check_interval 0.5",
            marks=[LONG, pytest.mark.contract("Loop", "`val_check_interval` as a part of an epoch")],
        ),
        pytest.param(
            "val_check_interval over epochs",
            marks=pytest.mark.contract("Loop", "`val_check_interval` in batches, over the ends of epochs"),
        ),
        pytest.param(
            "check_val_every_n_epoch 2", marks=[LONG, pytest.mark.contract("Loop", "`check_val_every_n_epoch`")]
        ),
        pytest.param("limit_train_batches 3", marks=[LONG, pytest.mark.contract("Loop", "`limit_train_batches`")]),
        pytest.param(
            "limit_train_batches 0.5, limit_val_batches 0",
            marks=[LONG, pytest.mark.contract("Loop", "`limit_val_batches`")],
        ),
        pytest.param("limit_train_batches 0.5, limit_val_batches 0.5", marks=LONG),
        pytest.param("limit_train_batches 0", marks=LONG),
        pytest.param("overfit_batches 2", marks=[LONG, pytest.mark.contract("Loop", "`overfit_batches`")]),
        pytest.param("fast_dev_run", marks=[LONG, pytest.mark.contract("Loop", "`fast_dev_run`")]),
        pytest.param("fast_dev_run 3", marks=LONG),
        pytest.param("max_time", marks=[LONG, pytest.mark.contract("Loop", "`max_time`")]),
        pytest.param("max_steps in the middle of an epoch", marks=pytest.mark.contract("Loop", "`max_steps`")),
        pytest.param("min_steps against a stop", marks=pytest.mark.contract("Loop", "`min_steps`")),
        pytest.param("min_epochs against a stop", marks=[LONG, pytest.mark.contract("Loop", "`min_epochs`")]),
        pytest.param("detect_anomaly", marks=[LONG, pytest.mark.contract("Loop", "`detect_anomaly`")]),
        pytest.param("sanity check of all", marks=[LONG, pytest.mark.contract("Loop", "`num_sanity_val_steps`")]),
        pytest.param(
            "reload_dataloaders_every_n_epochs",
            marks=[LONG, pytest.mark.contract("Loop", "`reload_dataloaders_every_n_epochs`")],
        ),
        pytest.param("clip by value", marks=[LONG, pytest.mark.contract("Loop", "clipping of gradients by value")]),
        pytest.param("scheduler by epoch", marks=[LONG, pytest.mark.contract("Loop", "schedulers by epoch")]),
        pytest.param(
            "scheduler by plateau", marks=[LONG, pytest.mark.contract("Loop", "`ReduceLROnPlateau` by epoch")]
        ),
        pytest.param(
            "scheduler by plateau of steps", marks=pytest.mark.contract("Loop", "`ReduceLROnPlateau` by step")
        ),
    ],
)
def test_a_training_goes_as_in_one_process(world: World, name: str) -> None:
    check_events(world, CHIMERA, name)


@pytest.mark.contract(
    "Loop",
    "`trainer.num_training_batches` and `trainer.estimated_stepping_batches` count the batches of a replica, so"
    " schedules are as long as the training",
    reported="Lightning#12317, Lightning#13389",
)
@pytest.mark.parametrize("name", OF_REPLICAS)
def test_a_training_of_replicas_goes_as_one_process_on_all_their_batches(world: World, name: str) -> None:
    check_events(world, REPLICAS, name)


# ------------------------------------------------------------------------------------------------- several loaders


class TakesSeveral(Plain):
    """Trains and evaluates on whatever its loaders give, if they give several batches at once on all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(together(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self.model(**together(batch)).loss, batch_size=1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.notes.append((batch_idx, round(float(outputs["loss"]), 6)))

    def on_validation_end(self) -> None:
        names = [name for name in self.trainer.callback_metrics if name.startswith("val")]
        self.notes.append({name: round(float(self.trainer.callback_metrics[name]), 5) for name in sorted(names)})


def together(batch: Any) -> Row:
    """The rows of all batches in one."""
    if "input_ids" in batch:
        return batch
    batches = [part for part in (batch.values() if isinstance(batch, dict) else batch) if part is not None]
    return {name: torch.cat([part[name] for part in batches]) for name in batches[0]}


def train_on_several(cell: Cell, training: str, evaluation: str) -> Any:
    torch.manual_seed(0)
    module = TakesSeveral()

    def loaders(mode: str, *batches: int) -> Any:
        rows = [make_rows("gpt2", n * cell.replicas * ROWS, padded=False, seed=n) for n in batches]
        made = {str(n): make_loader(rows[n], cell.batch_size) for n in range(len(rows))}
        return {"dict": made, "list": list(made.values())}.get(mode) or CombinedLoader(made, mode)

    trainer = make_trainer(cell, max_epochs=2, precision="64-true", num_sanity_val_steps=1)
    trainer.fit(module, loaders(training, 4, 2, 3), loaders(evaluation, 1, 3))
    return trainer.num_training_batches, trainer.num_val_batches, trainer.global_step, module.notes


@pytest.mark.contract(
    "Data", "several training loaders at once, in every mode of `CombinedLoader` that one process takes"
)
@pytest.mark.contract("Data", "several validation loaders: lists, dicts and `CombinedLoader` in every mode")
@pytest.mark.parametrize(
    ("cell", "training", "evaluation"),
    [
        (CHIMERA, "dict", "list"),
        (REPLICAS, "max_size", "max_size"),
        *(
            pytest.param(cell, *modes, marks=LONG)
            for cell, *modes in [
                (REPLICAS, "dict", "list"),
                (CHIMERA, "list", "dict"),
                (REPLICAS, "list", "dict"),
                (CHIMERA, "min_size", "sequential"),
                (REPLICAS, "min_size", "sequential"),
                (CHIMERA, "max_size_cycle", "max_size_cycle"),
                (REPLICAS, "max_size_cycle", "max_size_cycle"),
                (CHIMERA, "max_size", "max_size"),
                (CHIMERA, "min_size", "min_size"),
                (REPLICAS, "min_size", "min_size"),
            ]
        ),
    ],
)
def test_several_loaders_give_what_they_give_in_one_process(
    world: World, cell: Cell, training: str, evaluation: str
) -> None:
    (plain,) = world.run(train_on_several, cell.reference, training, evaluation, size=1)
    for seen in world.run(train_on_several, cell, training, evaluation, size=cell.size):
        assert seen == plain


class OwnLoss(TakesSeveral):
    """Has a loss of its own over the rows of all loaders."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = together(batch)
        logits = self.model(input_ids=rows["input_ids"]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows["labels"].flatten())
        self.log("train_loss", loss)
        return loss


def of_unequal_batches(cell: Cell, module: L.LightningModule, *, padded: bool) -> Experiment:
    """Loaders of 8 and 4 rows to a batch; the last of one replica's second has a single row."""
    sizes = {"a": (8, 3 * ROWS), "b": (4, 2 * 4 + (cell.replicas == 1))}
    loaders = {
        name: make_loader(
            make_rows("gpt2", count * cell.replicas, padded=padded, seed=count),
            size * (cell.replicas if cell.schedule == "plain" else 1),
        )
        for name, (size, count) in sizes.items()
    }
    combined = CombinedLoader(loaders, "max_size")
    return Experiment(module, {"train_dataloaders": combined}, {"max_epochs": 2, "max_steps": -1})


def unequal_batches(cell: Cell) -> Experiment:
    return of_unequal_batches(cell, TakesSeveral(), padded=True)


def unequal_batches_and_own_loss(cell: Cell) -> Experiment:
    return of_unequal_batches(cell, OwnLoss(), padded=False)


@pytest.mark.contract("Data", "several training loaders of different batch sizes, whose batches come together")
@pytest.mark.parametrize(
    ("cell", "make"),
    [(CHIMERA, unequal_batches_and_own_loss), pytest.param(REPLICAS, unequal_batches, marks=LONG)],
    ids=label,
)
def test_the_batches_of_several_loaders_are_cut_each_by_its_own_rows(world: World, cell: Cell, make: Any) -> None:
    check(world, replace(cell, clip=False), make)


class SumsByLoader(Plain):
    """Sums what it is given of each loader."""

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.model(**together(batch))
        for name, part in batch.items():
            total = 0.0 if part is None else part["input_ids"].sum().double()
            self.log(f"val_{name}", total, reduce_fx="sum")


def sum_by_loader(cell: Cell, mode: str) -> tuple[dict[str, float], list[list[float]]]:
    """What was summed of loaders of 3 and 4 batches, and the sum of each batch."""
    torch.manual_seed(0)
    rows = [make_rows("gpt2", number * ROWS, padded=False) for number in (3, 4)]
    combined = CombinedLoader({"a": make_loader(rows[0]), "b": make_loader(rows[1])}, mode)
    (found,) = make_trainer(cell).validate(SumsByLoader(), combined, verbose=False)
    sums = [[float(batch["input_ids"].sum()) for batch in make_loader(part)] for part in rows]
    return {name: float(value) for name, value in found.items()}, sums


@pytest.mark.contract(
    "Data", "a parallel `CombinedLoader` in evaluation counts every row once, whatever batches each replica has left"
)
@pytest.mark.parametrize("mode", ["max_size", pytest.param("min_size", marks=LONG)])
def test_rows_of_parallel_loaders_count_once_whatever_is_left_to_a_replica(world: World, mode: str) -> None:
    for found, (first, second) in world.run(sum_by_loader, REPLICAS, mode, size=4):
        assert found["val_a"] == pytest.approx(sum(first))
        # Of min_size the second replica ends with the first loader, of which it has one batch.
        assert found["val_b"] == pytest.approx(sum(second) if mode == "max_size" else sum(second[:3]))


@pytest.mark.contract(
    "Data",
    "a `CombinedLoader` of mode `max_size_cycle` in evaluation whose equally long loaders leave unequal numbers of"
    " batches to the replicas",
    "refused",
)
def test_parallel_loaders_that_would_repeat_rows_are_refused(world: World) -> None:
    with pytest.raises(RankFailed, match=r"max_size_cycle.*the mode 'max_size' or 'sequential'"):
        world.run(sum_by_loader, REPLICAS, "max_size_cycle", size=4)


def collate_with_gaps(rows: list[Row], gaps: set[int]) -> Row | None:
    """A batch, or nothing where its first row is one of those."""
    return None if int(rows[0]["number"]) in gaps else {name: torch.stack([row[name] for row in rows]) for name in KEPT}


KEPT = ("input_ids", "attention_mask", "labels")


def train_with_gaps(cell: Cell, *gaps: int) -> Any:
    torch.manual_seed(0)
    rows: list[Row] = [{**row, "number": torch.tensor(n)} for n, row in enumerate(make_rows("gpt2", 6 * ROWS))]
    collate = functools.partial(collate_with_gaps, gaps={gap * ROWS for gap in gaps})
    trainer, module = make_trainer(cell, max_epochs=1, precision="64-true"), Plain()
    trainer.fit(module, make_loader(rows, ROWS, collate_fn=collate))
    weights = [round(float(parameter.norm()), 8) for parameter in module.parameters()]
    return trainer.global_step, trainer.fit_loop.total_batch_idx, weights


@pytest.mark.contract("Data", "`None` instead of a training batch leaves it out")
def test_batches_that_are_none_are_left_out(world: World) -> None:
    (plain,) = world.run(train_with_gaps, CHIMERA.reference, 1, 4, size=1)
    assert plain[0] == 4
    assert world.run(train_with_gaps, CHIMERA, 1, 4, size=2) == [plain] * 2


@pytest.mark.contract("Data", "`None` instead of a training batch on some replicas only", "refused")
def test_batches_that_are_none_on_one_replica_are_refused_on_every_rank(world: World) -> None:
    with pytest.raises(RankFailed, match=r"yields None instead of batch 1 on some of the 2 replicas only"):
        world.run(train_with_gaps, REPLICAS, 3, size=4)


# ------------------------------------------------------------------------------------------------ one run after another


def resume(cell: Cell, folder: str, when: str) -> list[Any]:
    """Trains, and goes on from a checkpoint of the middle of an epoch in another trainer."""
    torch.manual_seed(0)
    rows = make_rows("gpt2", 8 * cell.replicas * ROWS)
    evaluation = make_rows("gpt2", 2 * ROWS, padded=False)
    loaders = make_loader(rows, cell.batch_size), make_loader(evaluation, cell.batch_size)
    options: dict[str, Any] = {"max_epochs": 2, "val_check_interval": 3, "enable_checkpointing": True}
    saver = ModelCheckpoint(f"{folder}/{cell.schedule}", "{step}", save_top_k=-1, **SAVES[when])
    make_trainer(cell, callbacks=[saver], **options).fit(Scheduled(), *loaders)
    follows = Follows()
    trainer = make_trainer(cell, callbacks=[follows], **{**options, "enable_checkpointing": False})
    trainer.fit(Scheduled(), *loaders, ckpt_path=f"{folder}/{cell.schedule}/step={4 if when == 'batch' else 3}.ckpt")
    progress = trainer.fit_loop.epoch_loop.batch_progress.state_dict()
    return [*follows.events, progress, sorted(map(os.path.basename, saver.best_k_models))]


SAVES: dict[str, dict[str, Any]] = {"batch": {"every_n_train_steps": 4}, "validation": {"monitor": "val_loss"}}


@pytest.mark.contract(
    "Loop",
    "resuming in the middle of an epoch trains and validates when one process that resumes does",
    reported="Lightning#19549, Lightning#20288, Lightning#20277, Lightning#11504, Lightning#19367",
)
@pytest.mark.parametrize(
    ("cell", "when"),
    [
        pytest.param(CHIMERA, "batch", marks=LONG),
        (REPLICAS, "batch"),
        pytest.param(CHIMERA, "validation", marks=LONG),
    ],
)
def test_a_run_resumed_in_the_middle_of_an_epoch_goes_as_in_one_process(
    world: World, cell: Cell, when: str, tmp_path: Any
) -> None:
    (plain,) = world.run(resume, cell.reference, str(tmp_path), when, size=1)
    assert len(plain) > 20
    expected = [str(event) for event in plain if cell.replicas == 1 or "validation batch" not in event]
    for seen in world.run(resume, cell, str(tmp_path), when, size=cell.size):
        assert list(map(str, seen)) == expected


class Evaluates(Plain):
    """Returns what it predicts, and how many batches it was given."""

    def test_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("test_loss", self.model(**batch).loss)
        self.log("batches", 1.0, reduce_fx="sum")

    def predict_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> Any:
        return batch["input_ids"][:, 0].tolist(), self.model(**batch).logits.mean((1, 2))


def run_one_after_another(cell: Cell) -> list[Any]:
    """Evaluates before, between and after two trainings of one module, with limits of every kind."""
    torch.manual_seed(0)
    module = Evaluates()
    rows = make_rows("gpt2", 4 * ROWS)
    train, evaluation = make_loader(rows), make_loader(rows[: 3 * ROWS + 3])
    found: list[Any] = []
    for limit in (1.0, 0.5, 2, 0):
        limits = {f"limit_{name}_batches": limit for name in ("val", "test", "predict")}
        trainer = make_trainer(cell, max_epochs=1, precision="64-true", **limits)
        found += [limit, trainer.validate(module, evaluation, verbose=False)]
        trainer.fit(module, train, evaluation)
        found += [trainer.global_step, trainer.test(module, [evaluation, train], verbose=False)]
        found += [trainer.predict(module, [evaluation, train])]
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, train, evaluation)
        found += [trainer.global_step, trainer.current_epoch, trainer.predict(module, evaluation)]
    return found


@pytest.mark.contract("Loop", "fit, validate, test and predict in any order, and a second fit of one trainer")
@pytest.mark.contract(
    "Loop", "`limit_val_batches`, `limit_test_batches`, `limit_predict_batches`: numbers, parts and 0"
)
@pytest.mark.contract(
    "Loop",
    "predictions come in the order of the rows, on every rank",
)
def test_runs_may_follow_each_other_in_any_order(world: World) -> None:
    (plain,) = world.run(run_one_after_another, CHIMERA.reference, size=1)
    for seen in world.run(run_one_after_another, CHIMERA, size=2):
        torch.testing.assert_close(seen, plain, rtol=2e-6, atol=1e-9)
