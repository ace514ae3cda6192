"""A user's whole script, which each process of a run executes.

Usage: python script.py OPTIONS, where the options are a JSON object; ``run`` below names them.
"""

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader

import lightning_chimera
from lightning_chimera.schedules import Placement, forward_only, gpipe

sys.path.insert(0, str(Path(__file__).parents[1]))

from distributed.faults import Broken, Victim
from distributed.users import ROWS, LanguageModule, Row, make_loader, make_rows


class Manual(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class TwoOptimizers(LanguageModule):
    def configure_optimizers(self) -> Any:
        halves = [], []
        for name, parameter in self.named_parameters():
            halves["bias" in name].append(parameter)
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class Unknown(LanguageModule):
    """Holds a model of its own make."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(3, 3)


class RaisesAfterTheModel(LanguageModule):
    """Raises where the last stage is."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 2:
            raise ValueError(f"raised after the model at {time.monotonic()} s")
        return loss


class RaisesBeforeTheModel(LanguageModule):
    """Raises on the last rank only."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        if batch_idx == 2 and self.global_rank == self.trainer.world_size - 1:
            raise ValueError(f"raised before the model at {time.monotonic()} s")
        return super().training_step(batch, batch_idx)


class LosesItsParent(LanguageModule):
    """Rank 1 kills the process that has started it, in some hook; all would go on for a minute and more.

    Args:
        hook: The hook; ``after`` is none of the run's, but once it is over.
    """

    def __init__(self, hook: str) -> None:
        super().__init__()
        if hook != "after":
            setattr(self, hook, self.lose_parent)

    def lose_parent(self, *_: Any, **__: Any) -> None:
        if os.environ.get("LOCAL_RANK") == "1":
            os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(60.0)


class RaisesBeforeTheRanksMeet(LanguageModule):
    """Raises on global rank 0 only."""

    def configure_callbacks(self) -> Any:
        if self.trainer.is_global_zero:
            raise ValueError(f"raised before the ranks meet at {time.monotonic()} s")
        return super().configure_callbacks()


SCHEDULES: dict[str, Any] = {
    "for more ranks": lambda stages, microbatches: gpipe(stages + 1, microbatches),
    "for more microbatches": lambda stages, microbatches: gpipe(stages, microbatches + 1),
    "nothing": lambda stages, microbatches: None,
    "a value for 4 ranks": gpipe(4, 4),
    "a value without backward": forward_only(Placement.down(2), 4),
}
"""Schedules that are no names, by what they are."""


def run(
    folder: str | None = None,
    module: str = "LanguageModule",
    strategy: str = "chimera",
    devices: int = 2,
    num_nodes: int = 1,
    blocks: int = 4,
    schedule: str | None = None,
    victim: tuple[int, str, str] | None = None,
    orphaned: str | None = None,
    broken: str | None = None,
    **options: Any,
) -> None:
    """Trains, and writes what each process has in the end.

    Args:
        folder: Where to write.
        module: Name of the module's class.
        strategy: Its registered name, used where no options are given.
        devices: Number of processes of a node.
        num_nodes: Number of nodes.
        blocks: Blocks of the model.
        schedule: As in ``ChimeraStrategy``, or a key of ``SCHEDULES``.
        orphaned: When the process that has started the ranks is killed, as in ``LosesItsParent``.
        broken: What happens to a worker of the loader near the end, as in ``faults.Broken``.
        victim: The rank that meets a fault, the fault, and the place, as in ``faults.Victim``.
        **options: Options of ``ChimeraStrategy``.
    """
    L.seed_everything(0, verbose=False)
    if schedule is not None:
        options["schedule"] = SCHEDULES.get(schedule, schedule)
    if victim is not None:
        assert folder is not None
        lightning_module: L.LightningModule = Victim(*victim, folder)
    elif orphaned is not None:
        lightning_module = LosesItsParent(orphaned)
    elif module == "LanguageModule":
        lightning_module = LanguageModule(exact=False, blocks=blocks)
    else:
        lightning_module = globals()[module]()
    saves = victim is not None or broken is not None
    trainer = L.Trainer(
        accelerator="cpu",
        devices=devices,
        num_nodes=num_nodes,
        strategy=lightning_chimera.ChimeraStrategy(**options) if options else strategy,
        max_epochs=1,
        logger=False,
        enable_checkpointing=saves,
        default_root_dir=folder,
        callbacks=[ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_top_k=-1)] if saves else [],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    rows = make_rows("gpt2", 4 * ROWS, padded=victim is None)
    loader = make_loader(rows) if broken is None else DataLoader(Broken(broken, 3 * ROWS), ROWS, num_workers=1)
    trainer.fit(lightning_module, loader)
    if orphaned == "after":
        lightning_module.lose_parent()
    if folder is not None:
        found = {
            "rank": trainer.global_rank,
            "pid": os.getpid(),
            "port": os.environ.get("MASTER_PORT"),
            "loss": float(trainer.callback_metrics["train_loss"]),
            "state": {name: value.clone() for name, value in lightning_module.state_dict().items()},
        }
        torch.save(found, Path(folder, f"{trainer.global_rank}-{os.getpid()}.pt"))


if __name__ == "__main__":
    run(**json.loads(sys.argv[1]))
