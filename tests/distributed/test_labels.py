"""Labels, their weights and the means of losses: whatever a step makes of them, it trains as in one process."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForPreTraining

from .fidelity import Cell, Experiment, Make, check, same_changes, train, train_plainly, usual, usual_rows
from .users import ROWS, LanguageModule, Row, make_model
from .world import RankFailed, World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


class LabelsFromIds(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(input_ids=batch["input_ids"], labels=batch["input_ids"]).loss
        self.log("train_loss", loss)
        return loss


class LabelsFromMask(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"], labels=labels).loss
        self.log("train_loss", loss)
        return loss


class LabelsChanged(LanguageModule):
    """Ignores more labels than the batch does."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        batch["labels"] = batch["labels"].masked_fill(batch["input_ids"] % 3 == 0, -100)
        return super().training_step(batch, batch_idx)


class LabelsSpent(LanguageModule):
    """Overwrites its labels behind the model call, for a metric that can't ignore some."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        batch["labels"][batch["labels"] == -100] = 0
        return loss


class LossScaled(LanguageModule):
    """The loss is not the model's own any more, but a mean over rows still, as no label is ignored."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = 0.5 * self.model(**batch).loss
        self.log("train_loss", loss)
        return loss


def labels_from_ids(cell: Cell) -> Experiment:
    rows = [{"input_ids": row["input_ids"]} for row in usual_rows(cell)]
    return usual(cell, LabelsFromIds(), rows)


def labels_from_mask(cell: Cell) -> Experiment:
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in usual_rows(cell)]
    return usual(cell, LabelsFromMask(), rows)


def loss_scaled(cell: Cell) -> Experiment:
    return usual(cell, LossScaled(), usual_rows(cell, padded=False), gradient_clip_val=0.05)


@pytest.mark.contract("Loss", "labels that the step makes or changes itself", reported="HF#46204")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
@pytest.mark.parametrize("make", [labels_from_ids, labels_from_mask, LabelsChanged, LabelsSpent, loss_scaled])
def test_a_step_may_make_its_own_labels(world: World, make: Make, cell: Cell) -> None:
    check(world, cell, make)


class OwnTokenLoss(LanguageModule):
    """A mean over the tokens that have a label, computed by the user."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        labels = batch.pop("labels")
        logits = self.model(**batch).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        self.log("train_loss", loss)
        return loss


class WeighedTokenLoss(OwnTokenLoss):
    def microbatch_weight(self, batch: Row) -> int:
        return int((batch["labels"][:, 1:] != -100).sum())


@pytest.mark.contract(
    "Loss", "a loss of one's own where labels hold -100 and no `microbatch_weight` says how it counts", "refused"
)
def test_a_loss_of_unknown_weight_is_refused_where_labels_are_ignored(world: World) -> None:
    with pytest.raises(
        RankFailed, match=r"(?s)ValueError: .*labels hold -100.*Define.*microbatch_weight\(self, batch\)"
    ):
        world.run(train, CHIMERA, OwnTokenLoss, size=4)


@pytest.mark.contract("Loss", "a loss of one's own with a `microbatch_weight` hook", reported="HF#34191")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_microbatch_weight_makes_it_exact(world: World, cell: Cell) -> None:
    check(world, cell, WeighedTokenLoss)


class MasksItsMean(LanguageModule):
    """Leaves out what is padding by a mask of its own, so nothing in the batch says what its mean is over."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        ids, counts = batch["input_ids"], batch["attention_mask"][:, 1:]
        logits = self.model(input_ids=ids, attention_mask=batch["attention_mask"]).logits
        losses = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), ids[:, 1:], reduction="none")
        return (losses * counts).sum() / counts.sum()


class WeighsItsMask(MasksItsMean):
    def microbatch_weight(self, batch: Row) -> Tensor:
        return batch["attention_mask"][:, 1:].sum()


def on_ids_and_masks(cell: Cell, module: LanguageModule) -> Experiment:
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in usual_rows(cell)]
    return usual(cell, module, rows)


def masks_its_mean(cell: Cell) -> Experiment:
    return on_ids_and_masks(cell, MasksItsMean())


def weighs_its_mask(cell: Cell) -> Experiment:
    return on_ids_and_masks(cell, WeighsItsMask())


@pytest.mark.contract("Loss", "means over a mask or by class weights of one's own, with a `microbatch_weight` hook")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_a_mean_of_ones_own_is_exact_by_its_weight(world: World, cell: Cell) -> None:
    check(world, cell, weighs_its_mask)


@pytest.mark.contract(
    "Loss",
    "a loss of one's own that is no mean over rows (a mask's mean, class weights, a sum, in-batch negatives) is taken"
    " as the mean of its values for the microbatches, as DDP takes the mean of its processes'",
    "differs",
)
def test_a_mean_of_ones_own_without_its_weight_is_one_of_microbatches(world: World) -> None:
    with pytest.raises(AssertionError, match="parameters changed otherwise"):
        check(world, CHIMERA, masks_its_mean)


class Coasting(LanguageModule):
    """Trains with momentum and decay. In a plain run it leaves out a batch without a label, whose loss is NaN."""

    def __init__(self, model: nn.Module, *, leaves_out: bool) -> None:
        super().__init__("bert", blocks=1)
        self.model = model
        self.leaves_out = leaves_out

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self.model(**batch).loss
        return None if self.leaves_out and bool((batch["labels"] == -100).all()) else loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)


def coasting(cell: Cell, make: type[BertForPreTraining] | type[BertForMaskedLM]) -> Experiment:
    rows = usual_rows(cell)[: 3 * ROWS * cell.replicas]
    for number, row in enumerate(rows):
        has_labels = number // (ROWS * cell.replicas) != 1
        row["labels"][0] = row["labels"][0].where(torch.tensor(has_labels), -100).clamp(min=1 if has_labels else -100)
        row["labels"] = row["labels"].where(torch.tensor(has_labels), -100)
        if make is BertForPreTraining:
            row["next_sentence_label"] = torch.tensor(number % 2 if has_labels else -100)
    module = Coasting(make(make_model("bert").config), leaves_out=cell.schedule == "plain")
    return usual(cell, module, rows, max_epochs=1, max_steps=-1, accumulate_grad_batches=1)


def masked_coasting(cell: Cell) -> Experiment:
    return coasting(cell, BertForMaskedLM)


def pretraining_coasting(cell: Cell) -> Experiment:
    return coasting(cell, BertForPreTraining)


@pytest.mark.contract("Loss", "a batch without any label changes nothing, whatever the optimizer and the layout")
@pytest.mark.parametrize("make", [masked_coasting, pretraining_coasting])
@pytest.mark.parametrize(
    "cell", [Cell("chimera", 2, clip=False, model="bert"), Cell("1f1b", 1, clip=False, model="bert")], ids=str
)
def test_a_batch_without_a_label_leaves_no_gradient_on_any_stage(world: World, make: Make, cell: Cell) -> None:
    plain = train_plainly(world, cell.reference, make)
    for seen in world.run(train, cell, make, size=cell.size):
        same_changes(seen, plain)
