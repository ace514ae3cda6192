"""The rows that a user's loader gives are the rows that are trained and evaluated on, each once."""

import os
import warnings
from collections import UserDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, is_dataclass, replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    TensorDataset,
    WeightedRandomSampler,
    default_collate,
)
from transformers import BatchEncoding, BatchFeature
from transformers.utils import ModelOutput

from .fidelity import Cell, Experiment, Trained, check, label, make_trainer, train, usual_rows
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

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


@pytest.mark.contract(
    "Data",
    "`shuffle=True` without a seed: all ranks of a group see the same rows, each once an epoch",
    reported="Lightning#5145, DS#5729",
)
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


@pytest.mark.contract(
    "Data", "batches are dealt to the replicas in turn, where DDP parts the rows", "differs", reported="Lightning#5145"
)
def test_replicas_take_turns_in_the_users_order(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, in_order)
    batches = [list(range(start, start + 4)) for start in range(0, COUNT, 4)]
    assert (even, odd) == (batches[::2], batches[1::2])


def weighted(cell: Cell) -> Experiment:
    sampler = WeightedRandomSampler([float(number % 2) for number in range(COUNT)], COUNT)
    return reading(DataLoader(numbered(), 4, sampler=sampler))


@pytest.mark.contract("Data", "custom and weighted samplers", reported="Lightning#2020")
def test_a_weighted_sampler_is_honoured(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, weighted)
    assert {row % 2 for row in rows_of(even + odd)} == {1}
    assert len(even) == len(odd) == 8
    assert even != odd


def of_replicas(loader_of: Any, **options: Any) -> Experiment:
    """Reads a loader that the module makes, when the ranks are known, as scripts for several processes do."""
    experiment = reading(make_loader(numbered(), 4), max_epochs=1, **options)
    module = experiment.module
    module.train_dataloader = lambda: loader_of(module.trainer)
    return replace(experiment, loader={"train_dataloaders": None})


def sampled_by_ranks(cell: Cell) -> Experiment:
    return of_replicas(lambda trainer: DataLoader(numbered(), 4, sampler=DistributedSampler(numbered())))


def batched_by_ranks(cell: Cell) -> Experiment:
    def loader(trainer: L.Trainer) -> DataLoader:
        sampler = DistributedSampler(numbered(), num_replicas=trainer.world_size, rank=trainer.global_rank)
        return DataLoader(numbered(), batch_sampler=BatchSampler(sampler, 4, drop_last=False))

    return of_replicas(loader, use_distributed_sampler=False)


def streamed_by_ranks(cell: Cell) -> Experiment:
    return of_replicas(lambda trainer: DataLoader(NodeStream(trainer.global_rank, trainer.world_size), 4))


@pytest.mark.contract(
    "Data", "a `DistributedSampler` or a stream split by node, over ranks instead of replicas", "refused"
)
@pytest.mark.parametrize(
    ("make", "given"),
    [
        (sampled_by_ranks, "DistributedSampler"),
        (batched_by_ranks, "DistributedSampler"),
        (streamed_by_ranks, "NodeStream"),
    ],
)
def test_shares_of_ranks_are_refused(world: World, make: Any, given: str) -> None:
    rule = "rows are shared between replicas, not ranks"
    remedy = r"Leave the sampler out.*\*\*trainer\.strategy\.distributed_sampler_kwargs"
    with pytest.raises(RankFailed, match=rf"{given} gives share \d of 4, but this rank belongs to .*{rule}.*{remedy}"):
        world.run(train, REPLICAS, make, size=4, limit=30)


def sampled_by_replicas(cell: Cell) -> Experiment:
    def loader(trainer: L.Trainer) -> DataLoader:
        sampler = DistributedSampler(numbered(), shuffle=True, **trainer.strategy.distributed_sampler_kwargs)
        return DataLoader(numbered(), 4, sampler=sampler)

    return of_replicas(loader)


def streamed_by_replicas(cell: Cell) -> Experiment:
    def loader(trainer: L.Trainer) -> DataLoader:
        share = trainer.strategy.distributed_sampler_kwargs
        return DataLoader(NodeStream(share["rank"], share["num_replicas"]), 4)

    return of_replicas(loader)


@pytest.mark.contract(
    "Data", "a `DistributedSampler` or a stream split by node, made by `trainer.strategy.distributed_sampler_kwargs`"
)
@pytest.mark.parametrize("make", [sampled_by_replicas, streamed_by_replicas])
def test_shares_of_replicas_are_taken_as_they_are(world: World, make: Any) -> None:
    even, odd = (rows_of(batches) for batches in seen_by_replica(world, REPLICAS, make))
    assert len(even) == len(odd) == COUNT // 2
    assert sorted(even + odd) == list(range(COUNT))
    if make is streamed_by_replicas:
        assert even == list(range(0, COUNT, 2))


def unequal_shares(cell: Cell) -> Experiment:
    """Each replica has a loader of its own: 5 batches of even rows, 3 of odd ones."""

    def loader(trainer: L.Trainer) -> DataLoader:
        replica = trainer.strategy.distributed_sampler_kwargs["rank"]
        return make_loader(numbered()[replica::2][: (18, 12)[replica]], 4)

    return of_replicas(loader, use_distributed_sampler=False)


@pytest.mark.contract(
    "Data", "`use_distributed_sampler=False`: each replica takes its own loader as it is, to the end of the shortest"
)
def test_without_a_distributed_sampler_each_replica_takes_its_own_loader(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, unequal_shares)
    assert rows_of(even) == list(range(0, 24, 2))
    assert rows_of(odd) == list(range(1, 24, 2))


def evaluate_unequal_shares(cell: Cell, rows: tuple[int, int]) -> dict[str, float]:
    trainer = make_trainer(cell, precision="64-true", use_distributed_sampler=False)

    class Shares(LanguageModule):
        def val_dataloader(self) -> DataLoader:
            replica = self.trainer.strategy.distributed_sampler_kwargs["rank"]
            return make_loader(make_rows("gpt2", sum(rows))[replica * rows[0] :][: rows[replica]], 2)

    torch.manual_seed(0)
    (found,) = trainer.validate(Shares(), verbose=False)
    return dict(found)


def evaluate_all(cell: Cell, count: int) -> dict[str, float]:
    torch.manual_seed(0)
    trainer = make_trainer(cell, precision="64-true")
    (found,) = trainer.validate(LanguageModule(), make_loader(make_rows("gpt2", count), 2), verbose=False)
    return dict(found)


@pytest.mark.contract("Data", "validation on loaders of unequal length over replicas uses every row of each")
@pytest.mark.parametrize("rows", [(6, 2), (2, 6)])
def test_unequal_loaders_of_replicas_are_evaluated_to_the_end(world: World, rows: tuple[int, int]) -> None:
    (plain,) = world.run(evaluate_all, REPLICAS.reference, 8, size=1)
    for found in world.run(evaluate_unequal_shares, REPLICAS, rows, size=4):
        assert found == pytest.approx(plain, rel=2e-6)


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


@pytest.mark.contract(
    "Data", "a batch sampler of one's own is honoured, be it an object or a list of batches", reported="Lightning#16772"
)
@pytest.mark.parametrize("make", [growing, growing_list])
def test_a_batch_sampler_of_ones_own_is_honoured(world: World, make: Any) -> None:
    even, odd = seen_by_replica(world, REPLICAS, make)
    batches = list(Growing())
    assert (even, odd) == (batches[::2], batches[1::2])


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        yield from numbered()


class NodeStream(IterableDataset):
    """A stream of which a node reads its share, known as ``datasets.distributed.split_dataset_by_node`` marks it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self._distributed = SimpleNamespace(rank=rank, world_size=world_size)

    def __iter__(self) -> Iterator[Any]:
        yield from numbered()[self._distributed.rank :: self._distributed.world_size]


class SizedStream(Stream):
    def __len__(self) -> int:
        return COUNT


def stream(cell: Cell) -> Experiment:
    return reading(DataLoader(Stream(), 4))


def sized_stream(cell: Cell) -> Experiment:
    return reading(DataLoader(SizedStream(), 4))


@pytest.mark.contract("Data", "iterable data sets, with a length or without")
@pytest.mark.parametrize("make", [stream, sized_stream])
def test_replicas_take_turns_in_a_stream(world: World, make: Any) -> None:
    even, odd = seen_by_replica(world, REPLICAS, make)
    batches = [list(range(start, start + 4)) for start in range(0, COUNT, 4)]
    assert (even, odd) == (batches[::2] * 2, batches[1::2] * 2)


def with_workers(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), 4, shuffle=True, num_workers=2), max_epochs=2)


def with_lasting_workers(cell: Cell) -> Experiment:
    return reading(DataLoader(numbered(), 4, shuffle=True, num_workers=2, persistent_workers=True), max_epochs=2)


@pytest.mark.contract("Data", "several workers, persistent or not", reported="DS#5729")
@pytest.mark.parametrize(
    ("cell", "make"), [(Cell("1f1b", 2, accumulate=1), with_workers), (REPLICAS, with_lasting_workers)], ids=label
)
def test_workers_load_every_row_once_an_epoch(world: World, cell: Cell, make: Any) -> None:
    replicas = seen_by_replica(world, cell, make)
    half = 8 // cell.replicas
    for epoch in (slice(half), slice(half, None)):
        assert sorted(row for batches in replicas for row in rows_of(batches[epoch])) == list(range(COUNT))


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


class Transfers(Reader):
    """Has all hooks of a batch's way to the device, each of which changes it."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["row"] = batch["row"] * 10 + 1
        return batch

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        batch["row"] = batch["row"] * 10 + 2
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        batch["row"] = batch["row"] * 10 + 3
        return batch


def transfers(cell: Cell) -> Experiment:
    return replace(reading(make_loader(numbered(), 4), max_epochs=1), module=Transfers())


@pytest.mark.contract("Data", "the hooks of a batch's transfer run once on each rank, in order")
def test_the_hooks_of_a_transfer_run_once_on_each_rank(world: World) -> None:
    even, odd = seen_by_replica(world, REPLICAS, transfers)
    numbers = [row * 1000 + 123 for row in range(COUNT)]
    batches = [numbers[start : start + 4] for start in range(0, COUNT, 4)]
    assert (even, odd) == (batches[::2], batches[1::2])


@pytest.mark.contract(
    "Data", "random collators, and random augmentation in `on_after_batch_transfer`", reported="DS#3131"
)
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


@pytest.mark.contract(
    "Loop",
    "`estimated_stepping_batches` and `num_training_batches` count the batches of one replica",
    reported="Lightning#12317",
)
def test_an_epoch_has_a_batch_for_every_replica(world: World) -> None:
    for ranks in (world.run(epochs_of, REPLICAS, 24, {"accumulate_grad_batches": 3}, size=4),):
        for told in ranks:
            assert (told["estimated"], told["batches"], told["steps"]) == (2, 3, 2)
    for told in world.run(epochs_of, CHIMERA, 24, {"limit_train_batches": 2}, size=4):
        assert (told["estimated"], told["batches"], told["steps"]) == (4, 2, 4)


@pytest.mark.contract("Data", "training ends an epoch with the shortest replica, where DDP repeats rows", "differs")
def test_a_batch_without_a_partner_is_left_out_of_training(world: World) -> None:
    ranks = world.run(epochs_of, REPLICAS, 18, {"max_epochs": 1}, size=4)
    for told in ranks:
        assert (told["estimated"], told["batches"], told["steps"]) == (2, 2, 2)
    assert sorted(rows_of(ranks[0]["rows"] + ranks[2]["rows"])) == list(range(16))


def train_nothing(cell: Cell, count: int, options: dict[str, Any]) -> tuple[int, list[str]]:
    """Trains on a loader that has no batch for each replica; tells the steps and the warnings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(cell, max_epochs=1)
        trainer.fit(LanguageModule(), DataLoader(numbered(count), 8, **options))
    return trainer.global_step, [str(warning.message) for warning in caught]


@pytest.mark.contract(
    "Data",
    "a loader with no batch at all, or none for each replica, trains nothing and a warning says so",
    reported="huggingface/datasets#7113",
)
@pytest.mark.parametrize(
    ("cell", "count", "options"),
    [(Cell("1f1b", 2), 3, {"drop_last": True}), (REPLICAS, 8, {})],
    ids=["no batch", "one batch for two replicas"],
)
def test_a_loader_that_is_too_short_is_warned_of(world: World, cell: Cell, count: int, options: dict[str, Any]) -> None:
    ranks = world.run(train_nothing, cell, count, options, size=cell.size, limit=30)
    assert {steps for steps, _ in ranks} == {0}
    assert any("Total length of" in warning and "zero" in warning for warning in ranks[0][1]), ranks[0][1]


def several_epochs(cell: Cell) -> Experiment:
    loader = make_loader(make_rows("gpt2", 5 * cell.replicas * ROWS), cell.batch_size)
    return Experiment(LanguageModule(), loader, {"limit_train_batches": 2, "max_epochs": 3, "max_steps": -1})


def less_than_a_window(cell: Cell) -> Experiment:
    loader = make_loader(make_rows("gpt2", 3 * cell.replicas * ROWS), cell.batch_size)
    options = {"accumulate_grad_batches": 2, "max_epochs": 3, "max_steps": -1, "gradient_clip_val": 0.05}
    return Experiment(LanguageModule(), loader, options)


def less_than_a_batch(cell: Cell) -> Experiment:
    return Experiment(LanguageModule(), make_loader(make_rows("gpt2", 3), ROWS), {"max_epochs": 2, "max_steps": -1})


@pytest.mark.contract(
    "Loop",
    "epochs shorter than an accumulation window or a batch, and `limit_train_batches`",
    reported="Lightning#21808, DS#5593",
)
@pytest.mark.parametrize(
    ("cell", "make"),
    [
        (REPLICAS, several_epochs),
        (CHIMERA, several_epochs),
        (REPLICAS, less_than_a_window),
        (CHIMERA, less_than_a_batch),
    ],
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


@pytest.mark.contract(
    "Data",
    "every validation row counts once, where DDP repeats rows to fill up",
    "differs",
    reported="PT#25162, Lightning#2398",
)
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


class NestedValidation(Validates):
    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch["text"], labels=batch["labels"]).loss, on_epoch=True)


class NestedText:
    def __call__(self, rows: list[Row]) -> Any:
        batch = default_collate(rows)
        labels = batch.pop("labels")
        return {"text": batch, "labels": labels, "meta": {"w": torch.ones(len(rows))}}


def nested_validation(cell: Cell) -> Experiment:
    validation = make_loader(make_rows("gpt2", 22, seed=1), 8, collate_fn=NestedText())
    loaders = {"train_dataloaders": make_loader(usual_rows(cell), cell.batch_size), "val_dataloaders": validation}
    return Experiment(NestedValidation(), loaders)


@pytest.mark.contract(
    "Data",
    "the size of a nested batch is its rows, so means over an epoch are right",
    reported="Lightning#3668, Lightning#10349",
)
@pytest.mark.parametrize("cell", [Cell("1f1b", 2, accumulate=1), REPLICAS], ids=str)
def test_means_over_an_epoch_of_nested_batches_are_by_their_rows(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, nested_validation)
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=2e-6, atol=0.0)


class PairOf(NamedTuple):
    ids: torch.Tensor
    labels: torch.Tensor


@dataclass
class RecordOf:
    ids: torch.Tensor
    labels: torch.Tensor
    source: str = "text"


@dataclass
class OutputOf(ModelOutput):
    ids: torch.Tensor | None = None
    labels: torch.Tensor | None = None


def user_dict(ids: Any, labels: Any) -> UserDict[str, Any]:
    return UserDict(ids=ids, labels=labels)


def encoding(ids: Any, labels: Any) -> BatchEncoding:
    return BatchEncoding({"ids": ids, "labels": labels})


def feature(ids: Any, labels: Any) -> BatchFeature:
    return BatchFeature({"ids": ids, "labels": labels})


class Structured(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        parts = batch if isinstance(batch, Mapping) else vars(batch) if is_dataclass(batch) else batch._asdict()
        loss = self.model(input_ids=parts["ids"], labels=parts["labels"]).loss
        self.log("train_loss", loss, batch_size=len(parts["ids"]))
        return loss


@dataclass(frozen=True)
class Structure:
    """Makes batches of one kind."""

    kind: Any

    def collate(self, rows: list[Row]) -> Any:
        return self.kind(*(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")))

    def __call__(self, cell: Cell) -> Experiment:
        loader = make_loader(usual_rows(cell), cell.batch_size, collate_fn=self.collate)
        return Experiment(Structured(), loader, {"max_steps": 2})


@pytest.mark.contract("Data", "batches that are named tuples, dataclasses, `ModelOutput`, `BatchEncoding` and the like")
@pytest.mark.parametrize(
    "kind", [PairOf, RecordOf, OutputOf, user_dict, encoding, feature], ids=lambda kind: kind.__name__
)
def test_a_batch_may_be_of_any_kind(world: World, kind: Any) -> None:
    check(world, Cell("1f1b", 2, accumulate=1), Structure(kind))


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


@pytest.mark.contract("Data", "nested batches with strings, numbers, `None` and lists")
@pytest.mark.parametrize(("cell", "make"), [(CHIMERA, nested), (CHIMERA, pairs), (REPLICAS, pairs)], ids=str)
def test_a_batch_may_have_any_structure(world: World, cell: Cell, make: Any) -> None:
    check(world, cell, make)


class SparseRows:
    def __call__(self, rows: list[Row]) -> Any:
        batch = default_collate(rows)
        return batch | {"graph": torch.eye(len(rows)).to_sparse()}


class PackedRows:
    def __call__(self, rows: list[Row]) -> Any:
        return torch.nn.utils.rnn.pack_sequence([row["input_ids"] for row in rows])


def sparse(cell: Cell) -> Experiment:
    return Experiment(LanguageModule(), make_loader(usual_rows(cell), collate_fn=SparseRows()))


def packed(cell: Cell) -> Experiment:
    return Experiment(LanguageModule(), make_loader(usual_rows(cell), collate_fn=PackedRows()))


@pytest.mark.contract("Data", "batches with sparse or nested tensors, or packed sequences", "refused")
@pytest.mark.parametrize(
    ("make", "given"), [(sparse, r"sparse tensor \(torch.sparse_coo\)"), (packed, "PackedSequence")]
)
@pytest.mark.parametrize("stages", [1, 2])
def test_what_has_no_rows_to_cut_is_refused(world: World, make: Any, given: str, stages: int) -> None:
    rule = "cuts them by rows, so a batch is made of dense tensors: pad in the data loader"
    with pytest.raises(RankFailed, match=f"The batch holds a {given}.*{rule}"):
        world.run(train, Cell("1f1b", stages), make, size=stages, limit=30)
