"""A script for DDP that follows docs/from_ddp.md trains as it did: the page's own code, under DDP and as a pipeline."""

import re
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from lightning_chimera import ChimeraStrategy

from .fidelity import SILENT, Trained, same_changes, snapshot
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import World

PAGE = Path(__file__).parents[2] / "docs" / "from_ddp.md"
STEPS = 3
"""Steps of an epoch, of two usual batches each."""


def page_code() -> dict[str, Any]:
    """What the page's section on the world size defines."""
    section = PAGE.read_text().split("## World size")[1].split("\n## ")[0]
    known: dict[str, Any] = {"L": L}
    for block in re.findall(r"^```python\n(.*?)^```", section, re.DOTALL | re.MULTILINE):
        exec(compile(block, str(PAGE), "exec"), known)
    return known


def make_trainer(strategy: str, devices: int, **options: Any) -> L.Trainer:
    """A trainer under DDP, or for pipelines of two stages."""
    pipeline = ChimeraStrategy(num_stages=2, print_plan=False, timeout=30)
    return L.Trainer(**SILENT, strategy="ddp" if strategy == "ddp" else pipeline, devices=devices, **options)


def train_script(
    strategy: str, devices: int, epochs: int, save_to: str | None = None, resume_from: str | None = None
) -> tuple[Trained, int, float]:
    """Trains the page's module on the page's batches, by SGD, since AdamW hides wrong scales.

    Returns:
        What was trained, the batch size, and the learning rate.
    """
    code = page_code()

    class Data(code["PerReplica"]):
        def train_dataloader(self) -> DataLoader:
            rows = make_rows("gpt2", STEPS * 2 * ROWS, padded=False)
            # Left alone, Lightning shuffles under DDP what the loader does not.
            sampler = DistributedSampler(rows, shuffle=False) if strategy == "ddp" else None
            return make_loader(rows, self.batch_size, sampler=sampler)

    class Module(code["Scaled"], LanguageModule):
        pass

    torch.manual_seed(0)
    module, data = Module().double(), Data(2 * ROWS)
    trainer = make_trainer(strategy, devices, precision="64-true", max_epochs=epochs)
    seen = Trained(before=snapshot(module))
    with patch.object(torch.optim, "AdamW", torch.optim.SGD):
        trainer.fit(module, datamodule=data, ckpt_path=resume_from)
    seen.after = snapshot(module)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return seen, data.batch_size, trainer.optimizers[0].param_groups[0]["lr"]


@pytest.mark.contract("The module", "one learning rate and one number of rows in a step, under DDP and as a pipeline")
@pytest.mark.parametrize(("devices", "batch_size"), [(2, 2 * ROWS), (4, ROWS)])
def test_the_pages_script_changes_every_parameter_as_under_ddp(world: World, devices: int, batch_size: int) -> None:
    (ddp, under_ddp, lr), _ = world.run(train_script, "ddp", 2, 1, size=2)
    ranks = world.run(train_script, "chimera", devices, 1, size=devices)
    assert under_ddp == ROWS
    for seen, size, scaled in ranks:
        assert size == batch_size
        assert scaled == lr == 1e-4 * 2 * ROWS / 256
        same_changes(seen, ddp)


@pytest.mark.contract("Loop", "a checkpoint of DDP continues as a pipeline, and the other way round")
@pytest.mark.parametrize(("first", "second"), [("ddp", "chimera"), ("chimera", "ddp")])
def test_a_run_goes_on_under_the_other_strategy(world: World, first: str, second: str, tmp_path: Path) -> None:
    path = str(tmp_path / "first.ckpt")
    (straight, *_), _ = world.run(train_script, "ddp", 2, 2, size=2)
    world.run(train_script, first, 2, 1, path, size=2)
    (resumed, *_), _ = world.run(train_script, second, 2, 2, None, path, size=2)
    same_changes(resumed, straight)


@pytest.mark.parametrize(("strategy", "devices", "replicas"), [("ddp", 4, 4), ("chimera", 2, 1), ("chimera", 8, 4)])
def test_the_page_counts_replicas(strategy: str, devices: int, replicas: int) -> None:
    assert page_code()["num_replicas"](make_trainer(strategy, devices)) == replicas
