"""The loop goes as in one process: which hooks run, when it ends, validates, steps and follows schedules."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)

# ------------------------------------------------------------------------------------------- decisions of one rank


def is_rank(trainer: L.Trainer, rank: int) -> bool:
    """Whether this is the rank that decides, as a plain training's only one is."""
    return trainer.world_size == 1 or trainer.global_rank == rank


class Stops(Callback):
    """Ends the run in one hook, on one rank."""

    def __init__(self, hook: str, rank: int) -> None:
        self.batches = 0

        def stop(trainer: L.Trainer, *_: Any) -> None:
            if is_rank(trainer, rank) and (self.batches >= 3 or hook == "on_fit_start"):
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
    trainer = make_trainer(cell, max_epochs=3, val_check_interval=2, callbacks=list(callbacks))
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(rows[:ROWS]))
    hooks = sorted(name for name in vars(module) if name.startswith(("on_", "lr_")))
    return [trainer.global_step, trainer.current_epoch, trainer.fit_loop.total_batch_idx, hooks]


def stop_in_callback(cell: Cell, hook: str, rank: int) -> list[Any]:
    return run_until_stopped(cell, LanguageModule(), Stops(hook, rank))


def stop_in_module(cell: Cell) -> list[Any]:
    return run_until_stopped(cell, ModuleStops())


def stop_in_step(cell: Cell, name: str) -> list[Any]:
    return run_until_stopped(cell, StepStops(name))


STOP_HOOKS = [
    "on_fit_start",
    "on_train_epoch_start",
    "on_before_optimizer_step",
    "on_train_batch_end",
    "on_validation_batch_end",
    "on_validation_end",
    "on_train_epoch_end",
]


@pytest.mark.contract("Loop", "`trainer.should_stop` in any hook, on one rank only, ends the run on every rank")
@pytest.mark.parametrize("hook", STOP_HOOKS)
def test_a_stop_that_one_rank_asks_for_in_a_callback_ends_the_run_everywhere(world: World, hook: str) -> None:
    (plain,) = world.run(stop_in_callback, CHIMERA.reference, hook, 0, size=1)
    assert plain[0] < 12
    assert world.run(stop_in_callback, CHIMERA, hook, 1, size=2) == [plain] * 2


@pytest.mark.contract("Loop", "-1 from `on_train_batch_start`, on one rank only, skips the rest of the epoch on every rank")
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
