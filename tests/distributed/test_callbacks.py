"""Lightning's own callbacks do what they do in one process, or are refused."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import callbacks as stock
from lightning.pytorch.callbacks.spike import SpikeDetection
from lightning.pytorch.tuner import Tuner
from torch import Tensor

from .fidelity import Cell, label, make_trainer, snapshot
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

PIPE = Cell("1f1b", 2, microbatches=2)
CHIMERA = Cell("chimera", 4)
"""With two ranks, each would hold the whole model."""
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=2)
BATCHES = 3
"""Batches of an epoch."""


class Watched(LanguageModule):
    """Follows the losses of validations as well, by callbacks too."""

    def __init__(self, **options: Any) -> None:
        super().__init__(lr=0.1, **options)
        self.valued: list[float] = []

    def on_validation_epoch_end(self) -> None:
        self.valued.append(float(self.trainer.callback_metrics["val_loss"]))


@dataclasses.dataclass
class Seen:
    """What a rank saw of a run with a callback.

    Attributes:
        after: The parameters at the end.
        steps: Optimizer steps.
        epochs: Epochs.
        valued: The loss of each validation.
        notes: What the test asked for.
    """

    after: dict[str, Tensor]
    steps: int
    epochs: int
    valued: list[float]
    notes: Any


def run(cell: Cell, make: Callable[..., Any], note: Callable[..., Any] | None, folder: str, options: Any) -> Seen:
    """Fits with callbacks that ``make(folder)`` gives."""
    torch.manual_seed(0)
    module = Watched().double()
    callbacks = make(f"{folder}/{cell.schedule}")
    fit = {"ckpt_path": options.pop("ckpt_path", "").format(cell.schedule) or None}
    trainer = make_trainer(
        cell,
        **{
            "precision": "64-true",
            "max_epochs": 3,
            "callbacks": callbacks,
            "enable_checkpointing": any(isinstance(one, stock.Checkpoint) for one in callbacks),
            "default_root_dir": f"{folder}/{cell.schedule}",
            **options,
        },
    )
    rows = make_rows("gpt2", BATCHES * ROWS * cell.replicas)
    trainer.fit(module, make_loader(rows, cell.batch_size), make_loader(rows[:ROWS], ROWS // cell.replicas), **fit)
    notes = None if note is None else note(trainer, module, *callbacks)
    return Seen(snapshot(module), trainer.global_step, trainer.current_epoch, module.valued, notes)


def same(
    world: World, cell: Cell, make: Callable[..., Any], note: Callable[..., Any] | None, folder: Path, **options: Any
) -> Seen:
    """Checks that a run with callbacks is the plain run, on every rank.

    Returns:
        The plain run.
    """
    (plain,) = world.run(run, cell.reference, make, note, str(folder), options, size=1)
    for seen in world.run(run, cell, make, note, str(folder), options, size=cell.size):
        assert (seen.steps, seen.epochs) == (plain.steps, plain.epochs)
        torch.testing.assert_close(seen.valued, plain.valued, rtol=1e-6, atol=0.0)
        torch.testing.assert_close(seen.after, plain.after, rtol=1e-10, atol=1e-12)
        assert len(plain.after) > 0
        if isinstance(plain.notes, str):
            assert seen.notes.replace(f"{folder}/{cell.schedule}", f"{folder}/plain") == plain.notes
        else:
            torch.testing.assert_close(seen.notes, plain.notes, rtol=1e-6, atol=1e-12)
    return plain


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


# ---------------------------------------------------------------------------------------------------- averaged weights


class EveryOther(stock.WeightAveraging):
    def should_update(self, step_idx: int | None = None, epoch_idx: int | None = None) -> bool:
        return step_idx is not None and step_idx % 2 == 0


def ema(folder: str) -> Any:
    return [stock.EMAWeightAveraging(decay=0.5), stock.ModelCheckpoint(folder, "last", save_top_k=-1)]


def averaging(folder: str) -> Any:
    return [EveryOther(use_buffers=False), stock.ModelCheckpoint(folder, "last", save_top_k=-1)]


def swa(folder: str) -> Any:
    return [
        stock.StochasticWeightAveraging(0.05, swa_epoch_start=1, annealing_epochs=2),
        stock.ModelCheckpoint(folder, "last", save_top_k=-1),
    ]


AVERAGED = [
    pytest.param(
        ema,
        marks=pytest.mark.contract("Callbacks", "`EMAWeightAveraging` averages, validates, saves and resumes"),
    ),
    pytest.param(
        averaging,
        marks=pytest.mark.contract("Callbacks", "`WeightAveraging` averages, validates, saves and resumes"),
    ),
    pytest.param(
        swa, marks=pytest.mark.contract("Callbacks", "`StochasticWeightAveraging` averages, saves and resumes")
    ),
]


@pytest.mark.parametrize(
    "cell",
    [PIPE, pytest.param(REPLICAS, marks=pytest.mark.long), pytest.param(CHIMERA, marks=pytest.mark.long)],
    ids=str,
)
@pytest.mark.parametrize("make", AVERAGED)
def test_averaged_weights_are_those_of_one_process(world: World, tmp_path: Path, cell: Cell, make: Any) -> None:
    same(world, cell, make, None, tmp_path, max_epochs=2)
    mine, theirs = (load(tmp_path / name / "last.ckpt") for name in (cell.schedule, "plain"))
    assert list(mine) == list(theirs)
    for name in {"state_dict", "current_model_state", "averaging_state"} & theirs.keys():
        torch.testing.assert_close(mine[name], theirs[name], rtol=1e-10, atol=1e-12)
    averages = (one["callbacks"].get("StochasticWeightAveraging", {}) for one in (mine, theirs))
    torch.testing.assert_close(*(one.get("average_model_state", {}) for one in averages), rtol=1e-10, atol=1e-12)
    same(world, cell, make, None, tmp_path, max_epochs=4, ckpt_path=f"{tmp_path}/{{}}/last.ckpt")


# ---------------------------------------------------------------------------------------------------------- checkpoints


def top_two(folder: str) -> Any:
    return [stock.ModelCheckpoint(folder, "{epoch}-{val_loss:.3f}", monitor="val_loss", save_top_k=2, save_last=True)]


def every_two_steps(folder: str) -> Any:
    return [stock.ModelCheckpoint(folder, every_n_train_steps=2, save_top_k=-1, save_weights_only=True)]


def by_time(folder: str) -> Any:
    return [stock.ModelCheckpoint(folder, train_time_interval=timedelta(microseconds=1), save_top_k=-1)]


def paths(trainer: L.Trainer, module: Any, saver: Any, *_: Any) -> str:
    """What a checkpoint callback says of its files, and the files."""
    files = sorted(path.name for path in Path(saver.dirpath).iterdir())
    scores = {path: round(float(score), 5) for path, score in sorted(saver.best_k_models.items())}
    best = saver.best_model_score
    return str([files, saver.best_model_path, saver.last_model_path, scores, None if best is None else f"{best:.5f}"])


@pytest.mark.parametrize("cell", [REPLICAS, pytest.param(CHIMERA, marks=pytest.mark.long)], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        pytest.param(
            top_two,
            marks=pytest.mark.contract(
                "Callbacks",
                "`ModelCheckpoint` keeps the best k and the last, under the same names on every rank",
            ),
        ),
        pytest.param(
            every_two_steps,
            marks=pytest.mark.contract("Callbacks", "`ModelCheckpoint` saves every n steps, and weights only"),
        ),
        pytest.param(
            by_time, marks=pytest.mark.contract("Callbacks", "`ModelCheckpoint` saves at an interval of time")
        ),
    ],
)
def test_checkpoints_have_the_same_files_and_the_same_best_on_every_rank(
    world: World, tmp_path: Path, cell: Cell, make: Any
) -> None:
    plain = same(world, cell, make, paths, tmp_path)
    assert plain.notes.count(".ckpt") > 3


class FailsInAHook(Watched):
    """Raises on every rank, or on one."""

    ranks: tuple[int, ...] = (0, 1)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and self.trainer.global_rank in self.ranks:
            raise ArithmeticError("the loss is too high")


class FailsOnOneRank(FailsInAHook):
    ranks = (1,)


class FailsInTheStep(Watched):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1:
            raise ArithmeticError("the loss is too high")
        return loss


class OwnRescue(L.Callback):
    """A user's own."""

    def on_exception(self, trainer: L.Trainer, module: Any, exception: BaseException) -> None:
        trainer.save_checkpoint(f"{trainer.default_root_dir}/own.ckpt")


def fail(folder: str, module: type[L.LightningModule], callbacks: list[Any]) -> None:
    torch.manual_seed(0)
    options = {"callbacks": callbacks, "enable_checkpointing": True, "default_root_dir": folder, "max_epochs": 1}
    make_trainer(Cell("1f1b", 2), **options).fit(module(), make_loader(make_rows("gpt2", 3 * ROWS)))


SAVERS = [
    lambda folder: stock.ModelCheckpoint(folder, "model", save_on_exception=True),
    lambda folder: stock.OnExceptionCheckpoint(folder, "rescue"),
    lambda folder: OwnRescue(),
]


@pytest.mark.contract("Callbacks", "`save_on_exception` and `OnExceptionCheckpoint` save if every rank fails alike")
def test_an_error_on_every_rank_saves_a_checkpoint(world: World, tmp_path: Path) -> None:
    savers = [make(str(tmp_path)) for make in SAVERS]
    with pytest.raises(RankFailed, match=r"ArithmeticError: the loss is too high"):
        world.run(fail, str(tmp_path), FailsInAHook, savers, size=2)
    assert sorted(path.name for path in tmp_path.glob("*.ckpt")) == ["model.ckpt", "own.ckpt", "rescue.ckpt"]
    for path in tmp_path.glob("*.ckpt"):
        saved = load(path)
        assert saved["global_step"] == 2
        assert all(not value.is_meta for value in saved["state_dict"].values())
        assert len(saved["state_dict"]) == len(Watched().state_dict())


@pytest.mark.contract(
    "Callbacks",
    "an error on one rank only saves no checkpoint, since the others hold the rest of the model: a warning says so"
    " after 5 seconds",
    outcome="differs",
)
@pytest.mark.parametrize(
    ("module", "make"),
    [
        (FailsInTheStep, SAVERS[0]),
        pytest.param(FailsOnOneRank, SAVERS[1], marks=pytest.mark.long),
        (FailsOnOneRank, SAVERS[2]),
    ],
    ids=["ModelCheckpoint", "OnExceptionCheckpoint", "own"],
)
def test_an_error_on_one_rank_saves_nothing_and_hangs_nobody(
    world: World, tmp_path: Path, module: Any, make: Any
) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(fail, str(tmp_path), module, [make(str(tmp_path))], size=2, limit=25)
    assert "ArithmeticError: the loss is too high" in str(caught.value)
    assert "No checkpoint" in str(caught.value)
    assert not list(tmp_path.glob("*.ckpt"))


# ------------------------------------------------------------------------------------------------------------- the loop


def patience(folder: str) -> Any:
    return [stock.EarlyStopping("val_loss", min_delta=100.0, patience=1)]


def threshold(folder: str) -> Any:
    return [stock.EarlyStopping("train_loss", stopping_threshold=100.0, check_on_train_epoch_end=True)]


class Breaks(L.Callback):
    """Makes the weights infinite."""

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 2:
            for parameter in module.parameters():
                if not parameter.is_meta:
                    parameter.data.fill_(float("nan"))


def not_finite(folder: str) -> Any:
    return [stock.EarlyStopping("train_loss", check_finite=True, check_on_train_epoch_end=True, patience=9)]


def stopped(trainer: L.Trainer, module: Any, stopper: Any, *_: Any) -> Any:
    return [stopper.stopped_epoch, stopper.wait_count, float(stopper.best_score)]


@pytest.mark.contract("Callbacks", "`EarlyStopping` stops every rank after the same batch")
@pytest.mark.parametrize(("make", "epochs", "cell"), [(patience, 2, PIPE), (threshold, 1, REPLICAS)], ids=label)
def test_early_stopping_stops_all_ranks_alike(world: World, tmp_path: Path, make: Any, epochs: int, cell: Cell) -> None:
    assert same(world, cell, make, stopped, tmp_path).epochs == epochs


def diverge(cell: Cell, folder: str) -> Any:
    """Weights become NaN on every rank."""
    torch.manual_seed(0)
    trainer = make_trainer(cell, max_epochs=3, callbacks=[*not_finite(folder), Breaks()])
    trainer.fit(Watched(), make_loader(make_rows("gpt2", BATCHES * ROWS)))
    return trainer.global_step, trainer.current_epoch, trainer.callbacks[0].stopping_reason_message


@pytest.mark.contract("Callbacks", "`EarlyStopping(check_finite=True)` stops every rank at a loss that is NaN")
def test_a_loss_that_is_not_finite_stops_all_ranks(world: World, tmp_path: Path) -> None:
    (plain,) = world.run(diverge, PIPE.reference, str(tmp_path), size=1)
    assert plain[:2] == (3, 1)
    assert world.run(diverge, PIPE, str(tmp_path), size=2) == [plain] * 2


def accumulation(folder: str) -> Any:
    return [stock.GradientAccumulationScheduler({0: 1, 1: 2, 2: 3})]


def spikes(folder: str) -> Any:
    return [SpikeDetection(warmup=1)]


def spiked(trainer: L.Trainer, module: Any, detector: Any) -> Any:
    return [float(detector.last_val), float(detector.running_mean.compute()), len(detector.bad_batches)]


@pytest.mark.contract("Callbacks", "`GradientAccumulationScheduler` accumulates as in one process")
def test_accumulation_follows_its_scheduler(world: World, tmp_path: Path) -> None:
    assert same(world, REPLICAS, accumulation, None, tmp_path).steps == 3 + 2 + 1


@pytest.mark.contract("Callbacks", "`SpikeDetection` follows the loss of the whole batch")
def test_spikes_are_looked_for_in_the_loss_of_the_whole_batch(world: World, tmp_path: Path) -> None:
    same(world, REPLICAS, spikes, spiked, tmp_path)


def too_late(folder: str) -> Any:
    return [stock.Timer(timedelta(microseconds=1))]


def in_time(folder: str) -> Any:
    return [stock.Timer("00:01:00:00", interval="epoch")]


def nothing(folder: str) -> Any:
    return []


@pytest.mark.contract("Callbacks", "`Timer` and `Trainer(max_time=...)` stop every rank after the same batch")
@pytest.mark.parametrize(
    ("make", "options", "steps"),
    [
        (too_late, {}, 1),
        pytest.param(nothing, {"max_time": timedelta(microseconds=1)}, 1, marks=pytest.mark.long),
        pytest.param(in_time, {}, 9, marks=pytest.mark.long),
    ],
)
def test_time_is_over_for_all_ranks_at_once(world: World, tmp_path: Path, make: Any, options: Any, steps: int) -> None:
    assert same(world, PIPE, make, None, tmp_path, **options).steps == steps


# ----------------------------------------------------------------------------------------------------------- the tuner


def tune(cell: Cell, folder: str) -> Any:
    """Looks for a learning rate, then fits with it."""
    torch.manual_seed(0)
    module = Watched().double()
    trainer = make_trainer(cell, precision="64-true", max_epochs=1, default_root_dir=folder)
    loader = make_loader(make_rows("gpt2", 8 * ROWS * cell.replicas), cell.batch_size)
    finder = Tuner(trainer).lr_find(module, loader, num_training=20, min_lr=1e-3)
    found = [finder.suggestion(), module.lr, finder.results]
    trainer.fit(module, loader)
    return found, snapshot(module), trainer.global_step, sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.contract("Callbacks", "`Tuner.lr_find` and `LearningRateFinder` suggest the rate that one process finds")
@pytest.mark.parametrize("cell", [PIPE, REPLICAS], ids=str)
def test_the_learning_rate_found_is_that_of_one_process(world: World, tmp_path: Path, cell: Cell) -> None:
    for name in ("plain", "piped"):
        (tmp_path / name).mkdir()
    (plain,) = world.run(tune, cell.reference, str(tmp_path / "plain"), size=1)
    for seen in world.run(tune, cell, str(tmp_path / "piped"), size=cell.size):
        torch.testing.assert_close(seen[:3], plain[:3], rtol=1e-6, atol=1e-10)
        assert seen[3] == plain[3]


# ------------------------------------------------------------------------------------------------------ what is refused


def refused(name: str, cell: Cell) -> str:
    """The error of a run with a callback, before any rank has done anything."""
    prune = stock.ModelPruning("l1_unstructured", amount=0.5)
    callbacks = {"size": [stock.BatchSizeFinder()], "prune": [prune]}.get(name, [])
    trainer = make_trainer(cell, max_epochs=1, callbacks=callbacks)
    module, loader = Watched(), make_loader(make_rows("gpt2", ROWS))
    module.configure_callbacks = lambda: [prune] if name == "own" else []  # type: ignore[method-assign]
    start = Tuner(trainer).scale_batch_size if name == "tuner" else trainer.fit
    with pytest.raises(MisconfigurationException) as caught:
        start(module, loader)
    assert trainer.global_step == 0
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        pytest.param(
            "size",
            "set the batch size",
            marks=pytest.mark.contract("Callbacks", "`BatchSizeFinder`: memory runs out on one rank", "refused"),
        ),
        pytest.param(
            "tuner",
            "set the batch size",
            marks=pytest.mark.contract("Callbacks", "`Tuner.scale_batch_size`", "refused"),
        ),
        pytest.param(
            "prune",
            "prune after fit",
            marks=pytest.mark.contract("Callbacks", "`ModelPruning`: it compares the whole model's weights", "refused"),
        ),
        ("own", "prune after fit"),
    ],
)
def test_what_needs_the_whole_model_or_memory_of_all_ranks_is_refused(world: World, name: str, message: str) -> None:
    # Lightning itself refuses the tuner's search where there are replicas, as with DDP.
    for cell in (PIPE,) if name == "tuner" else (PIPE, REPLICAS):
        errors = world.run(refused, name, cell, size=cell.size)
        assert all(message in error for error in errors)
