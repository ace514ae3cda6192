"""Batches of unusual forms are split by rows, or as the module says."""

from typing import Any

import pytest
import torch

from .fidelity import Cell, Experiment, check, label, usual_rows
from .users import ROWS, LanguageModule, Row, make_loader
from .world import World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
SINGLE = Cell("1f1b", 1)


class StacksSamples(LanguageModule):
    """Gets a list of rows and makes a batch of them itself."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(self.stack(batch), batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        # With a size: without one a plain process takes the length of the first tensor that it finds.
        self.log("val_loss", self.model(**self.stack(batch)).loss, batch_size=len(batch))

    def on_validation_end(self) -> None:
        self.notes = float(self.trainer.callback_metrics["val_loss"])

    @staticmethod
    def stack(rows: list[Any]) -> Row:
        if isinstance(rows[0], tuple):
            rows = [dict(zip(("input_ids", "labels"), row, strict=True)) for row in rows]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


def as_they_are(rows: list[Any]) -> list[Any]:
    return rows


def samples(cell: Cell, rows: list[Any]) -> Experiment:
    options = {"collate_fn": as_they_are}
    validation = make_loader(rows[:13], 4, **options)
    loaders = {"train_dataloaders": make_loader(rows, cell.batch_size, **options), "val_dataloaders": validation}
    return Experiment(StacksSamples(), loaders, {"val_check_interval": 4})


def list_of_dicts(cell: Cell) -> Experiment:
    return samples(cell, usual_rows(cell))


def list_of_tuples(cell: Cell) -> Experiment:
    return samples(cell, [(row["input_ids"], row["labels"]) for row in usual_rows(cell)])


@pytest.mark.contract("Data", "a batch that is a list of samples")
@pytest.mark.parametrize(
    ("cell", "make"), [(CHIMERA, list_of_dicts), (REPLICAS, list_of_dicts), (CHIMERA, list_of_tuples)], ids=label
)
def test_a_list_of_samples_is_cut_between_them(world: World, cell: Cell, make: Any) -> None:
    plain, ranks = check(world, cell, make)
    assert [seen.notes for seen in ranks] == pytest.approx([plain.notes] * cell.size, rel=2e-6)


class SplitsByColumns(LanguageModule):
    """Has its rows in the columns of its batch, and says so."""

    def microbatch_split(self, batch: Row, num_microbatches: int) -> list[Row]:
        count = min(num_microbatches, batch["input_ids"].shape[1])
        parts = {name: value.chunk(count, dim=1) for name, value in batch.items()}
        return [dict(zip(parts, values, strict=True)) for values in zip(*parts.values(), strict=True)]

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return super().training_step({name: value.T.contiguous() for name, value in batch.items()}, batch_idx)


def columns(rows: list[Row]) -> Row:
    return {name: torch.stack([row[name] for row in rows], dim=1) for name in rows[0]}


def in_columns(cell: Cell) -> Experiment:
    rows = usual_rows(cell)[: 8 * ROWS * cell.replicas]  # the parts are even, as their rows can't be counted
    return Experiment(SplitsByColumns(), make_loader(rows, cell.batch_size, collate_fn=columns), {"max_steps": 4})


@pytest.mark.contract("Data", "a `microbatch_split` hook")
@pytest.mark.parametrize("cell", [CHIMERA, Cell("1f1b", 2, replicas=2, microbatches=2)], ids=str)
def test_a_module_may_split_its_batch_itself(world: World, cell: Cell) -> None:
    check(world, cell, in_columns)


class Spells(LanguageModule):
    """Gets texts and makes ids of them, as long as the longest."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        longest = max(len(text) for text in batch["text"])
        ids = torch.tensor([[ord(letter) % 99 for letter in text.ljust(longest)] for text in batch["text"]])
        return super().training_step({"input_ids": ids, "labels": ids}, batch_idx)


def texts(cell: Cell) -> Experiment:
    lengths = [3 + number // (2 * ROWS) for number in range(len(usual_rows(cell)))]  # change from batch to batch
    rows = [{"text": "abcdefghijklmnop"[number % 3 :][:length]} for number, length in enumerate(lengths)]
    return Experiment(Spells(), make_loader(rows, cell.batch_size))


@pytest.mark.contract("Data", "a training step that tokenizes its texts")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_texts_of_any_length_may_be_made_ids_in_the_step(world: World, cell: Cell) -> None:
    check(world, cell, texts)


class CropsPadding(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        longest = int(batch["attention_mask"].sum(1).max())
        return super().training_step({name: value[:, :longest] for name, value in batch.items()}, batch_idx)


@pytest.mark.contract("Data", "a training step that crops by the contents of its batch, with one stage")
def test_a_single_stage_may_crop_by_the_contents_of_a_batch(world: World) -> None:
    check(world, SINGLE, CropsPadding)
