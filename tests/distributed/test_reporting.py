"""What is logged, measured, decided and predicted is the same on every rank, and what one process would have said."""

import csv
import math
from itertools import chain
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    Callback,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger

from lightning_chimera.schedules import chimera

from .fidelity import Cell, check, make_trainer, usual
from .users import ROWS, VOCABULARY, LanguageModule, Row, make_loader, make_rows
from .world import World

CELLS = [
    Cell("chimera", 4, model="bert"),
    Cell("1f1b", 2, replicas=2, microbatches=3, model="bert"),
    Cell("gpipe", 2, microbatches=8, model="bert"),
]


class Latest(torchmetrics.Metric):
    """The last value, as a mean over those who have one."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.tensor(0.0), dist_reduce_fx="mean")

    def update(self, value: torch.Tensor) -> None:
        self.value = value.detach()

    def compute(self) -> torch.Tensor:
        return self.value


class Talkative(LanguageModule):
    """Logs in all the ways that people do."""

    def __init__(self) -> None:
        super().__init__("bert", lr=0.5)
        self.accuracy = torchmetrics.Accuracy(task="multiclass", num_classes=VOCABULARY, ignore_index=-100)
        self.seen = torchmetrics.CatMetric()
        self.mean = torchmetrics.MeanMetric()
        self.latest = Latest()
        self.confusion = torchmetrics.ConfusionMatrix(task="multiclass", num_classes=VOCABULARY, ignore_index=-100)
        self.val_losses: list[torch.Tensor] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("train_loss", output.loss, on_step=True, on_epoch=True, prog_bar=True, sync_dist=True)
        tokens = (batch["labels"] != -100).sum()
        self.log_dict({"tokens": tokens.float(), "rows": float(len(batch["labels"]))}, reduce_fx="sum", on_epoch=True)
        self.log("batch", float(batch_idx))
        self.log("longest", batch["attention_mask"].sum(1).max().float(), reduce_fx="max", on_step=True)
        self.log("shortest", batch["attention_mask"].sum(1).min().float(), reduce_fx=min, on_step=True)
        self.accuracy(output.logits.transpose(1, 2), batch["labels"])
        self.log("train_accuracy", self.accuracy, on_step=True, on_epoch=True)
        return output.loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_is", float(self.current_epoch), sync_dist=True)

    def evaluate(self, batch: Row, name: str) -> Any:
        output = self.model(**batch)
        self.log(f"{name}_loss", output.loss, prog_bar=True)
        self.confusion.update(output.logits.transpose(1, 2), batch["labels"])
        self.seen.update(output.loss)
        self.mean.update(output.loss, len(batch["input_ids"]))
        self.log(f"{name}_mean", self.mean)
        self.latest.update(output.loss)
        self.log(f"{name}_latest", self.latest)
        return output.loss

    def validation_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> Any:
        loss = self.evaluate(batch, "val")
        self.val_losses.append(loss)
        return {"loss": loss, "rows": len(batch["labels"])}

    def on_validation_epoch_end(self) -> None:
        self.log("val_list", torch.stack(self.val_losses).mean())
        self.log("val_seen", self.seen.compute().sum())
        self.log("val_confusion", self.confusion.compute().float().square().sum())
        self.val_losses.clear()
        self.seen.reset()
        self.confusion.reset()

    def test_step(self, batch: Row, batch_idx: int) -> None:
        self.evaluate(batch, "test")

    def predict_step(self, batch: Row, batch_idx: int) -> Any:
        return {"logits": self.model(**batch).logits, "ids": batch["input_ids"], "batch": batch_idx}


class History(Callback):
    """Notes the values after every training batch, and what validation handed out."""

    def __init__(self) -> None:
        self.metrics: list[dict[str, float]] = []
        self.outputs: list[Any] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        self.metrics.append({name: float(value) for name, value in trainer.callback_metrics.items()})

    def on_validation_batch_end(self, trainer: L.Trainer, module: Any, outputs: Any, *_: Any) -> None:
        if outputs is not None:  # on a replica that has no batch left
            self.outputs.append((float(outputs["loss"]), outputs["rows"]))


def use_everything(cell: Cell, folder: str) -> dict[str, Any]:
    """Fits, validates, tests and predicts with one trainer."""
    torch.manual_seed(0)
    module, history = Talkative(), History()
    rows = make_rows("bert", 4 * ROWS * 2)
    train = make_loader(rows, cell.batch_size // 2)
    evaluation = make_loader(make_rows("bert", 2 * ROWS + 5, seed=1), ROWS)
    trainer = make_trainer(
        cell,
        max_epochs=2,
        precision="64-true",
        accumulate_grad_batches=2,
        num_sanity_val_steps=1,
        log_every_n_steps=1,
        callbacks=[history, LearningRateMonitor()],
        logger=CSVLogger(folder, name=cell.schedule),
    )
    trainer.fit(module, train, evaluation)
    found: dict[str, Any] = {"fit": numbers(trainer.callback_metrics), "logged": numbers(trainer.logged_metrics)}
    found["bar"] = numbers(trainer.progress_bar_metrics)
    found["validate"] = trainer.validate(module, evaluation, verbose=False)
    found["test"] = trainer.test(module, evaluation, verbose=False)
    found["predict"] = trainer.predict(module, evaluation)
    return {**found, "steps": history.metrics, "outputs": history.outputs}


def numbers(metrics: Any) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


@pytest.mark.contract(
    "Logging and metrics",
    "the values of fit, validate, test and predict in `callback_metrics`, loggers, the bar and results, on every rank",
)
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.replicas == 1], ids=str)
def test_fit_validate_test_and_predict_say_what_one_process_says(world: World, cell: Cell, tmp_path: Path) -> None:
    (plain,) = world.run(use_everything, cell.reference, str(tmp_path), size=1)
    ranks = world.run(use_everything, cell, str(tmp_path), size=cell.size)
    assert len(plain["steps"]) == 32
    for seen in ranks:
        predictions, expected = seen.pop("predict"), plain["predict"]
        torch.testing.assert_close(predictions, expected, rtol=1e-9, atol=1e-12)
        same(seen, {name: plain[name] for name in seen})
    assert [path.name for path in (tmp_path / cell.schedule).iterdir()] == ["version_0"]
    table, reference = (read(tmp_path / name / "version_0" / "metrics.csv") for name in (cell.schedule, "plain"))
    same(table, reference)


def read(path: Path) -> list[dict[str, float]]:
    with path.open() as lines:
        return [{name: float(value) for name, value in line.items() if value} for line in csv.DictReader(lines)]


def same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-9)  # Lightning logs in single precision


OF_A_REPLICA = {"val_list", "val_latest", "test_latest"}


def same_but_for_a_replicas_own(found: Any, expected: Any) -> None:
    """Compares numbers, but for those of what a replica has seen by itself: its lists, its last batch."""
    if isinstance(expected, list):
        for one, other in zip(found, expected, strict=True):
            same_but_for_a_replicas_own(one, other)
    else:
        found, expected = (
            {name: value for name, value in it.items() if name.split("/")[0] not in OF_A_REPLICA}
            for it in (found, expected)
        )
        same(found, expected)


@pytest.mark.contract(
    "Logging and metrics", "with replicas, logged values are those of one process on all their batches"
)
def test_replicas_say_what_one_process_says_of_all_their_batches(world: World, tmp_path: Path) -> None:
    cell = CELLS[1]
    (plain,) = world.run(use_everything, cell.reference, str(tmp_path), size=1)
    ranks = world.run(use_everything, cell, str(tmp_path), size=cell.size)
    for seen in ranks:
        for name in ("fit", "logged", "bar", "validate", "test", "steps"):
            same_but_for_a_replicas_own(seen[name], plain[name])
    # Each replica predicts every second batch, in order.
    for replica in (0, 1):
        for seen in ranks[2 * replica : 2 * replica + 2]:
            expected = plain["predict"][replica::2]
            assert [len(batch["ids"]) for batch in seen["predict"]] == [len(batch["ids"]) for batch in expected]
            for batch, other in zip(seen["predict"], expected, strict=True):
                torch.testing.assert_close(batch["logits"], other["logits"], rtol=1e-9, atol=1e-12)
                assert torch.equal(batch["ids"], other["ids"])


class Steep(LanguageModule):
    """Gets worse at some time, at a learning rate that follows the validation."""

    def __init__(self, model: str) -> None:
        super().__init__(model, lr=1.2)
        self.notes: list[Any] = []

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": plateau, "monitor": "val_loss"}}

    def on_train_epoch_start(self) -> None:
        self.notes.append(self.trainer.optimizers[0].param_groups[0]["lr"])


def decide(cell: Cell, folder: str) -> dict[str, Any]:
    torch.manual_seed(0)
    module = Steep(cell.model)
    saver = ModelCheckpoint(folder, "{epoch}-{val_loss:.6f}", monitor="val_loss", save_top_k=2, save_last=True)
    stopper = EarlyStopping("val_loss", patience=1)
    trainer = make_trainer(
        cell, max_epochs=20, precision="64-true", enable_checkpointing=True, callbacks=[saver, stopper]
    )
    trainer.fit(
        module,
        make_loader(make_rows(cell.model, 4 * cell.replicas * ROWS), cell.batch_size),
        make_loader(make_rows(cell.model, 20), ROWS),
    )
    return {
        "best": Path(saver.best_model_path).name,
        "kept": sorted(Path(path).name for path in saver.best_k_models),
        "score": round(float(saver.best_model_score), 6),
        "stopped": stopper.stopped_epoch,
        "epoch": trainer.current_epoch,
        "step": trainer.global_step,
        "rates": [*module.notes, trainer.optimizers[0].param_groups[0]["lr"]],
    }


@pytest.mark.contract(
    "Callbacks",
    "`EarlyStopping`, `ModelCheckpoint` and `ReduceLROnPlateau` decide alike on every rank, as in one process",
)
@pytest.mark.parametrize("cell", CELLS[:2], ids=str)
def test_decisions_are_those_of_one_process_on_every_rank(world: World, cell: Cell, tmp_path: Path) -> None:
    (plain,) = world.run(decide, cell.reference, str(tmp_path / "plain"), size=1)
    assert 2 < plain["stopped"] < 19
    assert plain["rates"][0] > plain["rates"][-1]
    assert world.run(decide, cell, str(tmp_path / "piped"), size=cell.size) == [plain] * cell.size
    for name in ("plain", "piped"):
        files = sorted(path.name for path in (tmp_path / name).iterdir())
        assert files == sorted([*plain["kept"], "last.ckpt"])


class Stops(LanguageModule):
    """Ends its first epoch early, and then the run."""

    notes = 0

    def on_train_batch_start(self, batch: Row, batch_idx: int) -> int | None:
        self.notes += 1
        return -1 if self.current_epoch == 0 and batch_idx == 2 else None

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        if self.current_epoch == 1 and batch_idx == 1:
            self.trainer.should_stop = True


def stops(cell: Cell) -> Any:
    return usual(cell, Stops(), max_epochs=4, max_steps=-1, accumulate_grad_batches=1)


@pytest.mark.contract("Loop", "a hook of the module ends the epoch by -1, or the run by `trainer.should_stop`")
def test_hooks_may_end_the_epoch_or_the_run(world: World) -> None:
    plain, ranks = check(world, Cell("chimera", 2), stops)
    assert [seen.notes for seen in (plain, *ranks)] == [5, 5, 5]


class StepStops(LanguageModule):
    """The step decides to end the run; behind the model call, so only the last stage gets there."""

    notes = 0

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            self.trainer.should_stop = True
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes += 1


def step_stops(cell: Cell) -> Any:
    return usual(cell, StepStops(), max_epochs=4, max_steps=-1, accumulate_grad_batches=1)


@pytest.mark.contract("Loop", "`trainer.should_stop` in a training or validation step ends the run on every rank")
@pytest.mark.parametrize("cell", [Cell("chimera", 2), Cell("gpipe", 2, replicas=2)], ids=str)
def test_a_step_may_end_the_run_for_all_ranks(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, step_stops)
    assert [seen.notes for seen in (plain, *ranks)] == [2] * (1 + cell.size)


class Writer(BasePredictionWriter):
    """Writes the indices of the rows that were predicted."""

    def __init__(self) -> None:
        super().__init__("batch_and_epoch")
        self.rows: list[list[int]] = []
        self.epoch: Any = None

    def write_on_batch_end(self, trainer: Any, module: Any, prediction: Any, indices: Any, *_: Any) -> None:
        assert len(prediction["ids"]) == len(indices)
        self.rows.append(list(indices))

    def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, indices: Any) -> None:
        self.epoch = indices


def write_predictions(cell: Cell) -> Any:
    torch.manual_seed(0)
    writer = Writer()
    trainer = make_trainer(cell, callbacks=[writer])
    trainer.predict(Talkative(), make_loader(make_rows("bert", 21), ROWS))
    return writer.rows, writer.epoch


@pytest.mark.contract("Callbacks", "`BasePredictionWriter` is told the rows of each batch, of its replica's batches")
def test_prediction_writers_are_told_the_rows(world: World) -> None:
    everything = [list(range(0, 8)), list(range(8, 16)), list(range(16, 21))]
    for rows, epoch in world.run(write_predictions, Cell("chimera", 2), size=2):
        assert rows == everything
        assert epoch == [everything]
    found = world.run(write_predictions, Cell("gpipe", 2, replicas=2), size=4)
    assert [rows for rows, _ in found] == [everything[0::2]] * 2 + [everything[1::2]] * 2


def evaluate_alone(cell: Cell) -> Any:
    """Evaluates without any training, two loaders at once."""
    torch.manual_seed(0)
    module = Talkative()
    loaders = [make_loader(make_rows("bert", 13), ROWS), make_loader(make_rows("bert", 3, seed=2), ROWS)]
    values = make_trainer(cell, precision="64-true").validate(module, loaders, verbose=False)
    return values, make_trainer(cell, precision="64-true").test(module, loaders[0], verbose=False)


@pytest.mark.contract("Loop", "`validate` and `test` without any training, on several loaders")
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_evaluation_needs_no_training(world: World, cell: Cell) -> None:
    (plain,) = world.run(evaluate_alone, cell.reference, size=1)
    assert not math.isnan(plain[0][0]["val_loss/dataloader_idx_0"])
    for seen in world.run(evaluate_alone, cell, size=cell.size):
        for one, other in zip(seen, plain, strict=True):
            (same_but_for_a_replicas_own if cell.replicas > 1 else same)(one, other)


class LooksAtTimelines(Callback):
    """Asks for the timeline of the last training step, after the step and after a validation."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.timeline())

    def on_validation_end(self, trainer: Any, *_: Any) -> None:
        self.seen.append(trainer.strategy.timeline())


def look_at_timelines(cell: Cell) -> Any:
    torch.manual_seed(0)
    looks = LooksAtTimelines()
    loader = make_loader(make_rows("bert", ROWS), ROWS)
    make_trainer(cell, callbacks=[looks], max_epochs=1).fit(Talkative(), loader, loader)
    return looks.seen


@pytest.mark.contract(
    "Callbacks", "`trainer.strategy.timeline()` is that of the last training step, also after a validation"
)
def test_a_timeline_is_that_of_the_last_training_step_also_after_a_validation(world: World) -> None:
    cell = Cell("chimera", 2)
    for after_step, after_validation in world.run(look_at_timelines, cell, size=2):
        assert after_step == after_validation
        expected = sorted(map(str, chain(*chimera(2, cell.microbatches).rows)))
        assert sorted(str(span.action) for span in after_step.spans) == expected
