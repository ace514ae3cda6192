"""What a training step keeps, returns and logs is the same on every rank, and what one process would have had."""

from typing import Any

import pytest
import torch

from .fidelity import Cell, Experiment, check, train, usual, usual_rows
from .users import ROWS, LanguageModule, Row, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2)
CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)


def check_notes(world: World, cell: Cell, make: Any, *, rtol: float = 1e-9) -> Any:
    """Checks the training, and the notes of every rank against the plain ones, which are returned."""
    plain, ranks = check(world, cell, make)
    assert plain.notes
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=rtol, atol=1e-12)
    return plain.notes


class Collects(LanguageModule):
    """Appends to a list in the step, and logs from it when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.losses: list[Any] = []
        self.outputs: list[Any] = []
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        self.losses.append(output.loss.detach())
        self.outputs.append({"ids": batch["input_ids"], "means": output.logits.detach().mean((1, 2))})
        return output.loss

    def on_train_epoch_end(self) -> None:
        self.log("epoch_loss", torch.stack(self.losses).mean())
        self.notes.append((len(self.losses), torch.stack(self.losses), self.outputs[:]))
        self.losses.clear()
        self.outputs.clear()

    def on_train_end(self) -> None:
        self.notes.append(float(self.trainer.callback_metrics["epoch_loss"]))


def two_epochs(cell: Cell, module: LanguageModule) -> Experiment:
    rows = make_rows(cell.model, 4 * ROWS * cell.replicas)
    return usual(cell, module, rows, max_epochs=2, max_steps=-1)


def collects(cell: Cell) -> Experiment:
    return two_epochs(cell, Collects())


@pytest.mark.contract(
    "The module", "lists that a training step appends to grow by one entry for each batch, on every rank"
)
@pytest.mark.parametrize("cell", [FEW, CHIMERA, REPLICAS], ids=str)
def test_lists_grown_in_the_step_have_an_entry_for_each_batch_on_every_rank(world: World, cell: Cell) -> None:
    (first, _, outputs), second, logged = check_notes(world, cell, collects, rtol=1e-6)
    assert (first, second[0]) == (4, 4)
    assert len(outputs[0]["ids"]) == ROWS * cell.replicas
    assert logged == pytest.approx(float(second[1].mean()), rel=1e-6)


class Returns(LanguageModule):
    """Returns scalars and an entry for each row beside the loss, and notes what callbacks and hooks are handed."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        rows = output.logits.detach().mean((1, 2))
        return {
            "loss": output.loss,
            "twice": 2.0 * output.loss.detach(),
            "as_float": float(output.loss),
            "rows": rows,
            "nested": {"ids": batch["input_ids"], "names": [str(ids[0].item()) for ids in batch["input_ids"]]},
            "kind": "text",
        }

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        assert all(not value.requires_grad for value in outputs.values() if isinstance(value, torch.Tensor))
        assert outputs["nested"]["names"] == [str(ids[0].item()) for ids in outputs["nested"]["ids"]]
        self.notes.append({name: value for name, value in outputs.items() if name != "kind"})
        assert outputs["kind"] == "text"
        self.notes[-1]["nested"] = self.notes[-1]["nested"]["ids"]


@pytest.mark.contract("Loss", "what a training step returns beside the loss in a dict reaches the hooks of every rank")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_what_a_step_returns_in_a_dict_reaches_the_hooks_of_every_rank(world: World, cell: Cell) -> None:
    notes = check_notes(world, cell, Returns)
    assert len(notes[0]["rows"]) == ROWS * cell.replicas


class LogsItsBatchSize(LanguageModule):
    """Gives ``self.log`` a size: one number for all batches, or the rows of each."""

    def __init__(self, size: int | None) -> None:
        super().__init__()
        self.size = size
        self.notes: dict[str, float] = {}

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        self.log("train_loss", loss, batch_size=self.size or len(batch["input_ids"]), on_step=True, on_epoch=True)
        return loss

    def on_train_end(self) -> None:
        self.notes["epoch"] = float(self.trainer.callback_metrics["train_loss_epoch"])


def short_last_batch(cell: Cell, size: int | None) -> Experiment:
    """The last batch has fewer rows than there are microbatches."""
    rows = [row for row in make_rows(cell.model, 6 * ROWS) if bool((row["labels"][1:] != -100).any())]
    return usual(cell, LogsItsBatchSize(size), rows[: 3 * ROWS + 2], max_epochs=1, max_steps=-1)


def constant_size(cell: Cell) -> Experiment:
    return short_last_batch(cell, ROWS)


def true_size(cell: Cell) -> Experiment:
    return short_last_batch(cell, None)


@pytest.mark.contract(
    "Logging and metrics", "`batch_size` in `self.log`, a constant or the rows of each batch, weighs whole batches"
)
@pytest.mark.parametrize("make", [constant_size, true_size])
def test_a_batch_size_given_to_log_weighs_whole_batches(world: World, make: Any) -> None:
    check_notes(world, CHIMERA, make, rtol=1e-6)


class LogsAHiddenMetric(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        import torchmetrics

        metric = torchmetrics.MeanMetric()
        metric(1.0)
        self.log("mean", metric)
        return super().training_step(batch, batch_idx)


def logs_a_hidden_metric(cell: Cell) -> Experiment:
    return usual(cell, LogsAHiddenMetric(), usual_rows(cell))


@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` of a metric that is no attribute of the module: make it one in `__init__`",
    "refused",
)
def test_a_metric_that_is_no_attribute_is_refused_by_name(world: World) -> None:
    with pytest.raises(RankFailed, match=r"self\.log\('mean', \.\.\.\) got a MeanMetric that is no attribute"):
        world.run(train, FEW, logs_a_hidden_metric, size=2)


class CollectsNumbers(LanguageModule):
    """Appends numbers one by one, as many as a microbatch has rows, and adds others for each row."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.losses: list[float] = []
        self.rows: list[float] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.losses.append(float(loss))
        self.notes.append(float(loss))
        self.notes.append(1.5)
        self.rows += batch["input_ids"].sum(1).double().tolist()
        return loss

    def on_train_end(self) -> None:
        self.notes += self.losses + self.rows


@pytest.mark.contract(
    "The module", "numbers that a step appends to a list one by one are one entry for a batch, whatever its rows"
)
@pytest.mark.parametrize(
    "cell", [Cell("chimera", 2, microbatches=ROWS // 2), Cell("1f1b", 2, microbatches=ROWS)], ids=str
)
def test_a_number_that_is_appended_is_one_entry_for_a_batch(world: World, cell: Cell) -> None:
    check_notes(world, cell, CollectsNumbers)


class CollectsSome(LanguageModule):
    """Adds some rows of some microbatches to a list, appends where a microbatch has one row, and returns it so."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []
        self.rows: list[int] = []
        self.found: list[Any] = []

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        sums = batch["input_ids"].sum(1).tolist()
        if any(total % 3 == 0 for total in sums):
            self.rows += [total for total in sums if total % 3 == 0]
        for total in sums:
            if total % 5 == 0:
                self.rows.append(-total)
        has_first = bool((batch["input_ids"][:, 0] == self.trainer.train_dataloader.dataset[7]["input_ids"][0]).any())
        if has_first:
            self.found.append(loss.detach())
        return {"loss": loss, "nested": {"mean": loss.detach(), **({"found": 1} if has_first else {})}}

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append(outputs["nested"]["mean"])

    def on_train_end(self) -> None:
        self.notes += [sorted(self.rows), len(self.found)]


@pytest.mark.contract(
    "The module", "what a step adds to a list, or returns in a dict, for some rows or microbatches only is kept"
)
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_what_only_some_microbatches_add_is_kept_on_every_rank(world: World, cell: Cell) -> None:
    *_, rows, found = check_notes(world, cell, CollectsSome)
    assert len(rows) > 10
    assert 0 < found < 10
