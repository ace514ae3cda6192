"""Rows of any number and length, cut into microbatches, count as in one process."""

import math
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

from lightning_chimera.schedules import Action, Kind, Placement, Schedule

from .fidelity import (
    STEPS,
    Cell,
    Experiment,
    Make,
    check,
    label,
    same_changes,
    same_copies,
    train,
    train_plainly,
    usual,
    usual_rows,
)
from .users import LENGTH, ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


def rows_per_batch(cell: Cell, sizes: list[int], **options: Any) -> Experiment:
    rows = [row for row in make_rows(cell.model, 2 * sum(sizes)) if bool((row["labels"][1:] != -100).any())]
    ends = list(accumulate(sizes))
    batches = [list(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]
    return Experiment(LanguageModule(cell.model), make_loader(rows, 1, batch_sampler=batches), options)


def few_rows(cell: Cell) -> Experiment:
    return rows_per_batch(cell, [8, 3, 8, 1, 5, 2, 8, 7, 1, 4])


def one_row(cell: Cell) -> Experiment:
    return rows_per_batch(cell, [1] * 4, max_epochs=2, max_steps=-1)


@pytest.mark.contract(
    "Data", "batches of fewer rows than microbatches or stages, and of one row", reported="TT#784, TT#775"
)
@pytest.mark.parametrize("cell", [CHIMERA, Cell("1f1b", 2, microbatches=8), BERT], ids=str)
@pytest.mark.parametrize("make", [few_rows, one_row])
def test_a_batch_may_have_fewer_rows_than_microbatches(world: World, make: Make, cell: Cell) -> None:
    check(world, cell, make)


def two_heads(num_ranks: int, num_microbatches: int) -> Schedule:
    """Pipes that part at the first stage, so that two of three ranks run some of the microbatches only."""
    pipes, rows = ((0, 2), (1, 2)), [list[Action]() for _ in range(num_ranks)]
    for microbatch in range(num_microbatches):
        pipe = microbatch % 2
        first, last = pipes[pipe]
        for stage, kind in ((0, Kind.FORWARD), (1, Kind.FORWARD), (1, Kind.BACKWARD), (0, Kind.BACKWARD)):
            rows[last if stage else first].append(Action(stage, kind, microbatch, pipe))
    return Schedule("two heads", Placement(pipes), num_microbatches, tuple(map(tuple, rows)))


def sizes_move(cell: Cell) -> Experiment:
    """A microbatch of one row is in the first pipe, and later in both, as are one of two rows and one of a batch."""
    return rows_per_batch(cell, [3, 2, 4, 1, 4, 3, 2, 8, 6, 3])


@pytest.mark.contract("Data", "shapes that are new to some ranks of a pipeline and not to others")
@pytest.mark.parametrize("shares", [False, True], ids=["messages", "memory"])
def test_shapes_may_be_new_to_some_ranks_only(world: World, shares: bool) -> None:
    options = (("schedule", two_heads), ("shared_memory", shares), ("timeout", 10))
    cell = Cell(stages=3, microbatches=2, strategy=options)
    plain = train_plainly(world, cell.reference, sizes_move)
    ranks = world.run(train, cell, sizes_move, size=3, limit=60)
    same_changes(ranks[0], plain)
    same_copies(ranks)


def lengths_change(cell: Cell) -> Experiment:
    lengths = [16, 9, 31, 16, 5, 31, 9, 16, 30, 2]
    rows = [row for length in lengths for row in make_rows(cell.model, ROWS, length=length)]
    validation = make_loader(make_rows(cell.model, 5, length=6), 3)
    loaders = {"train_dataloaders": make_loader(rows, ROWS), "val_dataloaders": validation}
    return Experiment(LanguageModule(cell.model), loaders, {"val_check_interval": 1, "num_sanity_val_steps": 2})


@pytest.mark.contract("Data", "lengths that change from batch to batch and in validation", reported="DS#5696, DS#3649")
@pytest.mark.parametrize("cell", [CHIMERA, BERT], ids=str)
def test_lengths_may_change_between_batches_and_in_validation(world: World, cell: Cell) -> None:
    check(world, cell, lengths_change)


class Masks(LanguageModule):
    """Hands the model its masks and positions in less common forms."""

    def __init__(self, form: str) -> None:
        super().__init__()
        self.form = form

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        mask = batch["attention_mask"]
        if self.form == "bool":
            batch["attention_mask"] = mask.bool()
        elif self.form == "float":
            batch["attention_mask"] = mask.to(self.dtype)
        elif self.form == "none":
            del batch["attention_mask"]
        elif self.form == "4d":
            causal = torch.ones(mask.shape[1], mask.shape[1], dtype=torch.bool).tril()
            batch["attention_mask"] = causal & mask[:, None, None, :].bool()
        elif self.form == "positions":
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        return super().training_step(batch, batch_idx)


def masks(cell: Cell, form: str) -> Experiment:
    rows = usual_rows(cell)
    if form == "positions":  # padded on the left
        rows = [{name: value.flip(0) for name, value in row.items()} for row in rows]
    return usual(cell, Masks(form), rows)


def bool_mask(cell: Cell) -> Experiment:
    return masks(cell, "bool")


def float_mask(cell: Cell) -> Experiment:
    return masks(cell, "float")


def no_mask(cell: Cell) -> Experiment:
    return masks(cell, "none")


def square_mask(cell: Cell) -> Experiment:
    return masks(cell, "4d")


def padded_left(cell: Cell) -> Experiment:
    return masks(cell, "positions")


@pytest.mark.contract("Data", "masks as bool, int, float or 4-D tensors, or none", reported="DS#969, TT#1723")
@pytest.mark.parametrize("make", [bool_mask, float_mask, no_mask, square_mask, padded_left])
def test_masks_may_have_any_form(world: World, make: Make) -> None:
    check(world, CHIMERA, make)


class Crops(LanguageModule):
    """Trains on a part of each row only, as long as the batch's shape says."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        half = batch["input_ids"].shape[1] // 2 + 1
        return super().training_step({name: value[:, :half] for name, value in batch.items()}, batch_idx)


class CropsPadding(LanguageModule):
    """Leaves out what is padding in all rows, so the length depends on what the batch holds."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        longest = int(batch["attention_mask"].sum(1).max())
        return super().training_step({name: value[:, :longest] for name, value in batch.items()}, batch_idx)


@pytest.mark.contract("Data", "a training step that crops by the shape of its batch")
def test_a_step_may_crop_by_the_shape_of_a_batch(world: World) -> None:
    check(world, CHIMERA, Crops)


@pytest.mark.contract("Data", "a training step that crops by the contents of its batch, over several stages", "refused")
def test_a_step_that_crops_by_the_contents_of_a_batch_is_told_not_to(world: World) -> None:
    with pytest.raises(RankFailed, match="crop or pad in the data loader, not in the step"):
        world.run(train, Cell("1f1b", 2), CropsPadding, size=2)


class Collated:
    """Rows with one row of positions for the whole batch, as some collate functions make them."""

    def __call__(self, rows: list[Row]) -> Any:
        batch = torch.utils.data.default_collate(rows)
        batch["position_ids"] = torch.arange(LENGTH).flip(0)[None]
        return batch


def shared_positions(cell: Cell) -> Experiment:
    loader = make_loader(usual_rows(cell), cell.batch_size, collate_fn=Collated())
    return Experiment(LanguageModule(cell.model), loader)


@pytest.mark.contract("Data", "tensors of a batch that are not batch-sized", reported="TT#1723")
def test_what_has_no_rows_goes_to_every_microbatch(world: World) -> None:
    check(world, REPLICAS, shared_positions)


def without_labels(cell: Cell, *numbers: int, **options: Any) -> Experiment:
    """Trains on the usual rows, of which some batches of each window of two have no label."""
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        if number // ROWS % (2 * cell.replicas) in numbers:
            row["labels"] = torch.full_like(row["labels"], -100)
    return usual(cell, LanguageModule(cell.model), rows, **options)


def a_replica_without_labels(cell: Cell) -> Experiment:
    return without_labels(cell, 0, 3)


def half_a_batch_without_labels(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        if number % ROWS < ROWS // 2:
            row["labels"] = torch.full_like(row["labels"], -100)
    return usual(cell, LanguageModule(cell.model), rows)


@pytest.mark.contract("Loss", "microbatches, pipes and replicas in which every label is -100 count for nothing")
@pytest.mark.parametrize(
    ("cell", "make"),
    [
        (Cell("chimera", 2, microbatches=4), half_a_batch_without_labels),
        (replace(REPLICAS, schedule="gpipe"), a_replica_without_labels),
    ],
    ids=label,
)
def test_a_part_without_any_label_counts_for_nothing(world: World, cell: Cell, make: Make) -> None:
    check(world, cell, make)


def no_labels_at_all(cell: Cell) -> Experiment:
    return without_labels(cell, 0, 1)


@pytest.mark.contract(
    "Loss",
    "a window of batches in which every label is -100 has losses NaN as in DDP, but no gradient, where DDP's are NaN",
    "differs",
)
def test_a_window_without_any_label_changes_nothing(world: World) -> None:
    for seen in world.run(train, Cell("chimera", 2), no_labels_at_all, size=2):
        assert all(map(math.isnan, seen.losses))
        assert len(seen.losses) == 2 * STEPS
        torch.testing.assert_close(seen.after, seen.before, rtol=0.0, atol=0.0)


def padded_rows(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    for row in rows[3::4]:
        row.update(
            input_ids=torch.zeros_like(row["input_ids"]),
            attention_mask=torch.zeros_like(row["attention_mask"]),
            labels=torch.full_like(row["labels"], -100),
        )
    return usual(cell, LanguageModule(cell.model, attention=cell.attention), rows)


@pytest.mark.contract("Data", "rows that are padding only add nothing", reported="PT#103749, HF#31035")
@pytest.mark.parametrize(
    "cell", [Cell("chimera", 2, attention="eager"), Cell("1f1b", 2, model="bert"), Cell("gpipe", 4)], ids=str
)
def test_rows_of_padding_only_add_nothing(world: World, cell: Cell) -> None:
    plain, _ = check(world, cell, padded_rows)
    assert all(torch.isfinite(value).all() for value in plain.after.values())


@pytest.mark.contract("Loop", "four batches accumulated are the mean of their losses", reported="TT#1733, PT#144352")
@pytest.mark.parametrize("cell", [Cell("chimera", 2, accumulate=4)], ids=str)
def test_accumulated_gradients_are_not_scaled_again(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.contract("Data", "any number of microbatches, whether or not it divides the rows or the stages")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("chimera", 2, microbatches=5),
        Cell("1f1b", 4, microbatches=7),
        *(
            pytest.param(Cell(schedule, stages, microbatches=count), marks=pytest.mark.long)
            for schedule in ("chimera", "gpipe", "1f1b")
            for stages in (2, 4)
            for count in (5, 7)
        ),
    ],
    ids=str,
)
def test_the_microbatches_need_not_divide_the_rows(world: World, cell: Cell) -> None:
    check(world, cell)
