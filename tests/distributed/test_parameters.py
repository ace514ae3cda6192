"""Which parameters a module has, and which it trains: the same changes as in one process."""

from dataclasses import replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn
from transformers import BertForPreTraining, BertModel, GPT2ForSequenceClassification

from .fidelity import STEPS, Cell, Experiment, Make, check, train, train_plainly, usual, usual_rows
from .test_labels import LabelsFromMask
from .users import LanguageModule, Row, make_model
from .world import World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


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
