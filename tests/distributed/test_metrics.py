"""What metrics measure is on every rank what they measure in one process."""

import functools
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from .fidelity import Cell, make_trainer
from .logs import check_all, fit_and_test
from .users import ROWS, VOCABULARY, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
CELLS = pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)


class Spread(torchmetrics.Metric):
    """A metric with a state of every reduction."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        for name in ("sum", "mean", "max", "min"):
            self.add_state(name, torch.tensor(0.0, dtype=torch.float64), dist_reduce_fx=name)
        self.add_state("each", [], dist_reduce_fx="cat")
        self.add_state("kept", [], dist_reduce_fx=None)
        self.add_state("product", torch.tensor(1.0, dtype=torch.float64), dist_reduce_fx=product)

    def update(self, values: Tensor) -> None:
        values = values.double() / 100
        self.sum = self.sum + values.sum()
        self.mean = torch.ones_like(self.mean)
        self.max, self.min = torch.maximum(self.max, values.max()), torch.minimum(self.min, -values.max())
        self.each.append(values.flatten())
        self.kept.append(values.sum())
        self.product = self.product * (values.sum() / 1000).exp()

    def compute(self) -> Tensor:
        each = torchmetrics.utilities.dim_zero_cat(self.each)
        kept = torch.stack([value.sum() for value in self.kept]).sum()
        return torch.stack([self.sum, self.mean, self.max, self.min, each.sort()[0][5], kept, self.product])


def product(values: Tensor) -> Tensor:
    return values.prod(dim=0)


def classify() -> MetricCollection:
    """Metrics of which two share their states."""
    options: dict[str, Any] = {"num_classes": VOCABULARY, "average": "micro"}
    return MetricCollection(
        {
            "accuracy": MulticlassAccuracy(**options),
            "precision": MulticlassPrecision(**options),
            "f1": MulticlassF1Score(num_classes=VOCABULARY),
        }
    )


def of_numbers() -> dict[str, Any]:
    """Metrics that are told the numbers of each batch."""
    return {
        "mean": torchmetrics.MeanMetric(),
        "max": torchmetrics.MaxMetric(),
        "min": torchmetrics.MinMetric(),
        "sum": torchmetrics.SumMetric(),
        "cat": torchmetrics.CatMetric(),
        "minmax": torchmetrics.MinMaxMetric(torchmetrics.MeanMetric()),
        "composed": torchmetrics.MeanMetric() + 2 * torchmetrics.MaxMetric(),
    }


def of_logits() -> dict[str, Any]:
    """Metrics that are told the logits and labels of each batch."""
    return {
        "collection": classify().clone(prefix="collection/"),
        "nested": MetricCollection([classify().clone(postfix="/inner"), MulticlassRecall(num_classes=VOCABULARY)]),
        "by_class": torchmetrics.ClasswiseWrapper(MulticlassAccuracy(num_classes=VOCABULARY, average=None)),
        "bootstrap": torchmetrics.BootStrapper(MulticlassAccuracy(num_classes=VOCABULARY), num_bootstraps=2),
        "auroc": MulticlassAUROC(num_classes=VOCABULARY, thresholds=None, average="macro"),
    }


class Measures(LanguageModule):
    """Updates metrics in steps, computes and resets them when an epoch ends.

    Args:
        kind: Which metrics.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(blocks=2)
        self.kind = kind
        make = {"numbers": of_numbers, "logits": of_logits}[kind]
        self.metrics = nn.ModuleDict({stage: nn.ModuleDict(make()) for stage in ("fit", "evaluation")})
        self.spread = Spread()
        self.notes: list[Any] = []

    def told(self, output: Any, batch: Row) -> tuple[Any, ...]:
        logits, labels = output.logits.transpose(1, 2), batch["labels"]
        return (logits, labels) if self.kind == "logits" else (labels.double(),)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.spread.update(batch["labels"])
        for metric in self.metrics["fit"].values():
            metric.update(*self.told(output, batch))
        return output.loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        output = self.model(**batch)
        for metric in self.metrics["evaluation"].values():
            metric.update(*self.told(output, batch))

    def close(self, stage: str) -> None:
        for name, metric in self.metrics[stage].items():
            value = metric.compute()
            if name == "cat":  # in the order of the ranks, as with every strategy
                value = value.flatten().sort()[0]
            if name != "bootstrap":  # which draws at random
                self.notes.append({f"{stage}/{name}": value})
            metric.reset()

    def on_train_epoch_end(self) -> None:
        self.close("fit")
        self.notes.append({"spread": self.spread.compute()})
        self.spread.reset()

    def on_validation_epoch_end(self) -> None:
        self.close("evaluation")


def measure(cell: Cell, kind: str) -> list[Any]:
    return fit_and_test(cell, functools.partial(Measures, kind))


@pytest.mark.contract(
    "Logging and metrics",
    "torchmetrics with states of every reduction, their collections (compute groups, nested, prefixes), wrappers and"
    " sums, updated in steps and computed and reset in hooks",
    reported="torchmetrics#3199, torchmetrics#112",
)
@CELLS
@pytest.mark.parametrize("kind", ["numbers", "logits"])
def test_metrics_measure_what_they_measure_in_one_process(world: World, cell: Cell, kind: str) -> None:
    (plain,) = world.run(measure, cell.reference, kind, size=1)
    assert len(plain[-1]) > 10
    for seen in world.run(measure, cell, kind, size=cell.size):
        pairs = list(zip(seen[-1], plain[-1], strict=True))
        assert [pair for pair in pairs if differ(*pair)] == []


def differ(found: Any, expected: Any) -> bool:
    """Whether a metric says something else, though only as precise as single precision is."""
    try:
        torch.testing.assert_close(found, expected, rtol=2e-6, atol=1e-9)
    except AssertionError:
        return True
    return False


class LogsMetrics(LanguageModule):
    """Calls metrics in steps and logs them: as they are, as values, as collections."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.train_all = classify().clone(prefix="train/")
        self.val_all = classify().clone(prefix="val/")
        accuracy = MulticlassAccuracy(num_classes=VOCABULARY, average="micro")
        self.stages = nn.ModuleDict({"fit": nn.ModuleDict({"accuracy": accuracy})})
        self.longest = torchmetrics.MaxMetric()
        self.tracker = torchmetrics.MetricTracker(torchmetrics.MeanMetric(), maximize=False)
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        logits, labels = output.logits.transpose(1, 2), batch["labels"]
        self.train_all(logits, labels)
        self.log_dict(self.train_all, on_step=False, on_epoch=True)
        accuracy = self.stages["fit"]["accuracy"]
        accuracy(logits, labels)
        self.log("accuracy", accuracy, on_step=True, on_epoch=True, metric_attribute="stages.fit.accuracy")
        self.longest(labels.max())
        self.log("longest", self.longest, on_step=False, on_epoch=True)
        return output.loss

    def on_validation_epoch_start(self) -> None:
        self.tracker.increment()

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        output = self.model(**batch)
        self.val_all.update(output.logits.transpose(1, 2), batch["labels"])
        self.tracker.update(batch["labels"].double().mean() * (1 + self.current_epoch))
        self.log_dict(self.val_all)

    def on_validation_epoch_end(self) -> None:
        self.notes.append(float(self.tracker.compute()))


def log_metrics(cell: Cell) -> list[Any]:
    return fit_and_test(cell, LogsMetrics)


@pytest.mark.contract(
    "Logging and metrics", "metrics and `MetricCollection`s that are logged as they are, by step and by epoch"
)
@CELLS
def test_logged_metrics_say_what_they_say_in_one_process(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, log_metrics)
    names = {name for seen in plain[:-2] for name in seen}
    assert {"train/f1", "accuracy_epoch", "accuracy_step", "longest", "val/f1"} <= names


class UpdatesInHooks(LanguageModule):
    """Updates metrics where every rank of a group does: in hooks of the module and of a callback, and in new ones."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.rows = torchmetrics.SumMetric()
        self.ids = torchmetrics.CatMetric()
        self.notes: list[Any] = []

    def validation_step(self, batch: Row, batch_idx: int) -> Any:
        self.model(**batch)
        return batch["input_ids"][:, 0]

    def on_validation_epoch_start(self) -> None:
        self.made_late = torchmetrics.SumMetric()
        self.rows.reset()
        self.ids.reset()

    def on_validation_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.rows.update(len(outputs))
        self.made_late.update(len(outputs))
        self.ids.update(outputs)

    def on_validation_epoch_end(self) -> None:
        self.log("rows", self.rows)
        self.notes.append((self.made_late.compute(), self.ids.compute().sort()[0]))


def update_in_hooks(cell: Cell) -> list[Any]:
    return fit_and_test(cell, UpdatesInHooks)


@pytest.mark.contract(
    "Logging and metrics",
    "metrics that hooks update, make or copy count each row once",
    reported="torchmetrics#3199",
)
@CELLS
def test_metrics_that_hooks_update_count_each_row_once(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, update_in_hooks)
    assert [float(rows) for rows, _ in plain[-1]] == [2 * cell.replicas * ROWS] * 2


class CallsAMaximum(LanguageModule):
    """Logs a metric for each step that is no mean over rows."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.longest = torchmetrics.MaxMetric()
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.longest(batch["input_ids"].max().double())
        self.log("longest", self.longest, on_step=True, on_epoch=True)
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        parts = torch.stack([part.max() for part in batch["input_ids"].split(2)]).double()
        self.notes.append((float(parts.mean()), float(self.trainer.callback_metrics["longest_step"])))

    def on_train_end(self) -> None:
        self.notes.append(float(self.trainer.callback_metrics["longest_epoch"]))


def call_a_maximum(cell: Cell) -> list[Any]:
    return fit_and_test(cell, CallsAMaximum)


@pytest.mark.contract(
    "Logging and metrics",
    "the value for one training step of a metric that is no mean over rows (F1, a maximum) is a mean over microbatches;"
    " its value for the epoch is that of one process",
    "differs",
)
def test_a_metric_says_a_mean_over_microbatches_for_a_training_step(world: World) -> None:
    (plain,) = world.run(call_a_maximum, CHIMERA.reference, size=1)
    for seen in world.run(call_a_maximum, CHIMERA, size=2):
        *steps, epoch = seen[-1]
        assert epoch == plain[-1][-1]
        assert [value for _, value in steps] == pytest.approx([mean for mean, _ in steps])
        assert [value for _, value in steps] != [value for _, value in plain[-1][:-1]]


class UpdatesEverywhere(LanguageModule):
    """Updates metrics before and behind the model call of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.before = MetricCollection({"rows": torchmetrics.SumMetric(), "ids": torchmetrics.CatMetric()})
        self.behind = MetricCollection({"rows": torchmetrics.SumMetric(), "max": torchmetrics.MaxMetric()})
        self.classes = classify()
        self.notes: list[Any] = []

    def measure(self, batch: Row) -> Any:
        ids = batch["input_ids"]
        self.before["rows"].update(len(ids))
        self.before["ids"](ids[:, 0].double())
        self.classes.update(ids, ids.flip(0))
        output = self.model(**batch)
        self.behind.update(ids.sum(1).double())
        return output.loss

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.measure(batch)

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.measure(batch)

    def close(self) -> None:
        values: dict[str, Any] = {"all": self.behind.compute(), "ids": self.before["ids"].compute().sort()[0]}
        self.notes.append({**values, "rows": self.before["rows"].compute()})
        for metrics in (self.before, self.behind, self.classes):
            metrics.reset()

    on_validation_epoch_start = on_validation_epoch_end = close


class HoldsMetrics(Callback):
    """Has metrics of its own."""

    def __init__(self) -> None:
        self.rows, self.first = torchmetrics.SumMetric(), torchmetrics.CatMetric()

    def update(self, trainer: L.Trainer, module: Any, outputs: Any, batch: Row, *_: Any) -> None:
        self.rows.update(len(batch["input_ids"]))
        self.first.update(batch["input_ids"][:, 0])

    on_train_batch_end = on_validation_batch_end = update

    def close(self, trainer: L.Trainer, module: Any) -> None:
        module.notes.append({"held": self.rows.compute(), "first": self.first.compute().sort()[0]})
        self.rows.reset()
        self.first.reset()

    on_validation_epoch_start = on_validation_epoch_end = close


def update_everywhere(cell: Cell) -> list[Any]:
    torch.manual_seed(0)
    module = UpdatesEverywhere()
    trainer = make_trainer(cell, max_epochs=2, precision="64-true", callbacks=[HoldsMetrics()])
    rows = make_rows("gpt2", 4 * cell.replicas * ROWS, padded=False)
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(rows[: len(rows) // 2], cell.batch_size))
    return module.notes


@pytest.mark.contract("Logging and metrics", "metrics that a step updates before it calls the model")
@pytest.mark.contract("Logging and metrics", "metrics that a callback holds and updates")
@pytest.mark.parametrize("cell", [CHIMERA, Cell("chimera", 4), REPLICAS], ids=str)
def test_metrics_count_each_row_once_wherever_they_are_updated_and_held(world: World, cell: Cell) -> None:
    (plain,) = world.run(update_everywhere, cell.reference, size=1)
    assert [float(note["rows"]) for note in plain if "rows" in note].count(4 * cell.replicas * ROWS) > 0
    for seen in world.run(update_everywhere, cell, size=cell.size):
        torch.testing.assert_close(seen, plain, rtol=2e-6, atol=1e-9)


class Wraps(LanguageModule):
    """Has wrappers: of several outputs in steps, of the last updates in evaluation steps and hooks."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.several = torchmetrics.MultioutputWrapper(torchmetrics.MeanSquaredError(), 2)
        self.last = torchmetrics.RunningMean(window=3)
        self.last_in_hooks = torchmetrics.RunningSum(window=2)
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        ids = batch["input_ids"][:, :4].double()
        self.several.update(ids[:, :2], ids[:, 2:])
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.model(**batch)
        self.last.update(batch["input_ids"].double().mean())

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.last_in_hooks.update(batch["input_ids"].sum().double())

    def on_train_epoch_end(self) -> None:
        self.notes.append((self.several.compute(), self.last.compute(), self.last_in_hooks.compute()))
        self.several.reset()


def wrap(cell: Cell) -> list[Any]:
    return fit_and_test(cell, Wraps)


@pytest.mark.contract("Logging and metrics", "`MultioutputWrapper` in steps; `Running` in evaluation steps and hooks")
@pytest.mark.parametrize("cell", [CHIMERA, pytest.param(REPLICAS, marks=pytest.mark.long)], ids=str)
def test_wrappers_measure_what_they_measure_in_one_process(world: World, cell: Cell) -> None:
    check_all(world, cell, wrap)


class RunsInSteps(LanguageModule):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.last = torchmetrics.RunningMean(window=5)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.last(loss.detach())
        return loss


def run_in_steps(cell: Cell) -> list[Any]:
    return fit_and_test(cell, RunsInSteps)


@pytest.mark.contract(
    "Logging and metrics",
    "`Running` metrics in a training step, whose windows would be of microbatches: update them in `on_train_batch_end`",
    "refused",
)
def test_windows_over_microbatches_are_refused(world: World) -> None:
    with pytest.raises(RankFailed, match=r"updates a RunningMean, whose window of 5.*on_train_batch_end"):
        world.run(run_in_steps, CHIMERA, size=2)
