"""Lightning's own callbacks do what they do in one process, or are refused."""

import dataclasses
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch import callbacks as stock
from torch import Tensor

from .fidelity import SILENT, Cell, make_trainer, snapshot
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2, microbatches=2)
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


@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
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
