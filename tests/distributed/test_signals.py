"""Signals in the middle of steps: all ranks end alike after the same batch, and what they have saved loads."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback

from lightning_chimera.signals import Interrupted

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import World


class Sends(Callback):
    """Sends this process a signal in some hook of some batch, as if it came from outside."""

    def __init__(self, kind: signal.Signals, hook: str, batch: int) -> None:
        self._kind, self._batch = kind, batch
        setattr(self, hook, self._send)

    def _send(self, *arguments: Any, **_: Any) -> None:
        if self._batch in arguments:
            os.kill(os.getpid(), self._kind)


def handlers() -> list[Any]:
    return [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def train(
    folder: str, kind: signal.Signals, ranks: list[int], hook: str, accumulate: int, method: str, save: bool
) -> tuple[str, Any, int, bool]:
    """Returns how the run ended, with which exit code, after how many steps, and whether the handlers are back."""
    torch.manual_seed(0)
    before = handlers()
    module = LanguageModule("gpt2")
    trainer = make_trainer(
        Cell("1f1b", accumulate=accumulate, clip=False, strategy=(("save_on_signal", save),)),
        max_epochs=1,
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
        limit_val_batches=3,
    )
    if int(os.environ["LOCAL_RANK"]) in ranks:
        trainer.callbacks.append(Sends(kind, hook, 2))
    loader = make_loader(make_rows("gpt2", 8 * ROWS), ROWS)
    try:
        if method == "fit":
            trainer.fit(module, loader, make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
        else:
            getattr(trainer, method)(module, loader, verbose=False)
    except Interrupted as ended:
        return ended.kind.name, ended.code, trainer.global_step, handlers() == before
    return "finished", None, trainer.global_step, handlers() == before


SIGNALS = {"to one": [1], "to all": [0, 1]}


@pytest.mark.contract(
    "Launch",
    "SIGINT and SIGTERM to one rank or to all: all end alike after the same whole step, which `save_on_signal` saves",
    reported="Lightning#20825, Lightning#20542",
)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_ends_all_ranks_after_the_same_whole_step(
    world: World, tmp_path: Path, kind: signal.Signals, ranks: list[int]
) -> None:
    ended = world.run(train, str(tmp_path), kind, ranks, "on_train_batch_start", 2, "fit", True, size=2)
    # It came before batch 2, the third one, and the step that this batch is a part of is whole after batch 3.
    assert ended == [(kind.name, 128 + kind, 2, True)] * 2
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert not list(tmp_path.rglob("*.part"))


def test_nothing_is_saved_unasked(world: World, tmp_path: Path) -> None:
    ended = world.run(train, str(tmp_path), signal.SIGTERM, [0], "on_train_batch_start", 1, "fit", False, size=2)
    assert ended == [("SIGTERM", 143, 3, True)] * 2
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("method", "hook"), [("fit", "on_validation_batch_start"), ("validate", "on_validation_batch_start")]
)
def test_a_signal_ends_an_evaluation_on_all_ranks(world: World, tmp_path: Path, method: str, hook: str) -> None:
    ended = world.run(train, str(tmp_path), signal.SIGTERM, [1], hook, 1, method, True, size=2)
    steps = 8 if method == "fit" else 0
    assert ended == [("SIGTERM", 143, steps, True)] * 2
    assert (tmp_path / "interrupted.ckpt").exists() == (method == "fit")
