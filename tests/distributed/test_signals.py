"""Signals in the middle of steps: all ranks end alike after the same batch, and what they have saved loads."""

import os
import random
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_chimera.signals import Interrupted

from .fidelity import Cell, make_trainer
from .launches import forget_rank
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World


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


class SendsInSetup(Callback):
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def set_up() -> None:
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, callbacks=[SendsInSetup()])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", ROWS)))


def test_a_signal_while_a_run_is_set_up_ends_it_at_once(world: World) -> None:
    with pytest.raises(RankFailed) as failed:
        world.run(set_up, size=2)
    assert failed.value.exit_codes[1] == -signal.SIGTERM
    assert failed.value.exit_codes[0] not in (0, None)
    assert "rank 1 of 2 has vanished" in str(failed.value)


class InterruptsParent(Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
            time.sleep(0.5)


def train_in_a_notebook(folder: str) -> int:
    """Returns the exit code of the process that has started the ranks and is interrupted alone."""
    forget_rank()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cell = Cell("1f1b", 2, strategy=(("start_method", "fork"), ("save_on_signal", True)))
    trainer = make_trainer(cell, max_epochs=-1, default_root_dir=folder, callbacks=[InterruptsParent()])
    try:
        trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.contract("Launch", "SIGINT to the process alone that has spawned or forked the ranks")
def test_an_interrupt_of_the_parent_ends_all_ranks_after_a_whole_step(world: World, tmp_path: Path) -> None:
    assert world.run(train_in_a_notebook, str(tmp_path), size=1) == [1]
    assert torch.load(tmp_path / "interrupted.ckpt", weights_only=True)["global_step"] > 1


# ------------------------------------------------------------------------------------------- requeues at any instant


def train_until_told(folder: str, delay: float, kind: signal.Signals) -> tuple[str, Any, int, int]:
    """Trains with fast steps and a loader worker; all processes of a rank get a signal at some moment.

    Returns how it ended, with which code, after which step, and from which it had resumed.
    """
    torch.manual_seed(0)
    rank = int(os.environ["LOCAL_RANK"])
    trainer = make_trainer(Cell("1f1b"), max_epochs=-1, default_root_dir=folder)
    begun: list[int] = []
    # Not after the run, which another rank's signal may end before: the process would die of it, as it should.
    later = threading.Timer(delay + 0.01 * rank, lambda: os.killpg(os.getpgid(0), kind))

    class SignalsLater(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begun.append(trainer.global_step)

        def on_train_batch_end(self, *_: Any) -> None:
            if len(begun) == 1:  # the loader's worker is there by now, and gets the signal as well
                begun.append(-1)
                later.start()

        def on_exception(self, *_: Any) -> None:
            later.cancel()

    trainer.callbacks.append(SignalsLater())
    loader = DataLoader(make_rows("gpt2", 8 * ROWS), ROWS, num_workers=1, persistent_workers=True)
    try:
        trainer.fit(LanguageModule("gpt2"), loader)
    except Interrupted as ended:
        return ended.kind.name, ended.code, trainer.global_step, begun[0]
    return "finished", None, trainer.global_step, begun[0]


@pytest.mark.parametrize("instants", [2, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_job_is_requeued_at_any_instant_and_resumed_at_the_saved_step(
    world: World, tmp_path: Path, instants: int
) -> None:
    """The controller is a script that notes what it is asked; tests/cluster does the same with a real one."""
    asked = tmp_path / "asked"
    (tmp_path / "bin").mkdir()
    scontrol = tmp_path / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {asked}\n')
    scontrol.chmod(0o755)
    job = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }
    draw, step = random.Random(0), 0
    for _ in range(instants):
        (first, *others) = world.run(as_task, str(tmp_path / "run"), draw.uniform(0.0, 0.3), size=2, env=job)
        assert others == [first]
        how, code, end, begin = first
        assert (how, code, begin) == ("SIGUSR1", 0, step)
        step = end
        (saved,) = (tmp_path / "run").glob("hpc_ckpt_*.ckpt")
        assert torch.load(saved, weights_only=True)["global_step"] == step
    assert asked.read_text().splitlines() == ["requeue 5_2"] * instants


def as_task(folder: str, delay: float) -> tuple[str, Any, int, int]:
    """A rank of a world as a task of a job."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["LOCAL_RANK"]
    return train_until_told(folder, delay, signal.SIGUSR1)


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_the_workers_of_a_loader_leave_a_signal_to_all_to_their_rank(
    world: World, tmp_path: Path, kind: signal.Signals
) -> None:
    (first, *others) = world.run(train_until_told, str(tmp_path), 0.05, kind, size=2)
    assert first[:2] == (kind.name, 128 + kind)
    assert others == [first]
