"""What hooks and steps log, and what metrics measure, is on every rank what one process would have said."""

import contextlib
import functools
import io
from collections.abc import Callable
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor, nn
from torchmetrics import MetricCollection
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassF1Score,
    MulticlassPrecision,
    MulticlassRecall,
)

from .fidelity import SILENT, Cell, make_trainer
from .users import ROWS, VOCABULARY, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
CELLS = pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)


class History(Callback):
    """Notes all values after every batch and every epoch."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def note(self, trainer: L.Trainer, *_: Any) -> None:
        for metrics in (trainer.callback_metrics, trainer.logged_metrics, trainer.progress_bar_metrics):
            self.seen.append({name: torch.as_tensor(value).tolist() for name, value in sorted(metrics.items())})

    on_train_batch_end = on_validation_batch_end = on_train_epoch_end = on_validation_end = on_test_end = note
    on_train_end = note


def fit_and_test(cell: Cell, make: Callable[[], L.LightningModule], **options: Any) -> list[Any]:
    """What was logged in a fit of two epochs with validation, and in a test."""
    torch.manual_seed(0)
    module, history = make(), History()
    trainer = make_trainer(cell, max_epochs=2, precision="64-true", callbacks=[history], **options)
    train = make_rows("gpt2", 4 * cell.replicas * ROWS, padded=False)
    evaluation = make_rows("gpt2", 2 * cell.replicas * ROWS, padded=False, seed=1)
    loaders = make_loader(train, cell.batch_size), make_loader(evaluation, cell.batch_size)
    trainer.fit(module, *loaders)
    found = trainer.test(module, loaders[1], verbose=False)
    return [*history.seen, found, getattr(module, "notes", None)]


def check_all(world: World, cell: Cell, function: Any, *args: Any) -> Any:
    """Checks what every rank says against a plain run, and returns that."""
    (plain,) = world.run(function, cell.reference, *args, size=1)
    for seen in world.run(function, cell, *args, size=cell.size):
        torch.testing.assert_close(seen, plain, rtol=2e-6, atol=1e-9)  # Lightning logs in single precision
    return plain


# -------------------------------------------------------------------------------------------------------- every hook

INSIDE = ("training_step", "validation_step", "test_step", "backward")
"""What runs while each rank is in its own part of the pipeline."""
HOOKS = {name: rule for name, rule in _FxValidator.functions.items() if rule is not None and name not in INSIDE}


def logging_hook(name: str, rule: Any) -> Any:
    """A hook that logs in the ways that Lightning allows it to."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[-1] if isinstance(self, Callback) and isinstance(args[-1], L.LightningModule) else self
        module = getattr(module, "module", module)
        who = "callback" if isinstance(self, Callback) else "module"
        module.count = getattr(module, "count", 0) + 1
        for on_step in (True, False):
            for on_epoch in (True, False):
                if (
                    on_step in rule["allowed_on_step"]
                    and on_epoch in rule["allowed_on_epoch"]
                    and (on_step or on_epoch)
                ):
                    key = f"{who}/{name}/{on_step:d}{on_epoch:d}"
                    module.log(key, float(module.count), on_step=on_step, on_epoch=on_epoch, prog_bar=on_step)
                    module.log(f"{key}/all", module.count, on_step=on_step, on_epoch=on_epoch, sync_dist=True)
        return getattr(super(type(self), self), name)(*args, **kwargs) if who == "module" else None

    return hook


def log_in_every_hook(cell: Cell, folder: str) -> list[Any]:
    torch.manual_seed(0)
    hooks = {name: logging_hook(name, rule) for name, rule in HOOKS.items()}
    module = type("Logs", (LanguageModule,), {n: h for n, h in hooks.items() if hasattr(LanguageModule, n)})(blocks=2)
    callback: Any = type("LogsToo", (Callback,), {n: h for n, h in hooks.items() if hasattr(Callback, n)})()
    callback.module = module
    history = History()
    logger = CSVLogger(folder, name=cell.schedule)
    trainer = make_trainer(
        cell, max_epochs=2, accumulate_grad_batches=2, callbacks=[callback, history], logger=logger, log_every_n_steps=1
    )
    rows = make_rows("gpt2", 4 * cell.replicas * ROWS, padded=False)
    loader = make_loader(rows, cell.batch_size)
    trainer.fit(module, loader, loader)
    return [*history.seen, trainer.test(module, loader, verbose=False)]


@pytest.mark.contract("Logging and metrics", "`self.log` in every hook of the module and of callbacks that may log")
@CELLS
def test_every_hook_may_log(world: World, cell: Cell, tmp_path: Any) -> None:
    (plain,) = world.run(log_in_every_hook, cell.reference, str(tmp_path), size=1)
    assert len({name.split("/")[1] for seen in plain[:-1] for name in seen if "/" in name}) > 12
    for seen in world.run(log_in_every_hook, cell, str(tmp_path), size=cell.size):
        torch.testing.assert_close(seen, plain, rtol=2e-6, atol=1e-9)
    tables = [tmp_path / name / "version_0" / "metrics.csv" for name in (cell.schedule, "plain")]
    assert len(tables[0].read_text().splitlines()) == len(tables[1].read_text().splitlines()) > 5


# ------------------------------------------------------------------------------------------------- every kind of value


def largest(values: Any) -> Any:
    return torch.as_tensor(values).max()


class LogsEverything(LanguageModule):
    """Logs all kinds of values, reduced in all ways, in a step."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.inner = Inner()

    def log_all(self, stage: str, output: Any, batch: Row) -> None:
        loss, rows = output.loss, len(batch["input_ids"])
        for on_step, on_epoch in ((True, False), (False, True), (True, True)):
            when: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch}
            key = f"{stage}{on_step:d}{on_epoch:d}"
            for fx in ("mean", "avg", torch.mean):
                self.log(f"{key}/{fx if isinstance(fx, str) else 'torch'}", loss, reduce_fx=fx, **when)
            self.log(f"{key}/sum", batch["input_ids"].sum(), reduce_fx="sum", **when)
            self.log(f"{key}/sum_of_rows", rows, reduce_fx=torch.sum, **when)
            self.log(f"{key}/min", batch["input_ids"].sum(1).min(), reduce_fx="min", **when)
            self.log(f"{key}/max", batch["input_ids"].sum(1).max(), reduce_fx=max, **when)
            self.log(f"{key}/amax", batch["input_ids"].sum(1).max(), reduce_fx=torch.max, **when)
            self.log(f"{key}/amin", batch["input_ids"].sum(1).min(), reduce_fx=torch.min, **when)
            self.log(f"{key}/sync", loss, sync_dist=True, prog_bar=True, **when)
            self.log(f"{key}/size", loss, batch_size=rows, **when)
            self.log(f"{key}/silent", loss, logger=False, **when)
            self.log(f"{key}/whole", 3, **when)
            self.log(f"{key}/true", True, **when)
            self.log(f"{key}/one_element", loss.reshape(1), **when)
            self.log(f"{key}/nested", {"a": loss, "b": {"c": 2 * loss}}["b"]["c"], **when)
        self.log_dict({f"{stage}/first": loss, f"{stage}/second": 2.0}, prog_bar=True)
        self.inner(self, stage, loss)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log_all("train", output, batch)
        return output.loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.log_all("val", self.model(**batch), batch)

    def test_step(self, batch: Row, batch_idx: int) -> None:
        self.log_all("test", self.model(**batch), batch)


class Inner(nn.Module):
    """A part that logs through the module."""

    def forward(self, module: L.LightningModule, stage: str, loss: Tensor) -> None:
        module.log(f"{stage}/inner", loss.detach())


def log_everything(cell: Cell) -> list[Any]:
    return fit_and_test(cell, LogsEverything)


@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` and `log_dict` in steps: any number, any `reduce_fx` by name or"
    " function, `on_step`, `on_epoch`, `sync_dist`, `batch_size`, `logger`, `prog_bar`",
)
@CELLS
def test_a_step_may_log_everything_in_every_way(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, log_everything)
    assert max(len(seen) for seen in plain[:-2]) > 80


# --------------------------------------------------------------------------------------------------------- torchmetrics


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


# ---------------------------------------------------------------------------------------------------------- collectives


class Meets(Callback):
    """Notes what the collectives of Lightning give in hooks."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def meet(self, trainer: L.Trainer, module: L.LightningModule, replica: int) -> dict[str, Any]:
        strategy, one = trainer.strategy, torch.tensor(1.0 + replica)
        strategy.barrier()
        return {
            "scalar": module.all_gather(one),
            "tensor": module.all_gather(one * torch.arange(3)),
            "tree": module.all_gather({"a": one, "b": [2 * one, 3.0 + replica]}),
            "ints": module.all_gather(torch.tensor([7 + replica])),
            "mean": strategy.reduce(one.clone(), reduce_op="mean"),
            "sum": strategy.reduce(one.clone(), reduce_op="sum"),
            "max": strategy.reduce(one.clone(), reduce_op=torch.distributed.ReduceOp.MAX),
            "broadcast": strategy.broadcast({"global rank": trainer.global_rank}),
            "all": strategy.reduce_boolean_decision(replica == 0),
            "any": strategy.reduce_boolean_decision(replica == 0, all=False),
        }

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        replica = (trainer.strategy.distributed_sampler_kwargs or {"rank": 0})["rank"] if trainer.world_size > 1 else 0
        self.notes = self.meet(trainer, module, replica)


def meet(cell: Cell) -> dict[str, Any]:
    torch.manual_seed(0)
    meets = Meets()
    rows = make_rows("gpt2", cell.replicas * ROWS)
    trainer = make_trainer(cell, max_epochs=1, callbacks=[meets])
    trainer.fit(LanguageModule(blocks=2), make_loader(rows, cell.batch_size))
    return meets.notes


def meet_in_ddp(replicas: int) -> dict[str, Any]:
    """The same with DDP, over a process for each replica."""
    torch.manual_seed(0)
    meets = Meets()
    options: dict[str, Any] = {**SILENT, "max_epochs": 1, "callbacks": [meets]}
    trainer = L.Trainer(devices=replicas, strategy="ddp", **options)
    trainer.fit(LanguageModule(blocks=2), make_loader(make_rows("gpt2", replicas * ROWS)))
    return meets.notes


@pytest.mark.contract(
    "Logging and metrics",
    "`self.all_gather`, `strategy.reduce`, `broadcast` and `barrier` in hooks: over the replicas, as in DDP over as"
    " many processes, whatever the number of stages",
)
def test_collectives_in_hooks_go_over_the_replicas_as_in_ddp(world: World) -> None:
    expected = world.run(meet_in_ddp, 2, size=2)
    assert expected[0]["tensor"].shape == (2, 3)
    for rank, seen in enumerate(world.run(meet, REPLICAS, size=4)):
        torch.testing.assert_close(seen, expected[rank // 2], rtol=0.0, atol=0.0)


@pytest.mark.contract(
    "Logging and metrics", "`self.all_gather` and `strategy.reduce` without replicas give the value as in one process"
)
def test_collectives_in_hooks_of_one_replica_give_the_value(world: World) -> None:
    (plain,) = world.run(meet, CHIMERA.reference, size=1)
    for seen in world.run(meet, CHIMERA, size=2):
        torch.testing.assert_close(seen, plain, rtol=0.0, atol=0.0)


class GivesAGroup(LanguageModule):
    """Reduces over a group of ranks, in a step or in a hook."""

    def __init__(self, where: str) -> None:
        super().__init__(blocks=2)
        self.where = where

    def share(self, where: str) -> None:
        if where == self.where:
            self.log("shared", 1.0, sync_dist=True, sync_dist_group=self.group)

    def on_fit_start(self) -> None:
        self.group: Any = torch.distributed.new_group([0])

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.share("step")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.share("hook")


def give_a_group(cell: Cell, where: str) -> list[Any]:
    return fit_and_test(cell, functools.partial(GivesAGroup, where))


@pytest.mark.contract(
    "Logging and metrics", "`sync_dist_group` of `self.log`, and groups of ranks for `strategy.reduce`", "refused"
)
@pytest.mark.parametrize(("cell", "where"), [(CHIMERA, "step"), (REPLICAS, "hook")], ids=str)
def test_groups_of_ranks_are_refused(world: World, cell: Cell, where: str) -> None:
    with pytest.raises(RankFailed, match=r"sync_dist_group.*leave the group out"):
        world.run(give_a_group, cell, where, size=cell.size)


# ------------------------------------------------------------------------------------------------ on global rank 0 only


class SpeaksOnce(LanguageModule):
    """Logs and prints on global rank 0 only, in steps and in hooks."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("in_step", loss, rank_zero_only=True)
        if self.trainer.is_global_zero:
            self.log("guarded_rows", len(batch["input_ids"]), reduce_fx="sum")
            self.log("guarded", 5.0)
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.print("in validation")

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.print("in hook")
        if self.trainer.is_global_zero:
            self.log("guarded_in_hook", 1.0 + batch_idx, on_step=True, on_epoch=True, rank_zero_only=True)
        self.notes.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})

    def on_train_end(self) -> None:
        self.notes.append(sorted(self.trainer.callback_metrics))


def speak_once(cell: Cell) -> tuple[list[Any], str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = fit_and_test(cell, SpeaksOnce, log_every_n_steps=1)
    return found[-1], "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("in "))


@pytest.mark.contract("Logging and metrics", "`rank_zero_only=True` in `self.log`, in steps and hooks")
@pytest.mark.contract("Logging and metrics", "`self.print` in hooks and evaluation steps prints once")
@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` in a training step under `if self.trainer.is_global_zero` says what the microbatches whose last stage"
    " is on global rank 0 say: half of them with Chimera, those of the first replica with replicas; on every rank",
    "differs",
)
@CELLS
def test_what_only_global_rank_zero_says_is_said_once_and_nobody_waits(world: World, cell: Cell) -> None:
    ((plain, printed),) = world.run(speak_once, cell.reference, size=1)
    ranks = world.run(speak_once, cell, size=cell.size)
    assert [said for _, said in ranks] == [printed, *[""] * (cell.size - 1)]
    for rank, (notes, _) in enumerate(ranks):
        for seen, other in zip(notes[:-1], plain[:-1], strict=True):
            own = {name: value for name, value in other.items() if rank == 0 or "hook" not in name}
            assert seen.pop("guarded_rows") == own.pop("guarded_rows") / 2
            torch.testing.assert_close(seen, own, rtol=2e-6, atol=1e-9)
        assert {name for name in notes[-1] if "hook" not in name} == {name for name in plain[-1] if "hook" not in name}


class Skips(LanguageModule):
    """Returns nothing from some step, on all ranks or on those of one replica."""

    def __init__(self, replica: int | None) -> None:
        super().__init__(blocks=2)
        self.replica = replica

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        mine = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        return None if batch_idx == 1 and self.replica in (None, mine) else loss


def skip(cell: Cell, replica: int | None) -> list[Any]:
    return fit_and_test(cell, functools.partial(Skips, replica))


@pytest.mark.contract(
    "Loss", "`training_step` that returns `None`, on all ranks or on those of one replica only", "refused"
)
@pytest.mark.parametrize(
    ("cell", "replica"), [pytest.param(CHIMERA, None, marks=pytest.mark.long), (REPLICAS, 1)], ids=["all", "one"]
)
def test_a_step_that_returns_nothing_is_refused_and_nobody_waits(world: World, cell: Cell, replica: int | None) -> None:
    with pytest.raises(RankFailed, match=r"training_step returned NoneType without a loss.*must return the loss"):
        world.run(skip, cell, replica, size=cell.size, limit=20.0)


class ShowsItsLoss(LanguageModule):
    """Notes its loss as hooks are handed it, beside what it logs to the bar."""

    def __init__(self) -> None:
        super().__init__(blocks=2, lr=0.1)
        self.notes: list[float] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append(float(outputs["loss"]))


def show_the_loss(cell: Cell) -> list[Any]:
    return fit_and_test(cell, ShowsItsLoss, accumulate_grad_batches=cell.accumulate, log_every_n_steps=1)


@pytest.mark.contract(
    "Loss",
    "the train loss in the log, the bar and `on_train_batch_end` is the batch's, whatever `accumulate_grad_batches` and"
    " the number of microbatches",
)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("chimera", 2, microbatches=8, accumulate=3),
        pytest.param(Cell("1f1b", 2, microbatches=1, accumulate=3), marks=pytest.mark.long),
        pytest.param(Cell("gpipe", 2, microbatches=4, accumulate=1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_loss_that_is_shown_is_the_batchs(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, show_the_loss)
    assert len(plain[-1]) == 8


class SyncsInSteps(LanguageModule):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.best = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric(dist_sync_on_step=True))


def sync_in_steps(cell: Cell) -> list[Any]:
    return fit_and_test(cell, SyncsInSteps)


@pytest.mark.contract(
    "Logging and metrics", "metrics with `dist_sync_on_step=True`: leave it out, values are of all ranks", "refused"
)
def test_metrics_that_sync_in_steps_are_refused_at_set_up(world: World) -> None:
    with pytest.raises(RankFailed, match=r"best\._base_metric.*MeanMetric.*dist_sync_on_step=True.*leave it out"):
        world.run(sync_in_steps, CHIMERA, size=2)


class LogsInBackward(LanguageModule):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.log("scaled", loss.detach())
        super().backward(loss, *args, **kwargs)


def log_in_backward(cell: Cell) -> list[Any]:
    return fit_and_test(cell, LogsInBackward)


@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` in a module's own `backward`, which runs once for each microbatch: log in `on_after_backward`",
    "refused",
)
def test_logging_in_backward_is_refused(world: World) -> None:
    with pytest.raises(RankFailed, match=r"self\.log was called in the backward.*on_after_backward"):
        world.run(log_in_backward, CHIMERA, size=2)
