"""Runs in which one rank meets a fault, at a chosen place in a chosen step."""

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import Dataset

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows

STEP = 2
"""The step, from 0, in which it happens."""
SCHEDULE = "1f1b"


def kill(number: signal.Signals) -> Callable[[], None]:
    """A signal to this process."""
    return lambda: os.kill(os.getpid(), number)


def raise_error() -> None:
    raise ArithmeticError("the fault")


def leave() -> None:
    sys.exit(0)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


FAULTS: dict[str, Callable[[], None]] = {
    "exception": raise_error,
    "sys.exit": leave,
    "SIGKILL": kill(signal.SIGKILL),
    "SIGSTOP": kill(signal.SIGSTOP),
    "SIGTERM": kill(signal.SIGTERM),
    "SIGINT": kill(signal.SIGINT),
    "out of memory": run_out_of_memory,
}
LOCK = {"held lock": lambda: ctypes.PyDLL(None).sleep(600)}
"""Keeps the interpreter lock, so that no thread of Python runs in the process, nor a handler of signals."""
PLACES = ("forward", "backward", "all-reduce", "validation", "checkpoint save")


class Victim(LanguageModule):
    """A module whose rank meets a fault.

    Args:
        rank: The global rank.
        fault: A key of ``FAULTS`` or ``LOCK``.
        place: One of ``PLACES``.
        folder: Where the time of the fault is noted.
    """

    def __init__(self, rank: int, fault: str, place: str, folder: str) -> None:
        super().__init__(exact=False, lr=0.1)
        self.scale = nn.Parameter(torch.ones(()))  # on all ranks, so that there is an all-reduce
        self.rank, self.fault, self.place, self.folder = rank, fault, place, folder
        self.is_armed = True

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) * self.scale

    def on_fit_start(self) -> None:
        for block in self.model.transformer.h:
            block.register_forward_hook(self._in_block)
        engine = self.trainer.strategy.engine
        reduce = engine.reduce_gradients

        def reduce_gradients() -> None:
            self._meet("all-reduce")
            reduce()

        engine.reduce_gradients = reduce_gradients

    def _in_block(self, _block: nn.Module, _args: Any, output: Any) -> None:
        self._meet("forward" if self.trainer.training else "validation")
        tensor = output[0] if isinstance(output, tuple) else output
        if tensor.requires_grad:
            tensor.register_hook(lambda _gradient: self._meet("backward"))

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self._meet("checkpoint save")

    def _meet(self, place: str) -> None:
        is_here = self.is_armed and place == self.place and self.global_rank == self.rank
        if is_here and self.trainer.global_step >= STEP:
            self.is_armed = False
            Path(self.folder, "when").write_text(str(time.monotonic()))
            (FAULTS | LOCK)[self.fault]()


def suffer(
    rank: int,
    fault: str,
    place: str,
    folder: str,
    ranks: int,
    stall_timeout: float,
    timeout: float = 30.0,
    batches: int = 6,
) -> None:
    """Trains until the fault."""
    torch.manual_seed(0)
    trainer = make_trainer(
        Cell(SCHEDULE, ranks, strategy=(("stall_timeout", stall_timeout), ("timeout", timeout))),
        max_epochs=1,
        val_check_interval=1,
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)],
        default_root_dir=folder,
    )
    rows = make_rows("gpt2", batches * ROWS, padded=False)
    try:
        trainer.fit(Victim(rank, fault, place, folder), make_loader(rows), make_loader(rows[:ROWS]))
    finally:
        Path(folder, f"ended-{trainer.global_rank}").write_text(str(time.monotonic()))


class Broken(Dataset[Row]):
    """Rows, one of which can't be had, or kills who reads it.

    Args:
        fault: ``SIGKILL``, ``ValueError`` or ``IndexError``.
        row: The row.
    """

    def __init__(self, fault: str, row: int) -> None:
        self.rows, self.fault, self.row = make_rows("gpt2", 4 * ROWS, padded=False), fault, row

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if index == self.row:
            if self.fault == "SIGKILL":
                os.kill(os.getpid(), signal.SIGKILL)
            raise {"IndexError": IndexError, "ValueError": ValueError}[self.fault](f"row {index}")
        return self.rows[index]


SAYS_OF_ROW = {
    "SIGKILL": "RuntimeError: DataLoader worker (pid",
    "ValueError": "ValueError: Caught ValueError in DataLoader worker process 0.",
    "IndexError": "IndexError: Caught IndexError in DataLoader worker process 0.",
}
"""The errors of the rank whose loader's worker reads such a row."""


def meet_at(seconds: float, fault: str, folder: str) -> None:
    """Has this process meet a fault some time after now, whatever it does then."""

    def meet() -> None:
        Path(folder, "when").write_text(str(time.monotonic()))
        FAULTS[fault]()

    timer = threading.Timer(seconds, meet)
    timer.daemon = True
    timer.start()


def train_until(
    rank: int, fault: str, seconds: float, folder: str, ranks: int, stall_timeout: float, timeout: float
) -> None:
    """Trains for longer than until the fault, which comes at a time instead of at a place."""
    if int(os.environ["LOCAL_RANK"]) == rank:
        meet_at(seconds, fault, folder)
    suffer(-1, fault, "", folder, ranks, stall_timeout, timeout, batches=1000)


def checkpoints(folder: Path) -> list[int]:
    """The steps of all checkpoints in a folder; each has to load."""
    return sorted(int(torch.load(path, weights_only=False)["global_step"]) for path in folder.glob("*.ckpt"))
