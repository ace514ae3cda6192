"""What is logged in a run, to be compared with what a plain run logs."""

from collections.abc import Callable
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import Callback

from .fidelity import Cell, make_trainer
from .users import ROWS, make_loader, make_rows
from .world import World


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
