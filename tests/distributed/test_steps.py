"""Whatever a training step does in a plain Trainer, it does in a pipeline."""

import math
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import BertForMaskedLM, BertForPreTraining, BertModel, GPT2ForSequenceClassification

from .fidelity import STEPS, Cell, Experiment, Make, check, label, same_changes, train, train_plainly, usual, usual_rows
from .users import LENGTH, ROWS, LanguageModule, Row, make_loader, make_model, make_rows
from .world import RankFailed, World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


# ------------------------------------------------------------------------------------------------------------ results


class ReturnsDict(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return {"loss": self.model(**batch).loss, "note": torch.ones(3)}


class ReturnsOutput(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch)


class ReturnsFromTuple(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch, return_dict=False)[0]


class CallsItself(LanguageModule):
    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self(**batch).loss
        self.log("train_loss", loss)
        return loss


class CatchesExceptions(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception:
            return None


class ComputesBefore(LanguageModule):
    """Draws random numbers before the model is called, on every stage."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        order = torch.randperm(LENGTH)
        assert sorted(order.tolist()) == list(range(LENGTH))
        return super().training_step(batch, batch_idx)


@pytest.mark.contract("Loss", "a loss returned as a tensor, in a dict, or as the model's output")
@pytest.mark.parametrize(
    "module", [ReturnsDict, ReturnsOutput, ReturnsFromTuple, CallsItself, CatchesExceptions, ComputesBefore]
)
def test_a_step_may_return_its_loss_in_any_form(world: World, module: type[LanguageModule]) -> None:
    check(world, CHIMERA, module)


# ------------------------------------------------------------------------------------------------------------- labels


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
@pytest.mark.parametrize("make", [labels_from_ids, labels_from_mask, LabelsChanged, loss_scaled])
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


# --------------------------------------------------------------------------------------------------------- parameters


class RowClassifier(L.LightningModule):
    """A base model, a head and a loss by rows of the user's own, and parameters that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.bert: BertModel = BertModel(make_model("bert").config)  # with a pooler, which is not used
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 7))
        self.unused = nn.Linear(3, 3)

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        target = batch.pop("labels")[:, 0].clamp(min=0) % 7
        hidden = self.bert(**batch).last_hidden_state[:, 0]
        loss = nn.functional.cross_entropy(self.head(hidden) * self.scale, target)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


def row_classifier(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        row["labels"] = torch.full_like(row["labels"], number)
    return usual(cell, RowClassifier(), rows)


@pytest.mark.contract("Models", "parameters outside of the HuggingFace model, used or not")
@pytest.mark.parametrize("cell", [BERT, REPLICAS], ids=str)
def test_own_parameters_and_a_loss_by_rows_train_alike(world: World, cell: Cell) -> None:
    _, ranks = check(world, cell, row_classifier)
    never_used = {"unused.weight", "unused.bias", "bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    for step in zip(*(seen.unused for seen in ranks), strict=True):
        assert set().union(*step) == never_used  # and so weight decay leaves them alone
    for name in never_used:
        assert torch.equal(ranks[0].before[name], ranks[0].after[name])


class Classifier(LanguageModule):
    """HuggingFace's own head for rows, whose loss is a mean over the rows."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        config = make_model("gpt2").config
        config.pad_token_id, config.num_labels = 0, 3
        self.model = GPT2ForSequenceClassification(config)


def classifier(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        row["labels"] = torch.tensor(number % 3)
    return usual(cell, Classifier(), rows, gradient_clip_val=0.05)


@pytest.mark.contract("Loss", "a mean over rows")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_a_head_for_rows_trains_alike(world: World, cell: Cell) -> None:
    check(world, cell, classifier)


class PreTraining(LanguageModule):
    """Two losses in one, over masked tokens and over rows."""

    def __init__(self) -> None:
        super().__init__("bert", blocks=1)
        self.model = BertForPreTraining(make_model("bert").config)


def pre_training(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    for number, row in enumerate(rows):
        row["next_sentence_label"] = torch.tensor(number % 2)
    return usual(cell, PreTraining(), rows)


@pytest.mark.contract("Loss", "two means in one loss (MLM and next sentence)", reported="HF#16711")
@pytest.mark.parametrize("cell", [BERT, replace(REPLICAS, model="bert")], ids=str)
def test_a_loss_with_two_denominators_trains_alike(world: World, cell: Cell) -> None:
    check(world, cell, pre_training)


class Frozen(LanguageModule):
    """Some blocks, or all that is before them, do not train."""

    def __init__(self, *names: str) -> None:
        super().__init__(tied=False)
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(not any(part in name for part in names))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1.0, weight_decay=0.1)


def first_stage_frozen(cell: Cell) -> Experiment:
    return usual(cell, Frozen("wte", "wpe", "h.0."), gradient_clip_val=0.05)


def middle_stage_frozen(cell: Cell) -> Experiment:
    return usual(cell, Frozen("h.1."))


def all_but_the_head_frozen(cell: Cell) -> Experiment:
    return usual(cell, Frozen("transformer"), gradient_clip_val=0.05)


@pytest.mark.contract("Models", "frozen blocks and whole frozen stages", reported="PT#153484, DS#3895")
@pytest.mark.parametrize("cell", [CHIMERA, Cell("1f1b", 4, microbatches=8)], ids=str)
@pytest.mark.parametrize("make", [first_stage_frozen, middle_stage_frozen, all_but_the_head_frozen])
def test_a_stage_may_be_frozen(world: World, make: Make, cell: Cell) -> None:
    _, ranks = check(world, cell, make)
    same = {name for name, value in ranks[0].before.items() if torch.equal(value, ranks[0].after[name])}
    frozen = {name for name, parameter in make(cell).module.named_parameters() if not parameter.requires_grad}
    assert same == frozen != set()


class MadeLate(LanguageModule):
    """Makes its model when the Trainer asks for it."""

    def __init__(self) -> None:
        super().__init__(blocks=1)
        del self.model

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = make_model("gpt2")


@pytest.mark.contract("The module", "a model made in `configure_model`")
def test_a_model_may_be_made_in_configure_model(world: World) -> None:
    plain = train_plainly(world, CHIMERA.reference, MadeLate)
    for seen in world.run(train, CHIMERA, MadeLate, size=4):
        assert seen.after.keys() == plain.after.keys()
        torch.testing.assert_close(seen.after, plain.after, rtol=1e-9, atol=1e-12)


class MadeInSetup(LanguageModule):
    def __init__(self) -> None:
        super().__init__(blocks=1)
        del self.model

    def setup(self, stage: str) -> None:
        if not hasattr(self, "model"):
            torch.manual_seed(0)
            self.model = make_model("gpt2")


@pytest.mark.contract("The module", "a model made in `setup`")
def test_a_model_may_be_made_in_setup(world: World) -> None:
    plain = train_plainly(world, CHIMERA.reference, MadeInSetup)
    for seen in world.run(train, CHIMERA, MadeInSetup, size=4):
        assert seen.after.keys() == plain.after.keys()
        torch.testing.assert_close(seen.after, plain.after, rtol=1e-9, atol=1e-12)


class Checkpointed(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.gradient_checkpointing_enable()


@pytest.mark.contract("Models", "`gradient_checkpointing_enable`")
def test_activations_may_be_recomputed(world: World) -> None:
    check(world, CHIMERA, Checkpointed)


def clipped_by_value(cell: Cell) -> Experiment:
    return usual(cell, LanguageModule(cell.model), gradient_clip_algorithm="value", gradient_clip_val=0.01)


@pytest.mark.contract("Loop", "clipping by value")
def test_gradients_may_be_clipped_by_value(world: World) -> None:
    plain, _ = check(world, CHIMERA, clipped_by_value)
    changes = [plain.after[name] - value for name, value in plain.before.items()]
    assert max(float(change.abs().max()) for change in changes) == pytest.approx(STEPS * 0.01)


class FrozenOwnLabels(LabelsFromMask):
    """One stage of four does not train, and the number of labels is only known behind the model."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.model.transformer.h[1].parameters():
            parameter.requires_grad_(False)


def frozen_own_labels(cell: Cell) -> Experiment:
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in usual_rows(cell)]
    return usual(cell, FrozenOwnLabels(), rows, gradient_clip_algorithm="value", gradient_clip_val=0.01)


@pytest.mark.contract("Loop", "clipping by value works where a whole stage is frozen")
def test_a_rank_without_any_gradient_clips_by_value_and_divides_by_a_late_total(world: World) -> None:
    check(world, Cell("1f1b", 4), frozen_own_labels)


def five_blocks(cell: Cell) -> Experiment:
    return usual(cell, LanguageModule(cell.model, blocks=5))


@pytest.mark.contract("Models", "numbers of blocks that the stages do not divide")
@pytest.mark.parametrize("cell", [CHIMERA, Cell("1f1b", 3, microbatches=5), Cell("gpipe", 5, model="bert")], ids=str)
def test_blocks_need_not_divide_evenly(world: World, cell: Cell) -> None:
    check(world, cell, five_blocks)


# ------------------------------------------------------------------------------------------------------------- shapes


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


# ---------------------------------------------------------------------------------------------------------- randomness


class Noting(LanguageModule):
    """Notes the loss of every microbatch."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.notes: tuple[list[float], ...] = ([],)  # not a list: those are made the same on every rank

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.notes[0].append(float(loss))
        return loss


def dropout(cell: Cell) -> Experiment:
    L.seed_everything(3, verbose=False)
    return usual(cell, Noting(0.2))


def dropout_on_equal_rows(cell: Cell) -> Experiment:
    L.seed_everything(3, verbose=False)
    rows = make_rows("gpt2", 1, padded=False) * (8 * ROWS)
    return usual(cell, Noting(0.2), rows, max_steps=1)


@pytest.mark.contract("Loop", "dropout draws the same masks whatever the stages and the schedule")
def test_dropout_is_the_same_for_every_layout(world: World) -> None:
    single = world.run(train, Cell("1f1b", 1), dropout, size=1)[0]
    for cell in (Cell("1f1b", 2), Cell("gpipe", 4), Cell("chimera", 2), Cell("chimera", 4)):
        seen = world.run(train, cell, dropout, size=cell.size)[0]
        same_changes(seen, single)


@pytest.mark.contract("Loop", "dropout differs between microbatches, replicas and batches", reported="MLM#206")
def test_dropout_differs_between_microbatches_replicas_and_batches(world: World) -> None:
    ranks = world.run(train, Cell("chimera", 2, replicas=2), dropout_on_equal_rows, size=4)
    losses = [loss for seen in ranks for loss in seen.notes[0]]
    assert len(losses) == len(set(losses)) == 2 * 2 * 4


@pytest.mark.contract("Loop", "`seed_everything` makes a run the same twice, to the bit", reported="MLM#206")
def test_a_seed_gives_the_same_run_twice(world: World) -> None:
    first, second = (world.run(train, Cell("chimera", 2, replicas=2), dropout, size=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.hashes) == (other.losses, other.hashes)


class NotesItsStart(LanguageModule):
    """Notes the whole model as it is when training starts."""

    def on_train_start(self) -> None:
        whole = getattr(self.trainer.strategy, "full_parameters", nullcontext)
        with whole():
            self.notes = {name: value.detach().clone() for name, value in self.named_parameters()}


def from_a_seed(cell: Cell) -> Experiment:
    L.seed_everything(7, verbose=False)
    return usual(cell, NotesItsStart())


@pytest.mark.contract("Models", "a model starts with the weights that one process gives it", reported="PT#139304")
def test_a_model_starts_as_in_one_process(world: World) -> None:
    plain = train_plainly(world, CHIMERA.reference, from_a_seed)
    for seen in world.run(train, CHIMERA, from_a_seed, size=4):
        torch.testing.assert_close(seen.notes, plain.notes, rtol=0.0, atol=0.0)
    blocks = [plain.notes[f"model.transformer.h.{number}.mlp.c_proj.weight"] for number in range(4)]
    assert len({float(block.double().sum()) for block in blocks}) == 4


# -------------------------------------------------------------------------------------------------------------- hooks


class Hooks(LanguageModule):
    """Notes the order of the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, Any]] = []

    def on_train_batch_start(self, batch: Row, batch_idx: int) -> None:
        self.notes.append(("on_train_batch_start", batch["input_ids"].sum().item()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(("on_before_zero_grad", None))

    def on_before_backward(self, loss: Tensor) -> None:
        self.notes.append(("on_before_backward", round(float(loss), 9)))

    def on_after_backward(self) -> None:
        self.notes.append(("on_after_backward", None))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        bias = self.model.transformer.ln_f.bias  # every rank of the two with D = 2 in Chimera holds it
        self.notes.append(("on_before_optimizer_step", round(float(bias.grad.norm()), 9)))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.notes.append(("configure_gradient_clipping", None))
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append(("on_train_batch_end", batch_idx))


@pytest.mark.contract(
    "Loop",
    "hooks run in the order, number and with the gradients of a plain run",
    reported="Lightning#7924, Lightning#4151",
)
def test_hooks_run_in_the_order_and_with_the_values_of_a_plain_training(world: World) -> None:
    plain, ranks = check(world, Cell("chimera", 2), Hooks)
    for seen in ranks:
        assert seen.notes == plain.notes


# -------------------------------------------------------------------------------------------------------------- errors


class TwoCalls(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch).loss + self.model(**batch).loss


class NoCall(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model.lm_head.weight.sum()


class ReturnsNone(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Barrier(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.barrier()
        return loss


class BarrierBefore(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(
            TwoCalls,
            "The model was called more than once in one step.*compute everything from one call",
            marks=pytest.mark.contract("The module", "two calls of the model in a training step", "refused"),
        ),
        pytest.param(
            NoCall,
            "The step returned without calling the GPT2Model 'model.transformer'.*calls the model exactly once",
            marks=pytest.mark.contract("The module", "a step that never calls the model", "refused"),
        ),
        pytest.param(
            ReturnsNone,
            "training_step returned NoneType without a loss.*must return the loss, as a tensor or under",
            marks=pytest.mark.contract(
                "Loss",
                "`None` returned to skip a batch, as for every strategy of several processes",
                "refused",
                "Lightning#5243, Lightning#12190",
            ),
        ),
        pytest.param(
            Barrier,
            r"strategy\.barrier\(\) was called inside a step",
            marks=pytest.mark.contract("The module", "`strategy.barrier()` inside a step", "refused"),
        ),
        (BarrierBefore, r"strategy\.barrier\(\) was called inside a step"),
    ],
)
def test_a_step_that_cannot_be_cut_is_an_error(world: World, module: type[LanguageModule], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        world.run(train, Cell("chimera", 2), module, size=2, limit=20)


class TwoCallsInValidation(LanguageModule):
    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss + self.model(**batch).loss)


def two_calls_in_validation(cell: Cell) -> Experiment:
    loader = make_loader(usual_rows(cell))
    return Experiment(TwoCallsInValidation(), {"train_dataloaders": loader, "val_dataloaders": loader})


@pytest.mark.contract("The module", "two calls of the model in a validation, test or predict step", "refused")
def test_two_model_calls_in_validation_are_an_error(world: World) -> None:
    with pytest.raises(RankFailed, match="The model was called more than once in one step"):
        world.run(train, Cell("1f1b", 2), two_calls_in_validation, size=2, limit=20)
