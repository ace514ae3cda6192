"""Ranks that do not run the same say so at the start or at the step, all of them, and call what differs by its name."""

import os
import re
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from lightning_chimera import facts

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2)
REPLICAS = Cell("1f1b", 1, replicas=2)


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


def says(action: Any) -> str:
    """The error of a rank."""
    try:
        action()
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def fit(cell: Cell, module: L.LightningModule, **options: Any) -> str:
    torch.manual_seed(0)
    options = {"max_epochs": 3, "callbacks": [], **options}
    loader = make_loader(make_rows("gpt2", cell.replicas * ROWS, padded=False))
    return says(lambda: make_trainer(cell, **options).fit(module, loader))


# ------------------------------------------------------------------------------------------------------- at the start


def other_number_of_microbatches() -> str:
    return fit(replace(FEW, microbatches=4 + 4 * rank()), LanguageModule())


def other_neighbours() -> str:
    return fit(replace(REPLICAS, strategy=(("innermost", ("stages", "replicas")[rank()]),)), LanguageModule())


def other_model() -> str:
    return fit(FEW, LanguageModule(blocks=4 + 2 * rank()))


def other_code() -> str:
    if rank():
        facts._code = lambda: "another"  # type: ignore[assignment]
    return fit(FEW, LanguageModule())


def other_clipping() -> str:
    return fit(FEW, LanguageModule(), gradient_clip_val=1.0 + rank())


def other_learning_rate() -> str:
    return fit(FEW, LanguageModule(lr=1.0 / (1 + rank())))


def other_frozen_layer() -> str:
    module = LanguageModule()
    module.model.transformer.h[1].requires_grad_(rank() == 0)
    return fit(FEW, module)


def other_call_of_the_trainer() -> str:
    if rank() == 0:
        return fit(FEW, LanguageModule())
    return says(lambda: make_trainer(FEW).validate(LanguageModule(), make_loader(make_rows("gpt2", 8))))


@pytest.mark.contract(
    "Faults",
    "other settings, another model, optimizer or version of the code on some ranks: found at the start, on all of them",
    "refused",
    "MLM#6747, DS#7208",
)
@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        (other_number_of_microbatches, r"ChimeraStrategy\(num_microbatches=...\): 4 on rank 0; 8 on rank 1"),
        (other_neighbours, r"ChimeraStrategy\(innermost=...\): 'stages' on rank 0; 'replicas' on rank 1"),
        (other_model, r"model.config.n_layer: 4 on rank 0; 6 on rank 1"),
        (other_code, r"the code of lightning_chimera: \w+ on rank 0; another on rank 1"),
        (other_clipping, r"trainer.gradient_clip_val: 1.0 on rank 0; 2.0 on rank 1"),
        (other_learning_rate, r"SGD's group 0, lr: 1.0 on rank 0; 0.5 on rank 1"),
        (other_frozen_layer, r"parameter 'model.transformer.h.1.ln_1.weight': \[32\] float32 on rank 0; .*frozen"),
        (other_call_of_the_trainer, r"the call of the Trainer: fit on rank 0; validate on rank 1"),
    ],
)
def test_ranks_that_differ_at_the_start_all_name_the_difference(world: World, scenario: Any, difference: str) -> None:
    first, second = world.run(scenario, size=2, limit=30)
    assert first == second
    assert "At the start, " in first
    assert "the ranks do not have the same:\n" in first
    assert re.search(difference, first), first
    assert "look for what depends on the rank" in first


CHECKPOINTS = {
    "none": r"step 1, epoch 0, batch 1, weights \w+ on rank 0; none on rank 1",
    "later": r"step 1, epoch 0, batch 1, weights \w+ on rank 0; step 2, epoch 0, batch 2, weights \w+ on rank 1",
    "of another run": r"step 1, epoch 0, batch 1, weights (\w+) on rank 0; \w.* 1, weights (?!\1)\w+ on rank 1",
}
"""What the other rank finds where this one finds the checkpoint of a step."""


class Saves(L.Callback):
    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / f"{self.name}-{trainer.global_step}.ckpt")


def go_on_from(folder: Path, other: str, method: str) -> str:
    loader = make_loader(make_rows("gpt2", 3 * ROWS, padded=False))
    for name in ("own", "of another run"):
        torch.manual_seed(len(name))
        trainer = make_trainer(FEW, max_steps=2, max_epochs=1, callbacks=[Saves(folder, name)])
        trainer.fit(LanguageModule(), loader)
    others = {"none": None, "later": folder / "own-2.ckpt", "of another run": folder / "of another run-1.ckpt"}
    path = others[other] if rank() else folder / "own-1.ckpt"
    trainer = make_trainer(FEW, max_epochs=2, callbacks=[])
    return says(lambda: getattr(trainer, method)(LanguageModule(), loader, ckpt_path=path))


@pytest.mark.contract(
    "Faults",
    "ranks that find different checkpoints, or none, as without a shared folder: found at the start, on all of them",
    "refused",
)
@pytest.mark.parametrize(
    ("other", "method"),
    [
        ("none", "fit"),
        pytest.param("later", "fit", marks=pytest.mark.long),
        ("of another run", "fit"),
        pytest.param("later", "validate", marks=pytest.mark.long),
    ],
)
def test_ranks_that_resume_from_different_checkpoints_all_name_them(
    world: World, tmp_path: Path, other: str, method: str
) -> None:
    first, second = world.run(go_on_from, tmp_path, other, method, size=2, limit=60)
    assert first == second
    assert re.search(f"the checkpoint to go on from: {CHECKPOINTS[other]}", first), first


def one_comes_not() -> str:
    cell = replace(FEW, strategy=(("timeout", 3),))
    assert fit(cell, LanguageModule(), max_epochs=1) == "none"
    if rank() == 0:
        return fit(cell, LanguageModule(), max_epochs=1)
    time.sleep(9)  # until the other has asked where it is
    return "none"


@pytest.mark.long
def test_a_rank_that_does_not_come_is_named(world: World) -> None:
    first, _ = world.run(one_comes_not, size=2)
    assert "in vain, until the time-out. They were\n  in strategy.broadcast(): rank 0\n  elsewhere: rank 1" in first


# --------------------------------------------------------------------------------------------------------- at a step


class ChangesTheRate(L.Callback):
    def on_train_epoch_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.current_epoch == 1 and rank() == 1:
            trainer.optimizers[0].param_groups[0]["lr"] = 0.25


def other_rate_later() -> str:
    return fit(FEW, LanguageModule(), callbacks=[ChangesTheRate()])


class DropsAKey(LanguageModule):
    def on_after_batch_transfer(self, batch: Row, dataloader_idx: int) -> Row:
        return {name: value for name, value in batch.items() if name != "attention_mask" or rank() == 0}


class CropsInTransfer(LanguageModule):
    def on_after_batch_transfer(self, batch: Row, dataloader_idx: int) -> Row:
        return {name: value[:, : 16 - rank()] for name, value in batch.items()}


class SplitsDifferently(LanguageModule):
    def microbatch_split(self, batch: Row, num_microbatches: int) -> list[Row]:
        pieces = {name: value.tensor_split(num_microbatches - rank()) for name, value in batch.items()}
        return [dict(zip(pieces, parts, strict=True)) for parts in zip(*pieces.values(), strict=True)]


def drops_a_key() -> str:
    return fit(FEW, DropsAKey())


def crops_in_transfer() -> str:
    return fit(FEW, CropsInTransfer())


def splits_differently() -> str:
    return fit(FEW, SplitsDifferently())


@pytest.mark.contract(
    "Faults",
    "batches that hooks or `microbatch_split` make others on some ranks of a pipeline, learning rates that drift apart",
    "refused",
)
@pytest.mark.parametrize(
    ("scenario", "difference"),
    [
        (other_rate_later, "At the start of an epoch, .*SGD's group 0, lr: 1.0 on rank 0; 0.25 on rank 1"),
        (drops_a_key, "hooks that transfer a batch, .*number of entries of batch: 3 on rank 0; 2 on rank 1"),
        (crops_in_transfer, r"batch\['input_ids'\]: \[8, 16\] int64 on rank 0; \[8, 15\] int64 on rank 1"),
        (splits_differently, "number of entries of microbatches: 4 on rank 0; 3 on rank 1"),
    ],
)
def test_ranks_that_differ_at_a_step_all_name_the_difference(world: World, scenario: Any, difference: str) -> None:
    first, second = world.run(scenario, size=2, limit=30)
    assert first == second
    assert re.search(f"(?s){difference}", first), first


class NeedsNoMask(LanguageModule):
    """Trains on rows of which those of the second replica have no mask."""

    def on_before_batch_transfer(self, batch: Row, dataloader_idx: int) -> Row:
        if self.trainer.strategy.topology.replica == 1:  # type: ignore[attr-defined]
            batch.pop("attention_mask")
        return batch


def replicas_with_other_keys() -> str:
    return fit(Cell("chimera", 2, replicas=2), NeedsNoMask(), max_epochs=1)


@pytest.mark.contract("Faults", "replicas whose batches have other keys or lengths than those of others")
def test_replicas_may_have_batches_of_other_keys(world: World) -> None:
    assert world.run(replicas_with_other_keys, size=4) == ["none"] * 4


# ------------------------------------------------------------------------------------------- calls of some ranks only


class OnRankZero(L.Callback):
    """Makes a call on global rank 0 only, after the second batch."""

    def __init__(self, call: str, folder: Path) -> None:
        self.call = call
        self.path = folder / "some.ckpt"

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.global_step != 2:
            return
        strategy: Any = trainer.strategy
        # Short from here on only, where nobody comes however fast the machine is.
        for group in (strategy.engine.groups.world, dist.group.WORLD):
            _set_pg_timeout(timedelta(seconds=1), group)
        if not trainer.is_global_zero:
            return
        if self.call == "save_checkpoint":
            trainer.save_checkpoint(self.path)
        elif self.call == "full_parameters":
            with strategy.full_parameters():
                pass
        elif self.call == "barrier":
            strategy.barrier()
        elif self.call == "broadcast":
            strategy.broadcast(1)


def call_on_rank_zero(cell: Cell, call: str, folder: Path) -> str:
    return fit(cell, LanguageModule(), callbacks=[OnRankZero(call, folder)])


@pytest.mark.contract(
    "Faults",
    "`trainer.save_checkpoint`, `full_parameters`, `barrier`, ... on some ranks only: ends after `timeout`, with an"
    " error that says which rank is in which call",
    "refused",
)
@pytest.mark.parametrize(
    ("call", "name"),
    [
        ("save_checkpoint", "trainer.save_checkpoint()"),
        pytest.param("full_parameters", "strategy.full_parameters()", marks=pytest.mark.long),
        pytest.param("barrier", "strategy.barrier()", marks=pytest.mark.long),
        pytest.param("broadcast", "strategy.broadcast()", marks=pytest.mark.long),
    ],
)
def test_a_call_of_one_rank_only_is_named(world: World, tmp_path: Path, call: str, name: str) -> None:
    try:
        said = world.run(call_on_rank_zero, FEW, call, tmp_path, size=2)
    except RankFailed as failed:  # the one that raised later was told by the other, and has left
        said = [str(failed)]
    for text in said:
        assert "RanksApart: Ranks have waited for each other in vain, until the time-out." in text
        assert f"They were\n  in {name}: rank 0\n  in the end of a hook of the loop: rank 1" in text
        assert "take them out of `if trainer.is_global_zero:`" in text
    assert not (tmp_path / "some.ckpt").exists()


class AtBatchStart(L.Callback):
    """Enters a barrier on global rank 0 only, before the second batch: the other waits in its training step."""

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1:
            return
        strategy: Any = trainer.strategy
        _set_pg_timeout(timedelta(seconds=1), strategy.engine.groups.world)
        for inbox in strategy.engine.pipeline._executor._links._inboxes.values():
            inbox._timeout = timedelta(seconds=1)
        if trainer.is_global_zero:
            strategy.barrier()


def barrier_before_a_step() -> str:
    loader = make_loader(make_rows("gpt2", 2 * ROWS))
    return says(lambda: make_trainer(FEW, callbacks=[AtBatchStart()], max_epochs=1).fit(LanguageModule(), loader))


def test_a_step_that_waits_in_shared_memory_says_where_the_others_are(world: World) -> None:
    try:
        said = world.run(barrier_before_a_step, size=2, limit=30)
    except RankFailed as failed:  # the one that raised later was told by the other, and has left
        said = [str(failed)]
    for text in said:
        assert "They were\n  in strategy.barrier(): rank 0\n  in a training step: rank 1" in text, text


class GathersMoreOnRankZero(L.Callback):
    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *args: Any) -> None:
        if trainer.is_global_zero:
            module.all_gather(torch.ones(3))
        trainer.strategy.reduce(torch.ones(2))


def gather_on_rank_zero() -> str:
    return fit(REPLICAS, LanguageModule(), callbacks=[GathersMoreOnRankZero()])


def test_a_call_that_meets_another_one_is_named_at_once(world: World) -> None:
    first, second = world.run(gather_on_rank_zero, size=2)
    assert first == second
    assert "call: self.all_gather() in on_train_batch_end after step 1 on rank 0; strategy.reduce() or" in first
    assert "the tensor given to it: [3] float32 on rank 0; [2] float32 on rank 1" in first
