"""A validation, test or predict step does on a batch what it does in one process, whatever it does before the model."""

from collections import Counter, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from .fidelity import Cell, Experiment, Trained, check, label, make_trainer, train, usual_rows
from .users import LanguageModule, Row, make_loader, make_rows
from .world import World

FEW = Cell("1f1b", 2)
CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)


class Validates(LanguageModule):
    """Notes what each validation logged."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[dict[str, float]] = []

    def on_validation_end(self) -> None:
        logged = self.trainer.callback_metrics.items()
        self.notes.append({name: float(value) for name, value in logged if name.startswith("val")})


def validating(cell: Cell, module: Validates, *sizes: int) -> Experiment:
    """Trains, and validates on a loader for each number of rows, four to a batch."""
    loaders = [make_loader(make_rows(cell.model, size, seed=1 + size), 4) for size in sizes]
    fit = {"train_dataloaders": make_loader(usual_rows(cell), cell.batch_size), "val_dataloaders": loaders}
    return Experiment(module, fit, {"val_check_interval": 4})


def check_validations(world: World, cell: Cell, make: Callable[[Cell], Experiment]) -> None:
    plain, ranks = check(world, cell, make)
    assert len(plain.notes) == 2
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=2e-6, atol=1e-9)  # Lightning logs in single precision


# ---------------------------------------------------------------------------------------- what comes before the model


def longest(batch: Row) -> Row:
    """The batch without what is padding in all of its rows."""
    length = int(batch["attention_mask"].sum(1).max())
    return {name: value[:, :length] for name, value in batch.items()}


class Crops(Validates):
    def validation_step(self, batch: Row, batch_idx: int) -> None:
        batch = longest(batch)
        self.log("val_length", float(batch["input_ids"].shape[1]))
        super().validation_step(batch, batch_idx)


class Normalizes(Validates):
    """Shifts the ids by a number that depends on all rows of the batch."""

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        batch["input_ids"] = (batch["input_ids"] + batch["input_ids"].sum()) % 101
        super().validation_step(batch, batch_idx)


def crops(cell: Cell) -> Experiment:
    return validating(cell, Crops(), 13)


def normalizes(cell: Cell) -> Experiment:
    return validating(cell, Normalizes(), 13)


@pytest.mark.contract("Data", "evaluation steps that crop or change the whole batch before they call the model")
@pytest.mark.parametrize(("cell", "make"), [(CHIMERA, crops), (REPLICAS, crops), (FEW, normalizes)], ids=label)
def test_what_a_step_makes_of_a_whole_batch_reaches_every_stage(world: World, cell: Cell, make: Any) -> None:
    check_validations(world, cell, make)


class MasksTokens(LanguageModule):
    """Hides tokens at random in each of its evaluation steps, and notes which, on the rank that drew."""

    def __init__(self) -> None:
        super().__init__("bert")
        self.hidden: tuple[list[list[int]]] = ([],)  # a tuple, since lists are made those of the last stage's rank

    def evaluate(self, batch: Row) -> Any:
        ids = batch["input_ids"]
        hidden = torch.rand(ids.shape, device=ids.device) < 0.5
        self.hidden[0].append(hidden.long().flatten().tolist())
        return self.model(input_ids=ids.masked_fill(hidden, 1), labels=ids.masked_fill(~hidden, -100))

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.log("val_loss", self.evaluate(batch).loss)

    def test_step(self, batch: Row, batch_idx: int) -> None:
        self.log("test_loss", self.evaluate(batch).loss)

    def predict_step(self, batch: Row, batch_idx: int) -> Any:
        return self.evaluate(batch).loss


def mask_and_evaluate(cell: Cell) -> tuple[Any, Any]:
    """The values of all three steps, and what was hidden for them."""
    torch.manual_seed(0)
    module, loader = MasksTokens(), make_loader(make_rows("bert", 9, padded=False), 4)
    found = [
        make_trainer(cell, precision="64-true").validate(module, loader, verbose=False),
        make_trainer(cell, precision="64-true").test(module, loader, verbose=False),
        make_trainer(cell, precision="64-true").predict(module, loader),
    ]
    return found, module.hidden[0]


@pytest.mark.contract("The module", "random numbers that an evaluation step draws are the same on every stage")
@pytest.mark.parametrize("cell", [CHIMERA, Cell("gpipe", 4)], ids=str)
def test_what_an_evaluation_step_draws_is_the_same_on_every_stage(world: World, cell: Cell) -> None:
    ((alone, hidden),) = world.run(mask_and_evaluate, Cell("1f1b", 1), size=1)
    assert len(hidden) == 9  # three batches in each of the three steps
    assert len(set(map(str, hidden[:3]))) == 3
    for found, drawn in world.run(mask_and_evaluate, cell, size=cell.size):
        assert drawn == hidden
        torch.testing.assert_close(found, alone, rtol=2e-6, atol=0.0)


# ----------------------------------------------------------------------------------------- what it keeps on the module


class SumsUp(Validates):
    """Sums over the batches in plain attributes."""

    def on_validation_epoch_start(self) -> None:
        self.total, self.rows = 0.0, 0

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        rows = len(batch["input_ids"])
        self.total += self.model(**batch).loss * rows
        self.rows += rows

    def on_validation_epoch_end(self) -> None:
        self.log("val_loss", self.total / self.rows)
        self.log("val_rows", float(self.rows))


class CollectsByLoader(Validates):
    """Keeps a list for each of its loaders."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: dict[int, list[Any]] = {0: [], 1: []}

    def validation_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.losses[dataloader_idx].append({"loss": self.model(**batch).loss, "rows": len(batch["input_ids"])})

    def on_validation_epoch_end(self) -> None:
        for index, found in self.losses.items():
            self.log(f"val_{index}", torch.stack([batch["loss"] for batch in found]).mean())
            self.log(f"val_rows_{index}", float(sum(batch["rows"] for batch in found)))
            found.clear()


def sums_up(cell: Cell) -> Experiment:
    return validating(cell, SumsUp(), 13)


def collects_by_loader(cell: Cell) -> Experiment:
    return validating(cell, CollectsByLoader(), 13, 6)


@pytest.mark.contract(
    "The module", "sums, lists and dicts of lists that evaluation steps keep on the module are there in every hook"
)
@pytest.mark.parametrize(("cell", "make"), [(FEW, sums_up), (FEW, collects_by_loader), (CHIMERA, sums_up)], ids=label)
def test_what_a_step_keeps_on_its_module_is_there_on_every_rank(world: World, cell: Cell, make: Any) -> None:
    check_validations(world, cell, make)


# ---------------------------------------------------------------------------------------------------------- signatures


class TakesNoIndex(Validates):
    def training_step(self, batch: Row) -> Any:
        return super().training_step(batch, 0)

    def validation_step(self, batch: Row) -> None:
        super().validation_step(batch, 0)


def takes_no_index(cell: Cell) -> Experiment:
    return validating(cell, TakesNoIndex(), 12)


@pytest.mark.contract(
    "Data", "steps that take no `batch_idx`, and evaluation with replicas that have unequal numbers of batches"
)
def test_a_batch_lent_to_a_replica_never_counts_whatever_the_step_takes(world: World) -> None:
    check_validations(world, REPLICAS, takes_no_index)  # whose second replica has no third batch


class NotesOutputs(LanguageModule):
    """Returns from its evaluation steps, and notes what its hooks are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, bool]] = []

    def validation_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch).loss

    test_step = validation_step

    def on_validation_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append((self.trainer.state.fn.value, outputs is not None))

    on_test_batch_end = on_validation_batch_end


def note_outputs(cell: Cell) -> list[tuple[str, bool]]:
    torch.manual_seed(0)
    module, loader = NotesOutputs(), make_loader(make_rows("gpt2", 3 * 4), 4)
    for run in ("validate", "test"):
        getattr(make_trainer(cell), run)(module, loader, verbose=False)
    return module.notes


@pytest.mark.contract(
    "Data",
    "in an evaluation of replicas of which one has no batch left, its hooks get `None` as the step's result, and every"
    " row counts once; DDP repeats rows instead",
    "differs",
)
def test_hooks_of_a_replica_without_a_batch_get_none(world: World) -> None:
    found = world.run(note_outputs, REPLICAS, size=4)
    for rank, seen in enumerate(found):
        assert seen == [(run, rank < 2 or number < 1) for run in ("validate", "test") for number in (0, 1)]


class DrawsWithoutIndex(LanguageModule):
    """Notes a random number for each of its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: tuple[list[float]] = ([],)

    def training_step(self, batch: Row) -> Any:
        self.notes[0].append(float(torch.rand(())))
        return super().training_step(batch, 0)


@pytest.mark.contract(
    "The module", "a step draws anew in every batch and microbatch, whether it takes `batch_idx` or not"
)
def test_a_step_without_index_draws_anew_in_every_batch(world: World) -> None:
    ranks: list[Trained] = world.run(train, FEW, DrawsWithoutIndex, size=2)
    assert ranks[0].notes == ranks[1].notes
    assert len(set(ranks[0].notes[0])) == len(ranks[0].notes[0]) == 10 * FEW.microbatches


# ------------------------------------------------------------------------------------- collections of the user's own


class Evaluator:
    """Counts what it is told, as an object of the user's own does."""

    def __init__(self) -> None:
        self.rows = 0
        self.losses: list[float] = []

    def add(self, loss: float, rows: int) -> None:
        self.rows += rows
        self.losses.append(loss)


class CollectsInAnything(Validates):
    """Collects the losses of a validation in collections of every kind, and uses each at its end on every rank."""

    def on_validation_epoch_start(self) -> None:
        self.by_name: Any = defaultdict(list)
        self.counter: Any = Counter()
        self.queue: Any = deque(maxlen=3)
        self.names: Any = set()
        self.table: Any = np.zeros(2)
        self.pairs: Any = ()
        self.evaluator = Evaluator()

    def validation_step(self, batch: Row, batch_idx: int, dataloader_idx: int = 0) -> None:
        loss, rows = float(self.model(**batch).loss), len(batch["input_ids"])
        self.by_name[f"loader{dataloader_idx}"].append(loss)
        self.counter.update({"rows": rows})
        self.queue.append(loss)
        self.names.add(f"{dataloader_idx}-{batch_idx}")
        self.table += (loss, rows)
        self.pairs += ((loss, rows),)
        self.evaluator.add(loss, rows)

    def on_validation_epoch_end(self) -> None:
        kept: dict[str, float] = {
            "by_name": sum(self.by_name["loader1"]) / len(self.by_name["loader1"]),
            "counter": self.counter["rows"],
            "queue": sum(self.queue) / len(self.queue),
            "names": len(self.names),
            "table": self.table[0] / self.table[1],
            "pairs": sum(loss * rows for loss, rows in self.pairs),
            "evaluator": sum(self.evaluator.losses) / self.evaluator.rows,
        }
        self.log_dict({f"val_{name}": float(value) for name, value in kept.items()})


def collects_in_anything(cell: Cell) -> Experiment:
    return validating(cell, CollectsInAnything(), 13, 9)


@pytest.mark.contract(
    "The module",
    "evaluation steps may collect in a `defaultdict`, `Counter`, `deque`, set, tuple, NumPy array, or in an object of"
    " one's own",
)
@pytest.mark.parametrize("cell", [FEW, CHIMERA], ids=str)
def test_collections_of_any_kind_are_shared_after_an_evaluation_step(world: World, cell: Cell) -> None:
    check_validations(world, cell, collects_in_anything)
