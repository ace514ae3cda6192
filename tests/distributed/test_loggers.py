"""Loggers, bars, summaries and profilers say of a pipeline what they say of one process."""

import csv
import re
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as stock
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.loggers.logger import rank_zero_experiment
from lightning.pytorch.profilers import AdvancedProfiler, PyTorchProfiler, SimpleProfiler
from lightning_utilities.core.rank_zero import rank_zero_only

from lightning_chimera import ChimeraStrategy

from .fidelity import SILENT, Cell, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2, microbatches=2)
PIPE = Cell("1f1b", 2, microbatches=2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=2)
BATCHES = 4


class Module(LanguageModule):
    """Has momentum and a learning rate that changes, and logs in several ways."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("bar", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2), "interval": "step"}]


def size_of(cell: Cell) -> int:
    """Number of processes."""
    return 1 if cell.schedule == "plain" else cell.size


def fit(cell: Cell, module: L.LightningModule | None = None, **options: Any) -> tuple[L.Trainer, L.LightningModule]:
    torch.manual_seed(0)
    module = (module or Module()).double()
    trainer = make_trainer(cell, **{"precision": "64-true", "max_epochs": 1, "log_every_n_steps": 1, **options})
    rows = make_rows("gpt2", BATCHES * ROWS * cell.replicas)
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(rows[:ROWS], ROWS // cell.replicas))
    return trainer, module


# -------------------------------------------------------------------------------------------------------------- loggers


class Writer:
    """The experiment of a logger, as TensorBoard's."""

    def __init__(self) -> None:
        self.scalars: list[tuple[str, float, int]] = []

    def add_scalar(self, name: str, value: Any, step: int) -> None:
        self.scalars.append((name, float(value), step))


class Diary(Logger):
    """Keeps what it is told, as a logger of one's own does: on global rank 0."""

    name, version = "diary", 0

    def __init__(self) -> None:
        super().__init__()
        self._writer = Writer()
        self.metrics: list[dict[str, Any]] = []
        self.hparams: Any = None
        self.graphs: list[Any] = []
        self.watched: list[int] = []

    @property
    @rank_zero_experiment
    def experiment(self) -> Writer:
        return self._writer

    @rank_zero_only
    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.metrics.append({**metrics, "step": step})

    @rank_zero_only
    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        self.hparams = dict(params)

    @rank_zero_only
    def log_graph(self, model: Any, input_array: Any = None) -> None:
        if model.example_input_array is not None:
            self.graphs.append(model(model.example_input_array).shape)

    def watch(self, module: torch.nn.Module) -> None:
        """Looks at gradients as they are made, as W&B does."""
        for parameter in module.parameters():
            if parameter.requires_grad:
                parameter.register_hook(lambda gradient: self.watched.append(gradient.numel()))


class UsesTheExperiment(Module):
    """Writes past ``self.log``."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = torch.ones(1, 4, dtype=torch.long)

    def forward(self, ids: Any) -> Any:
        return self.model(ids).logits

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.logger.experiment.add_scalar("step", loss, self.global_step)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.logger.experiment.add_scalar("hook", outputs["loss"], self.global_step)


def keep_a_diary(cell: Cell) -> Any:
    torch.manual_seed(0)
    diary, module = Diary(), UsesTheExperiment()
    diary.watch(module)
    fit(cell, module, logger=diary, callbacks=[stock.LearningRateMonitor("step", log_momentum=True)])
    return diary.metrics, diary.hparams, diary.graphs, diary._writer.scalars, len(diary.watched)


@pytest.mark.contract("Loggers and profilers", "a logger gets each value once, on global rank 0, with the same steps")
@pytest.mark.contract("Loggers and profilers", "hyperparameters and the graph of the whole model are logged once")
@pytest.mark.contract("Callbacks", "`LearningRateMonitor` logs what it logs in one process")
@pytest.mark.contract(
    "Loggers and profilers",
    "`self.logger.experiment` in a training step is written to for every microbatch that ends on global rank 0: all for"
    " 1F1B and GPipe, half for Chimera; in other hooks once, as in one process",
    "differs",
)
@pytest.mark.contract(
    "Loggers and profilers",
    "a logger that watches gradients (`WandbLogger.watch`) sees those of each microbatch, of the stages on its rank",
    "differs",
)
@pytest.mark.parametrize(("cell", "writes"), [(PIPE, 2), (CHIMERA, 1), (REPLICAS, 2)], ids=["1f1b", "chimera", "W2"])
def test_a_logger_is_told_the_same_once(world: World, cell: Cell, writes: int) -> None:
    (plain,) = world.run(keep_a_diary, cell.reference, size=1)
    first, *others = world.run(keep_a_diary, cell, size=cell.size)
    metrics, hparams, graphs, scalars, watched = first
    torch.testing.assert_close(metrics, plain[0], rtol=1e-6, atol=1e-10)
    assert (hparams, graphs) == (plain[1], plain[2])
    assert hparams
    assert len(graphs) == 1
    hooks = [[entry[1:] for entry in one if entry[0] == "hook"] for one in (scalars, plain[3])]
    torch.testing.assert_close(*hooks, rtol=1e-10, atol=0.0)
    assert len(scalars) - len(hooks[0]) == writes * BATCHES
    assert watched > 0
    for other in others:
        assert other[:4] == ([], None, [], [])


def write_files(cell: Cell, folder: str) -> None:
    fit(cell, logger=CSVLogger(folder, cell.schedule, version=0), max_epochs=2)


@pytest.mark.contract("Loggers and profilers", "`CSVLogger` writes the file of one process, once")
@pytest.mark.parametrize("cell", [PIPE, pytest.param(REPLICAS, marks=pytest.mark.long)], ids=str)
def test_a_file_of_metrics_is_that_of_one_process(world: World, tmp_path: Path, cell: Cell) -> None:
    world.run(write_files, cell.reference, str(tmp_path), size=1)
    world.run(write_files, cell, str(tmp_path), size=cell.size)
    plain, piped = (
        list(csv.DictReader((tmp_path / name / "version_0" / "metrics.csv").open()))
        for name in ("plain", cell.schedule)
    )
    assert len(plain) == 2 * (BATCHES + 2)
    for mine, theirs in zip(piped, plain, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name] == value or float(mine[name]) == pytest.approx(float(value), rel=1e-5)


# --------------------------------------------------------------------------------------------------- bars and summaries


def look(cell: Cell, name: str) -> None:
    """Prints what people look at."""
    torch.manual_seed(0)
    options: dict[str, Any] = {
        "rich": {"callbacks": [stock.RichModelSummary(), stock.RichProgressBar()]},
        "tqdm": {"callbacks": [stock.ModelSummary(max_depth=3), stock.TQDMProgressBar()]},
    }[name]
    shown = {"enable_progress_bar": True, "enable_model_summary": True}
    module = Module().double()
    for parameter in module.model.transformer.h[0].parameters():
        parameter.requires_grad_(False)
    if cell.schedule != "plain":
        strategy = ChimeraStrategy(cell.schedule, num_stages=cell.stages, num_microbatches=cell.microbatches)
        shown |= {"strategy": strategy, "devices": cell.size}
    else:
        shown["devices"] = 1
    trainer = L.Trainer(**{**SILENT, **shown, **options, "precision": "64-true", "max_epochs": 1})
    rows = make_rows("gpt2", BATCHES * ROWS * cell.replicas)
    trainer.fit(module, make_loader(rows, cell.batch_size))
    print(f"total {trainer.num_training_batches}")  # noqa: T201
    raise SystemExit(3)


def screens(world: World, cell: Cell, name: str) -> list[str]:
    """What the ranks print."""
    with pytest.raises(RankFailed) as caught:
        world.run(look, cell, name, size=size_of(cell), env={"COLUMNS": "200"})
    return [re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text) for text in caught.value.outputs]


def summary(text: str) -> list[str]:
    """The lines of a model summary: layers and counts."""
    words = ("params", "Modules in", "FLOPs", "GPT2", "Embedding", "ModuleList", "Linear", "LayerNorm", "Dropout")
    lines = [re.sub(r"[^\w.:,() ]", "", line) for line in text.splitlines() if any(word in line for word in words)]
    return [" ".join(line.split()) for line in lines if "global rank" not in line]


@pytest.mark.contract(
    "Callbacks",
    "`ModelSummary` and `RichModelSummary` count the whole model, each parameter once, whatever D and W are",
)
@pytest.mark.contract(
    "Callbacks", "`TQDMProgressBar` and `RichProgressBar` show one process's batches and metrics, once"
)
@pytest.mark.parametrize(("cell", "name"), [(PIPE, "rich"), (REPLICAS, "tqdm")], ids=["rich", "tqdm"])
def test_what_is_printed_is_that_of_one_process(world: World, cell: Cell, name: str) -> None:
    (plain,) = screens(world, cell.reference, name)
    first, *others = screens(world, cell, name)
    assert len(summary(plain)) > 5
    assert summary(first) == summary(plain)
    last = [
        re.findall(rf"{BATCHES}/{BATCHES}.*?bar_epoch: *([\d.]+)", text.replace("=", ": "), re.S)
        for text in (first, plain)
    ]
    assert last[0]
    assert last[0][-1] == last[1][-1]
    assert first.count("2 stages") == 1
    for text in others:
        assert not summary(text)
        assert "stages" not in text
        assert "bar" not in text


# ------------------------------------------------------------------------------------------------- speeds and profilers


class Counts(CPUAccelerator):
    """A user's own accelerator, which has a number to tell."""

    def get_device_stats(self, device: Any) -> dict[str, Any]:
        return {"load": 0.5}


class Counted(Module):
    flops_per_batch = 1000


def measure(cell: Cell) -> Any:
    """The names and the steady numbers of what monitors log."""
    diary = Diary()
    monitor = stock.ThroughputMonitor(
        lambda batch: len(batch["labels"]), lambda batch: batch["labels"].numel(), window_size=2
    )
    fit(cell, Counted(), logger=diary, callbacks=[monitor], max_epochs=2)
    return diary.metrics


RATES = ("batches_per_sec", "samples_per_sec", "items_per_sec")


@pytest.mark.contract("Callbacks", "`ThroughputMonitor` counts the samples, tokens and FLOPs of the whole run")
@pytest.mark.contract(
    "Callbacks", "`device/...` of `ThroughputMonitor` is one pipeline group's, not one rank's", "differs"
)
def test_throughput_is_that_of_all_replicas_and_not_of_all_ranks(world: World) -> None:
    (plain,) = world.run(measure, PIPE.reference, size=1)
    piped, *others = world.run(measure, PIPE, size=2)
    assert [set(entry) for entry in piped] == [set(entry) for entry in plain]
    last = [[entry for entry in one if "train/samples" in entry][-1] for one in (piped, plain)]
    assert last[0]["train/samples"] == last[1]["train/samples"] == 2 * BATCHES * ROWS
    assert not any(others)
    replicated = [one for one in world.run(measure, REPLICAS, size=4)[0] if "train/samples_per_sec" in one]
    assert len(replicated) == 2 * BATCHES - 1
    for entry in replicated:
        for name in (*RATES, "flops_per_sec"):
            assert entry[f"train/{name}"] == pytest.approx(2 * entry[f"train/device/{name}"])


def read_devices(cell: Cell) -> Any:
    diary = Diary()
    fit(cell, logger=diary, callbacks=[stock.DeviceStatsMonitor(cpu_stats=True)], accelerator=Counts())
    return [entry for entry in diary.metrics if any("DeviceStatsMonitor" in name for name in entry)]


@pytest.mark.contract("Callbacks", "`DeviceStatsMonitor` logs global rank 0's device")
def test_devices_are_monitored_as_in_one_process(world: World) -> None:
    (plain,) = world.run(read_devices, PIPE.reference, size=1)
    first, second = world.run(read_devices, PIPE, size=2)
    assert first == plain
    assert len(plain) >= 2 * BATCHES
    assert not second


def profile(cell: Cell, name: str, folder: str) -> dict[str, int]:
    """How often each hook is profiled."""
    made = {
        "simple": SimpleProfiler(folder, "simple", extended=True),
        "advanced": AdvancedProfiler(folder, "advanced"),
        "pytorch": PyTorchProfiler(folder, "pytorch"),
    }
    trainer, _ = fit(cell, profiler=made[name])
    profiler = trainer.profiler
    if isinstance(profiler, SimpleProfiler):
        return {key: len(times) for key, times in profiler.recorded_durations.items() if "Strategy" not in key}
    return {}


@pytest.mark.contract("Loggers and profilers", "`SimpleProfiler`, `AdvancedProfiler`: a file per rank, each hook once")
@pytest.mark.contract("Loggers and profilers", "`PyTorchProfiler` records every rank's stages, a file per rank")
@pytest.mark.parametrize("name", ["simple", "advanced", "pytorch"])
def test_a_profiler_records_each_rank(world: World, tmp_path: Path, name: str) -> None:
    (plain,) = world.run(profile, PIPE.reference, name, str(tmp_path / "plain"), size=1)
    for piped in world.run(profile, PIPE, name, str(tmp_path / "piped"), size=2):
        assert piped == plain
    texts = {path.name: path.read_text() for path in (tmp_path / "piped").glob("*.txt")}
    assert set(texts) == {f"fit-{name}-{rank}.txt" for rank in range(2)}
    for text in texts.values():
        assert "training_step" in text
    if name == "pytorch":
        assert len(list((tmp_path / "piped").glob("*.json"))) >= 2
