"""The rows that a user's loader gives are the rows that are trained and evaluated on, each once."""

import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler, default_collate

from .fidelity import Cell, Experiment, Trained, check, make_trainer, train, usual_rows
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import World

CHIMERA = Cell("chimera", 4, accumulate=1)
REPLICAS = Cell("chimera", 2, replicas=2, accumulate=1)
COUNT = 32
"""Rows of an epoch, in 8 batches."""


class Reader(LanguageModule):
    """Notes the rows of each batch that it is handed."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[list[int]] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(batch["row"].tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        batch.pop("row")
        return super().training_step(batch, batch_idx)


def numbered(count: int = COUNT) -> list[Any]:
    return [{"row": number, **row} for number, row in enumerate(make_rows("gpt2", count))]


def reading(loader: DataLoader, **options: Any) -> Experiment:
    """Reads a loader, on ranks whose random numbers have nothing in common."""
    torch.manual_seed(int(os.environ["LOCAL_RANK"]))
    return Experiment(Reader(), loader, {"max_epochs": 2, "max_steps": -1, **options})


def seen_by_replica(world: World, cell: Cell, make: Any) -> list[list[list[int]]]:
    """The batches of each replica, after a check that all ranks of its group were handed the same."""
    ranks: list[Trained] = world.run(train, cell, make, size=cell.size)
    groups = [ranks[first : first + cell.stages] for first in range(0, cell.size, cell.stages)]
    for group in groups:
        assert all(seen.notes == group[0].notes for seen in group)
    return [group[0].notes for group in groups]


def rows_of(batches: list[list[int]]) -> list[int]:
    return [row for batch in batches for row in batch]


# ----------------------------------------------------------------------------------------------------------- samplers


def shuffled(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), 4, shuffle=True))


@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_a_shuffle_without_a_seed_gives_every_row_once_an_epoch(world: World, cell: Cell) -> None:
    replicas = seen_by_replica(world, cell, shuffled)
    half = 8 // cell.replicas
    first = [row for batches in replicas for row in rows_of(batches[:half])]
    second = [row for batches in replicas for row in rows_of(batches[half:])]
    assert sorted(first) == sorted(second) == list(range(COUNT))
    assert first != second
    assert first != sorted(first)


def in_order(cell: Cell) -> Experiment:
    return reading(make_loader(numbered(), 4), max_epochs=1)


def test_replicas_take_turns_in_the_users_order(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, in_order)
    batches = [list(range(start, start + 4)) for start in range(0, COUNT, 4)]
    assert (even, odd) == (batches[::2], batches[1::2])


def weighted(cell: Cell) -> Experiment:
    sampler = WeightedRandomSampler([float(number % 2) for number in range(COUNT)], COUNT)
    return reading(DataLoader(numbered(), 4, sampler=sampler))


def test_a_weighted_sampler_is_honoured(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, weighted)
    assert {row % 2 for row in rows_of(even + odd)} == {1}
    assert len(even) == len(odd) == 8
    assert even != odd


class Growing:
    """Batches of 1, 2, 3, ... rows."""

    def __iter__(self) -> Iterator[list[int]]:
        start = 0
        for size in range(1, len(self) + 1):
            yield list(range(start, start + size))
            start += size

    def __len__(self) -> int:
        return 6


def growing(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), batch_sampler=Growing()), max_epochs=1)


def growing_list(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), batch_sampler=list(Growing())), max_epochs=1)


@pytest.mark.contract("Data", "a batch sampler of one's own is honoured, be it an object or a list of batches")
@pytest.mark.parametrize("make", [growing, growing_list])
def test_a_batch_sampler_of_ones_own_is_honoured(world: World, make: Any) -> None:
    even, odd = seen_by_replica(world, REPLICAS, make)
    batches = list(Growing())
    assert (even, odd) == (batches[::2], batches[1::2])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from numbered()


class SizedStream(Stream):
    def __len__(self) -> int:
        return COUNT


def stream(cell: Cell) -> Experiment:
    return reading(DataLoader(Stream(), 4))


def sized_stream(cell: Cell) -> Experiment:
    return reading(DataLoader(SizedStream(), 4))


@pytest.mark.parametrize("make", [stream, sized_stream])
def test_replicas_take_turns_in_a_stream(world: World, make: Any) -> None:
    even, odd = seen_by_replica(world, REPLICAS, make)
    batches = [list(range(start, start + 4)) for start in range(0, COUNT, 4)]
    assert (even, odd) == (batches[::2] * 2, batches[1::2] * 2)


def with_workers(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), 4, shuffle=True, num_workers=2), max_epochs=2)


@pytest.mark.parametrize("cell", [Cell("1f1b", 2, accumulate=1), REPLICAS], ids=str)
def test_workers_load_every_row_once_an_epoch(world: World, cell: Cell) -> None:
    replicas = seen_by_replica(world, cell, with_workers)
    half = 8 // cell.replicas
    assert sorted(row for batches in replicas for row in rows_of(batches[:half])) == list(range(COUNT))


class RandomMasks:
    """Masks other tokens each time that a row is collated."""

    def __call__(self, rows: list[Any]) -> Any:
        batch = default_collate(rows)
        batch["labels"] = batch["labels"].masked_fill(torch.rand(batch["labels"].shape) < 0.3, -100)
        batch["row"] = batch["labels"].sum(1)
        return batch


def random_masks(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), 4, collate_fn=RandomMasks()))


class Augmenting(Reader):
    """Adds something random after the batch has been moved."""

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["row"] = torch.randint(1000, batch["row"].shape)
        return batch


def augmenting(cell: Cell) -> Experiment:
    return replace(reading(make_loader(numbered(), 4)), module=Augmenting())


@pytest.mark.parametrize("make", [random_masks, augmenting])
def test_what_is_random_in_a_batch_is_the_same_on_all_ranks_of_a_group(world: World, make: Any) -> None:
    even, odd = seen_by_replica(world, REPLICAS, make)
    assert even[:4] != even[4:]
    assert even != odd


# ------------------------------------------------------------------------------------------------------------- lengths


def epochs_of(cell: Cell, count: int, options: dict[str, Any]) -> dict[str, Any]:
    """Trains on some rows and tells the lengths of an epoch."""
    found: dict[str, Any] = {}

    class Asking(Reader):
        def configure_optimizers(self) -> Any:
            found["estimated"] = self.trainer.estimated_stepping_batches
            return super().configure_optimizers()

    trainer = make_trainer(cell, **{"max_epochs": 2, **options})
    module = Asking()
    trainer.fit(module, make_loader(numbered(count), 4))
    return {**found, "batches": trainer.num_training_batches, "steps": trainer.global_step, "rows": module.notes}


def test_an_epoch_has_a_batch_for_every_replica(world: World) -> None:
    for ranks in (world.run(epochs_of, REPLICAS, 24, {"accumulate_grad_batches": 3}, size=4),):
        for told in ranks:
            assert (told["estimated"], told["batches"], told["steps"]) == (2, 3, 2)
    for told in world.run(epochs_of, CHIMERA, 24, {"limit_train_batches": 2}, size=4):
        assert (told["estimated"], told["batches"], told["steps"]) == (4, 2, 4)


def test_a_batch_without_a_partner_is_left_out_of_training(world: World) -> None:
    ranks = world.run(epochs_of, REPLICAS, 18, {"max_epochs": 1}, size=4)
    for told in ranks:
        assert (told["estimated"], told["batches"], told["steps"]) == (2, 2, 2)
    assert sorted(rows_of(ranks[0]["rows"] + ranks[2]["rows"])) == list(range(16))


def several_epochs(cell: Cell) -> Experiment:
    loader = make_loader(make_rows("gpt2", 5 * cell.replicas * ROWS), cell.batch_size)
    return Experiment(LanguageModule(), loader, {"limit_train_batches": 2, "max_epochs": 3, "max_steps": -1})


def less_than_a_window(cell: Cell) -> Experiment:
    loader = make_loader(make_rows("gpt2", 3 * cell.replicas * ROWS), cell.batch_size)
    options = {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": -1, "gradient_clip_val": 0.05}
    return Experiment(LanguageModule(), loader, options)


def less_than_a_batch(cell: Cell) -> Experiment:
    return Experiment(LanguageModule(), make_loader(make_rows("gpt2", 3), ROWS), {"max_epochs": 2, "max_steps": -1})


@pytest.mark.parametrize(
    ("cell", "make"),
    [(REPLICAS, several_epochs), (REPLICAS, less_than_a_window), (CHIMERA, less_than_a_batch)],
    ids=str,
)
def test_short_epochs_train_alike(world: World, cell: Cell, make: Any) -> None:
    check(world, cell, make)


class Validates(LanguageModule):
    def on_validation_epoch_end(self) -> None:
        self.notes = [*getattr(self, "notes", []), float(self.trainer.callback_metrics["val_loss"])]


def thirteen_rows(cell: Cell) -> Experiment:
    loaders = {
        "train_dataloaders": make_loader(usual_rows(cell), cell.batch_size),
        "val_dataloaders": make_loader(make_rows(cell.model, 13, seed=1), 4),
    }
    return Experiment(Validates(cell.model), loaders, {"val_check_interval": 2})


class LogsRows(Validates):
    """Logs a mean over the rows."""

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        losses = torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels.clamp(min=0), reduction="none")
        self.log("val_loss", losses.mean())


def thirteen_rows_alone(cell: Cell) -> Experiment:
    return replace(thirteen_rows(cell), module=LogsRows(cell.model))


@pytest.mark.parametrize("make", [thirteen_rows, thirteen_rows_alone])
@pytest.mark.parametrize("cell", [REPLICAS, Cell("1f1b", 1, replicas=3, accumulate=1)], ids=str)
def test_every_validation_row_counts_once(world: World, cell: Cell, make: Any) -> None:
    plain, ranks = check(world, cell, make)
    assert len(plain.notes) > 1
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=1e-6, atol=0.0)


# -------------------------------------------------------------------------------------------------------------- shapes


class Nested(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        rows = len(batch["names"])
        assert batch["names"] == [f"row {number}" for number in batch["numbers"][0].tolist()]
        assert batch["numbers"][0].shape == (rows,)
        assert (batch["nothing"], batch["count"], batch["kind"]) == (None, 3, "text")
        assert batch["weights"]["w"].dtype == torch.float64
        loss = self.model(**batch["text"], labels=batch["labels"]).loss
        self.log("train_loss", loss)
        return loss


class NestedRows:
    def __call__(self, rows: list[Any]) -> Any:
        text = default_collate([{name: row[name] for name in ("input_ids", "attention_mask")} for row in rows])
        return {
            "count": 3,
            "kind": "text",
            "nothing": None,
            "names": [f"row {row['row']}" for row in rows],
            "numbers": (torch.tensor([row["row"] for row in rows]),),
            "text": text,
            "labels": torch.stack([row["labels"] for row in rows]),
            "weights": {"w": torch.ones(len(rows), dtype=torch.float64)},
        }


def nested(cell: Cell) -> Experiment:
    rows = numbered(10 * cell.replicas * ROWS - 3)
    return Experiment(Nested(), make_loader(rows, cell.batch_size, collate_fn=NestedRows()))


class Pairs(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        loss = self.model(input_ids=ids, labels=labels).loss
        self.log("train_loss", loss)
        return loss


def pairs(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    data = TensorDataset(*(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")))
    return Experiment(Pairs(), DataLoader(data, cell.batch_size))


@pytest.mark.parametrize(("cell", "make"), [(CHIMERA, nested), (CHIMERA, pairs), (REPLICAS, pairs)], ids=str)
def test_a_batch_may_have_any_structure(world: World, cell: Cell, make: Any) -> None:
    check(world, cell, make)
