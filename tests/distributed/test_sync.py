"""Gradients are summed where the schedule says, and are those of one process wherever that is."""

from itertools import product
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from lightning_chimera import ChimeraStrategy
from lightning_chimera.runtime.gradients import GradientSync
from lightning_chimera.schedules import Kind
from lightning_chimera.timeline import SyncPolicy, Timeline

from .fidelity import (
    Cell,
    Experiment,
    Make,
    check,
    label,
    make_trainer,
    same_changes,
    same_copies,
    train,
    usual,
    usual_rows,
)
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World


def cell(policy: str, schedule: str = "chimera", stages: int = 4, **options: Any) -> Cell:
    return Cell(schedule, stages, strategy=(("gradient_sync", policy),), **options)


LAYOUTS: list[tuple[str, int, dict[str, Any]]] = [
    ("chimera", 4, {}),
    ("chimera", 2, {"replicas": 2}),
    ("chimera_split", 4, {}),
    ("chimera_halving", 2, {"tied": False}),
    ("1f1b", 2, {"replicas": 2, "microbatches": 3}),
    ("hanayo", 2, {"replicas": 2}),
    ("zb_v", 2, {"replicas": 2}),
    ("dualpipe_v", 2, {}),
    ("gems", 4, {}),
]
MATRIX = [cell(policy, name, stages, **options) for (name, stages, options), policy in product(LAYOUTS, SyncPolicy)]
SAMPLE = [cell("lazy"), *(cell("eager", *LAYOUTS[number][:2], **LAYOUTS[number][2]) for number in (0, 2, 4, 5, 6))]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_wherever_gradients_are_summed_they_are_those_of_one_process(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [other for other in MATRIX if other not in SAMPLE], ids=str)
def test_so_they_are_for_all_others(world: World, cell: Cell) -> None:
    check(world, cell)


# -------------------------------------------------------------------------------------------------------------- places


class Timelines(Callback):
    """Notes the timeline of each batch."""

    def __init__(self) -> None:
        self.seen: list[Timeline] = []

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        assert isinstance(trainer.strategy, ChimeraStrategy)
        timeline = trainer.strategy.timeline()
        assert timeline is not None
        self.seen.append(timeline)


def timelines(cell: Cell, rows: int = ROWS) -> list[Timeline]:
    callback = Timelines()
    trainer = make_trainer(cell, max_epochs=2, callbacks=[callback])
    trainer.fit(LanguageModule(exact=False, tied=cell.tied), make_loader(make_rows("gpt2", rows)))
    return callback.seen


def ends_of(timeline: Timeline, rank: int, stages: tuple[int, ...]) -> float:
    """When the last gradient of some stages is there on a rank."""
    kinds = Kind.BACKWARD, Kind.WEIGHT
    ends = [span.end for span in timeline.of_rank(rank) if span.action.kind in kinds and span.action.stage in stages]
    return max(ends, default=0.0)


EARLY = {"eager": {3, 2}, "eager-opt": {3}, "hidden": {3, 2}, "lazy": set[int]()}
"""The stages whose sums start within the rows of Chimera: the others end their rows."""


@pytest.mark.parametrize("policy", EARLY)
def test_a_sum_starts_behind_the_last_gradient_of_its_stage_and_before_the_next_action(
    world: World, policy: str
) -> None:
    for timeline in world.run(timelines, cell(policy, tied=False), size=4)[0]:
        early = set()
        for sync in timeline.syncs:
            (rank,) = sync.ranks
            row, ready = timeline.of_rank(rank), ends_of(timeline, rank, sync.stages)
            assert ready <= sync.start <= sync.end
            if sync.start < row[-1].start:
                early |= set(sync.stages)
                assert all(sync.start <= span.start for span in row if span.start >= ready)
        assert early == EARLY[policy]


def test_the_sum_of_a_tied_table_starts_behind_both_end_stages(world: World) -> None:
    (timeline, _) = world.run(timelines, cell("eager"), size=4)[0]
    tied = [sync for sync in timeline.syncs if {0, 3} <= set(sync.stages)]
    assert sorted(sync.ranks for sync in tied) == [(0,), (3,)]
    for sync in tied:
        assert sync.start >= ends_of(timeline, sync.ranks[0], (0, 3))


def test_sums_start_in_one_order_on_all_ranks_of_a_batch_with_few_rows_too(world: World) -> None:
    for timeline in world.run(timelines, cell("eager", "chimera_split", tied=False), ROWS + 1, size=4)[0]:
        order = [
            [sync.stages for sync in sorted(timeline.syncs, key=lambda sync: sync.start) if rank in sync.ranks]
            for rank in range(4)
        ]
        assert order == [[(3,), (0,)], [(2,), (1,)], [(2,), (1,)], [(3,), (0,)]]


# ---------------------------------------------------------------------------------------------------------- odd batches


class MakesLabels(LanguageModule):
    """Makes its labels in the step, so that nobody knows before how many there are."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch = {**batch, "labels": torch.where(batch["input_ids"] % 3 == 0, -100, batch["input_ids"])}
        loss = self.model(**batch).loss
        self.log("train_loss", loss)
        return loss


def second_batch_without_labels(cell: Cell) -> Experiment:
    """The last batch of a window has no label, so what is summed is what the batch before it has left."""
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        if number // ROWS in (1, 5):
            row["labels"] = torch.full_like(row["labels"], -100)
    return usual(cell, LanguageModule(cell.model), rows)


def a_short_batch_on_one_replica(cell: Cell) -> Experiment:
    """In the last step one replica has a batch of three rows, and runs another schedule than the other."""
    return usual(cell, LanguageModule(cell.model), usual_rows(cell)[: 3 - ROWS])


class Thaws(LanguageModule):
    """Trains its blocks from the third step on, and never a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.model.transformer.h.requires_grad_(False)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 4:
            self.model.transformer.h.requires_grad_(True)
            for block in self.model.transformer.h:
                block.ln_1.requires_grad_(False)


class LeavesOut(LanguageModule):
    """Uses a layer of its own in every other batch only, and another one never."""

    def __init__(self) -> None:
        super().__init__()
        self.sometimes, self.never = torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(**batch)
        loss = output.loss * self.sometimes.prod() if batch_idx % 3 == 0 else output.loss
        self.log("train_loss", loss)
        return loss

    def microbatch_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


class TakesAwayOnOneRank(LanguageModule):
    """Uses a layer in the first batch of a window only, and takes its gradient away there on one rank."""

    def __init__(self) -> None:
        super().__init__()
        self.first = torch.nn.Parameter(torch.ones(2))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.model(**batch).loss * (self.first.prod() if batch_idx % 2 == 0 else 1.0)
        self.log("train_loss", loss)
        return loss

    def microbatch_weight(self, batch: Any) -> Tensor:
        return (batch["labels"][:, 1:] != -100).sum()

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx % 2 == 0 and self.trainer.global_rank == 0:
            self.first.grad = None


class ZeroesInPlace(LanguageModule):
    """Keeps the memory of its gradients, into which the next sums must not write while they are used."""

    def on_before_zero_grad(self, optimizer: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if not parameter.is_meta]
        copies = getattr(self, "copies", [None] * len(gradients))
        assert all(copy is None or torch.equal(copy, own) for copy, own in zip(copies, gradients, strict=True))

    def on_train_batch_end(self, *_: Any) -> None:
        gradients = [parameter.grad for parameter in self.parameters() if not parameter.is_meta]
        self.copies = [None if gradient is None else gradient.clone() for gradient in gradients]

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize(
    ("cell", "make"),
    [
        (cell("eager", clip=False), MakesLabels),
        (cell("eager", stages=2, replicas=2), a_short_batch_on_one_replica),
        (cell("eager"), Thaws),
        (cell("eager", clip=False), LeavesOut),
        (cell("eager"), ZeroesInPlace),
    ],
    ids=label,
)
def test_sums_that_started_early_are_right_for_odd_batches_too(world: World, cell: Cell, make: Make) -> None:
    check(world, cell, make)


def test_a_last_batch_that_counts_nothing_leaves_the_sum_of_those_before(world: World) -> None:
    masked = cell("eager", model="bert", clip=False)
    (plain,) = world.run(train, masked.reference, second_batch_without_labels, size=1)
    ranks = world.run(train, masked, second_batch_without_labels, size=4)
    same_changes(ranks[0], plain)
    same_copies(ranks)


@pytest.mark.parametrize("policy", ["eager", "lazy"])
def test_copies_stay_equal_where_a_hook_takes_a_gradient_away_on_one_rank(world: World, policy: str) -> None:
    ranks = world.run(train, cell(policy, stages=2, clip=False), TakesAwayOnOneRank, size=2)
    same_copies(ranks)
    assert not torch.equal(ranks[0].before["first"], ranks[0].after["first"])


class Adam(LanguageModule):
    """Steps by an optimizer that works on all gradients at once."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, eps=1e-4, **self.options)


def fused(cell: Cell) -> Experiment:
    return usual(cell, Adam(fused=True))


def foreach(cell: Cell) -> Experiment:
    return usual(cell, Adam(foreach=True))


@pytest.mark.contract("The module", "optimizers with `fused=True` or `foreach=True`")
@pytest.mark.parametrize("make", [fused, foreach])
def test_optimizers_that_take_all_gradients_at_once_train_alike(world: World, make: Make) -> None:
    check(world, cell("eager", stages=2), make)


class Fails(LanguageModule):
    """Raises on one rank while sums are under way that others have not started."""

    def on_train_start(self) -> None:
        start = GradientSync.start

        def start_and_fail(sync: GradientSync, count: int | None = None) -> None:
            start(sync, count)
            if sync.under_way and self.trainer.global_rank == 0:
                raise ValueError("this rank fails")

        GradientSync.start = start_and_fail  # type: ignore[method-assign]


def test_a_rank_that_fails_while_sums_are_under_way_ends_all(world: World) -> None:
    with pytest.raises(RankFailed, match="this rank fails"):
        world.run(train, cell("eager"), Fails, size=4, limit=25)


def test_an_unknown_policy_is_refused() -> None:
    with pytest.raises(ValueError, match="gradient_sync='soon': it must be one of eager, eager-opt, hidden, lazy"):
        ChimeraStrategy(gradient_sync="soon")  # type: ignore[arg-type]
