"""What one rank says, and what replicas say to each other in hooks, is as in DDP; nobody waits."""

import contextlib
import functools
import io
from typing import Any

import lightning as L
import pytest
import torch
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from .fidelity import SILENT, Cell, make_trainer
from .logs import check_all, fit_and_test
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
CELLS = pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)


# ---------------------------------------------------------------------------------------------------------- collectives


class Meets(Callback):
    """Notes what the collectives of Lightning give in hooks."""

    def __init__(self) -> None:
        self.notes: dict[str, Any] = {}

    def meet(self, trainer: L.Trainer, module: L.LightningModule, replica: int) -> dict[str, Any]:
        strategy, one = trainer.strategy, torch.tensor(1.0 + replica)
        strategy.barrier()
        return {
            "scalar": module.all_gather(one),
            "tensor": module.all_gather(one * torch.arange(3)),
            "tree": module.all_gather({"a": one, "b": [2 * one, 3.0 + replica]}),
            "ints": module.all_gather(torch.tensor([7 + replica])),
            "mean": strategy.reduce(one.clone(), reduce_op="mean"),
            "sum": strategy.reduce(one.clone(), reduce_op="sum"),
            "max": strategy.reduce(one.clone(), reduce_op=torch.distributed.ReduceOp.MAX),
            "broadcast": strategy.broadcast({"global rank": trainer.global_rank}),
            "all": strategy.reduce_boolean_decision(replica == 0),
            "any": strategy.reduce_boolean_decision(replica == 0, all=False),
        }

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        replica = (trainer.strategy.distributed_sampler_kwargs or {"rank": 0})["rank"] if trainer.world_size > 1 else 0
        self.notes = self.meet(trainer, module, replica)


def meet(cell: Cell) -> dict[str, Any]:
    torch.manual_seed(0)
    meets = Meets()
    rows = make_rows("gpt2", cell.replicas * ROWS)
    trainer = make_trainer(cell, max_epochs=1, callbacks=[meets])
    trainer.fit(LanguageModule(blocks=2), make_loader(rows, cell.batch_size))
    return meets.notes


def meet_in_ddp(replicas: int) -> dict[str, Any]:
    """The same with DDP, over a process for each replica."""
    torch.manual_seed(0)
    meets = Meets()
    options: dict[str, Any] = {**SILENT, "max_epochs": 1, "callbacks": [meets]}
    trainer = L.Trainer(devices=replicas, strategy="ddp", **options)
    trainer.fit(LanguageModule(blocks=2), make_loader(make_rows("gpt2", replicas * ROWS)))
    return meets.notes


@pytest.mark.contract(
    "Logging and metrics",
    "`self.all_gather`, `strategy.reduce`, `broadcast` and `barrier` in hooks: over the replicas, as in DDP over as"
    " many processes, whatever the number of stages",
)
def test_collectives_in_hooks_go_over_the_replicas_as_in_ddp(world: World) -> None:
    expected = world.run(meet_in_ddp, 2, size=2)
    assert expected[0]["tensor"].shape == (2, 3)
    for rank, seen in enumerate(world.run(meet, REPLICAS, size=4)):
        torch.testing.assert_close(seen, expected[rank // 2], rtol=0.0, atol=0.0)


@pytest.mark.contract(
    "Logging and metrics", "`self.all_gather` and `strategy.reduce` without replicas give the value as in one process"
)
def test_collectives_in_hooks_of_one_replica_give_the_value(world: World) -> None:
    (plain,) = world.run(meet, CHIMERA.reference, size=1)
    for seen in world.run(meet, CHIMERA, size=2):
        torch.testing.assert_close(seen, plain, rtol=0.0, atol=0.0)


class GivesAGroup(LanguageModule):
    """Reduces over a group of ranks, in a step or in a hook."""

    def __init__(self, where: str) -> None:
        super().__init__(blocks=2)
        self.where = where

    def share(self, where: str) -> None:
        if where == self.where:
            self.log("shared", 1.0, sync_dist=True, sync_dist_group=self.group)

    def on_fit_start(self) -> None:
        self.group: Any = torch.distributed.new_group([0])

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.share("step")
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.share("hook")


def give_a_group(cell: Cell, where: str) -> list[Any]:
    return fit_and_test(cell, functools.partial(GivesAGroup, where))


@pytest.mark.contract(
    "Logging and metrics", "`sync_dist_group` of `self.log`, and groups of ranks for `strategy.reduce`", "refused"
)
@pytest.mark.parametrize(("cell", "where"), [(CHIMERA, "step"), (REPLICAS, "hook")], ids=str)
def test_groups_of_ranks_are_refused(world: World, cell: Cell, where: str) -> None:
    with pytest.raises(RankFailed, match=r"sync_dist_group.*leave the group out"):
        world.run(give_a_group, cell, where, size=cell.size)


# ------------------------------------------------------------------------------------------------ on global rank 0 only


class SpeaksOnce(LanguageModule):
    """Logs and prints on global rank 0 only, in steps and in hooks."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("in_step", loss, rank_zero_only=True)
        if self.trainer.is_global_zero:
            self.log("guarded_rows", len(batch["input_ids"]), reduce_fx="sum")
            self.log("guarded", 5.0)
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        super().validation_step(batch, batch_idx)
        self.print("in validation")

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.print("in hook")
        if self.trainer.is_global_zero:
            self.log("guarded_in_hook", 1.0 + batch_idx, on_step=True, on_epoch=True, rank_zero_only=True)
        self.notes.append({name: float(value) for name, value in self.trainer.logged_metrics.items()})

    def on_train_end(self) -> None:
        self.notes.append(sorted(self.trainer.callback_metrics))


def speak_once(cell: Cell) -> tuple[list[Any], str]:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        found = fit_and_test(cell, SpeaksOnce, log_every_n_steps=1)
    return found[-1], "".join(line for line in said.getvalue().splitlines(keepends=True) if line.startswith("in "))


@pytest.mark.contract("Logging and metrics", "`rank_zero_only=True` in `self.log`, in steps and hooks")
@pytest.mark.contract("Logging and metrics", "`self.print` in hooks and evaluation steps prints once")
@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` in a training step under `if self.trainer.is_global_zero` says what the microbatches whose last stage"
    " is on global rank 0 say: half of them with Chimera, those of the first replica with replicas; on every rank",
    "differs",
)
@CELLS
def test_what_only_global_rank_zero_says_is_said_once_and_nobody_waits(world: World, cell: Cell) -> None:
    ((plain, printed),) = world.run(speak_once, cell.reference, size=1)
    ranks = world.run(speak_once, cell, size=cell.size)
    assert [said for _, said in ranks] == [printed, *[""] * (cell.size - 1)]
    for rank, (notes, _) in enumerate(ranks):
        for seen, other in zip(notes[:-1], plain[:-1], strict=True):
            own = {name: value for name, value in other.items() if rank == 0 or "hook" not in name}
            assert seen.pop("guarded_rows") == own.pop("guarded_rows") / 2
            torch.testing.assert_close(seen, own, rtol=2e-6, atol=1e-9)
        assert {name for name in notes[-1] if "hook" not in name} == {name for name in plain[-1] if "hook" not in name}


class Skips(LanguageModule):
    """Returns nothing from some step, on all ranks or on those of one replica."""

    def __init__(self, replica: int | None) -> None:
        super().__init__(blocks=2)
        self.replica = replica

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        mine = self.trainer.strategy.distributed_sampler_kwargs["rank"]
        return None if batch_idx == 1 and self.replica in (None, mine) else loss


def skip(cell: Cell, replica: int | None) -> list[Any]:
    return fit_and_test(cell, functools.partial(Skips, replica))


@pytest.mark.contract(
    "Loss", "`training_step` that returns `None`, on all ranks or on those of one replica only", "refused"
)
@pytest.mark.parametrize(
    ("cell", "replica"), [pytest.param(CHIMERA, None, marks=pytest.mark.long), (REPLICAS, 1)], ids=["all", "one"]
)
def test_a_step_that_returns_nothing_is_refused_and_nobody_waits(world: World, cell: Cell, replica: int | None) -> None:
    with pytest.raises(RankFailed, match=r"training_step returned NoneType without a loss.*must return the loss"):
        world.run(skip, cell, replica, size=cell.size, limit=20.0)


class ShowsItsLoss(LanguageModule):
    """Notes its loss as hooks are handed it, beside what it logs to the bar."""

    def __init__(self) -> None:
        super().__init__(blocks=2, lr=0.1)
        self.notes: list[float] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append(float(outputs["loss"]))


def show_the_loss(cell: Cell) -> list[Any]:
    return fit_and_test(cell, ShowsItsLoss, accumulate_grad_batches=cell.accumulate, log_every_n_steps=1)


@pytest.mark.contract(
    "Loss",
    "the train loss in the log, the bar and `on_train_batch_end` is the batch's, whatever `accumulate_grad_batches` and"
    " the number of microbatches",
)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("chimera", 2, microbatches=8, accumulate=3),
        pytest.param(Cell("1f1b", 2, microbatches=1, accumulate=3), marks=pytest.mark.long),
        pytest.param(Cell("gpipe", 2, microbatches=4, accumulate=1), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_the_loss_that_is_shown_is_the_batchs(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, show_the_loss)
    assert len(plain[-1]) == 8


class SyncsInSteps(LanguageModule):
    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.best = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric(dist_sync_on_step=True))


def sync_in_steps(cell: Cell) -> list[Any]:
    return fit_and_test(cell, SyncsInSteps)


@pytest.mark.contract(
    "Logging and metrics", "metrics with `dist_sync_on_step=True`: leave it out, values are of all ranks", "refused"
)
def test_metrics_that_sync_in_steps_are_refused_at_set_up(world: World) -> None:
    with pytest.raises(RankFailed, match=r"best\._base_metric.*MeanMetric.*dist_sync_on_step=True.*leave it out"):
        world.run(sync_in_steps, CHIMERA, size=2)


class LogsInBackward(LanguageModule):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.log("scaled", loss.detach())
        super().backward(loss, *args, **kwargs)


def log_in_backward(cell: Cell) -> list[Any]:
    return fit_and_test(cell, LogsInBackward)


@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` in a module's own `backward`, which runs once for each microbatch: log in `on_after_backward`",
    "refused",
)
def test_logging_in_backward_is_refused(world: World) -> None:
    with pytest.raises(RankFailed, match=r"self\.log was called in the backward.*on_after_backward"):
        world.run(log_in_backward, CHIMERA, size=2)
