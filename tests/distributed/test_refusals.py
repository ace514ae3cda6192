"""Steps that would train something else than one process does are refused."""

import importlib
import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import BertForPreTraining

import lightning_chimera

from .fidelity import Cell, Experiment, Make, check, make_trainer, train, usual, usual_rows
from .users import LENGTH, VOCABULARY, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2)
CHIMERA = Cell("chimera", 2)


# ----------------------------------------------------------------------------------------------------- ignored labels


def token_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class ScalesALossOfOwnLabels(LanguageModule):
    """Makes the labels in the step, and scales the loss that the model gives for them."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        return 0.5 * self.model(**{**batch, "labels": labels}).loss


class TakesTuples(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = batch
        return token_loss(self.model(ids).logits, labels)


class TakesNested(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return token_loss(self.model(batch["text"]["input_ids"]).logits, batch["text"]["targets"])


class TakesSamples(LanguageModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        ids, labels = (torch.stack([row[name] for row in batch]) for name in ("input_ids", "labels"))
        return token_loss(self.model(ids).logits, labels)


class TakesLabelsOut(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        labels = batch.pop("labels")
        return token_loss(self.model(**batch).logits, labels)


class AsksAHeadOfTwoLosses(LanguageModule):
    """Computes a loss of its own on the logits of a head that would add two means."""

    def __init__(self) -> None:
        super().__init__("bert")
        self.model = BertForPreTraining(self.model.config)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        labels = batch.pop("labels")
        return nn.functional.cross_entropy(self.model(**batch).prediction_logits.flatten(0, 1), labels.flatten())


def own_labels(cell: Cell) -> Experiment:
    rows = [{name: row[name] for name in ("input_ids", "attention_mask")} for row in usual_rows(cell)]
    return usual(cell, ScalesALossOfOwnLabels(), rows)


def tuples(cell: Cell) -> Experiment:
    rows = usual_rows(cell)
    data = TensorDataset(*(torch.stack([row[name] for row in rows]) for name in ("input_ids", "labels")))
    return Experiment(TakesTuples(), DataLoader(data, cell.batch_size))


def nested(cell: Cell) -> Experiment:
    rows = [{"text": {"input_ids": row["input_ids"], "targets": row["labels"]}} for row in usual_rows(cell)]
    return usual(cell, TakesNested(), rows)


def as_they_are(rows: list[Row]) -> list[Row]:
    return rows


def samples(cell: Cell) -> Experiment:
    return Experiment(TakesSamples(), make_loader(usual_rows(cell), cell.batch_size, collate_fn=as_they_are))


@pytest.mark.contract(
    "Loss", "a loss of one's own where labels hold -100 and no `microbatch_weight` says how it counts", "refused"
)
@pytest.mark.parametrize("make", [own_labels, tuples, nested, samples, TakesLabelsOut, AsksAHeadOfTwoLosses])
def test_a_loss_of_ones_own_over_labels_of_which_some_are_ignored_needs_a_weight(world: World, make: Make) -> None:
    with pytest.raises(RankFailed, match=r"(?s)ValueError: The labels hold -100 .*Define `microbatch_weight"):
        world.run(train, FEW, make, size=2)


class TakesWeighedTuples(TakesTuples):
    def microbatch_weight(self, batch: Any) -> int:
        return int((batch[1][:, 1:] != -100).sum())


def weighed_tuples(cell: Cell) -> Experiment:
    experiment = tuples(cell)
    return Experiment(TakesWeighedTuples(), experiment.loader)


@pytest.mark.contract("Loss", "a loss of one's own with a `microbatch_weight` hook")
def test_with_a_weight_it_is_right(world: World) -> None:
    check(world, CHIMERA, weighed_tuples)


# ------------------------------------------------------------------------------------------------- what a stage lacks


class AsksForHiddenStates(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch, output_hidden_states=True).loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        output = self.model(**batch, output_hidden_states=True)
        self.log("val_loss", output.hidden_states[2].square().mean())


class AsksForAttentions(LanguageModule):
    def __init__(self) -> None:
        super().__init__(attention="eager")

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch, output_attentions=True).loss


class AsksInTheConfig(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.config.output_hidden_states = True


@pytest.mark.contract("Models", "`output_hidden_states` and `output_attentions` over several stages", "refused")
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (AsksForHiddenStates, "output_hidden_states"),
        (AsksForAttentions, "output_attentions"),
        (AsksInTheConfig, "output_hidden_states"),
    ],
)
def test_the_inside_of_other_stages_is_refused_in_training(
    world: World, module: type[LanguageModule], name: str
) -> None:
    with pytest.raises(RankFailed, match=f"{name}=True asks for the inside of every block.*Leave {name} out"):
        world.run(train, CHIMERA, module, size=2)


def validate(cell: Cell) -> Any:
    torch.manual_seed(0)
    trainer = make_trainer(cell, precision="64-true")
    return trainer.validate(AsksForHiddenStates(), make_loader(make_rows("gpt2", 8), 4), verbose=False)


@pytest.mark.contract("Models", "`output_hidden_states` and `output_attentions` over several stages", "refused")
def test_the_inside_of_other_stages_is_refused_in_evaluation_and_there_with_one_stage(world: World) -> None:
    with pytest.raises(RankFailed, match="output_hidden_states=True asks for the inside of every block"):
        world.run(validate, FEW, size=2)
    (plain,) = world.run(validate, FEW.reference, size=1)
    assert world.run(validate, Cell("1f1b", 1), size=1)[0][0] == pytest.approx(plain[0], rel=2e-6)


class CountsItems(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch, num_items_in_batch=torch.tensor(50.0)).loss


@pytest.mark.contract("Loss", "`num_items_in_batch` given to the model", "refused", reported="HF#34191")
def test_a_loss_divided_by_a_number_of_the_users_is_refused(world: World) -> None:
    with pytest.raises(RankFailed, match="gives num_items_in_batch to the model, whose loss is then not the mean"):
        world.run(train, FEW, CountsItems, size=2)


# ----------------------------------------------------------------------------------------------------------- optimizers


class Sharp(torch.optim.SGD):
    """What sharpness-aware optimizers look like."""

    def first_step(self) -> None: ...

    def second_step(self) -> None: ...


class Prodigy(torch.optim.SGD):
    """Has the name of one that sums over the whole model."""


class TriesTwice(torch.optim.SGD):
    """Evaluates the step twice, which nothing shows beforehand."""

    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


class Optimizes(LanguageModule):
    def __init__(self, optimizer: type[torch.optim.SGD]) -> None:
        super().__init__()
        self.optimizer = optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), lr=0.1)


def sharp(cell: Cell) -> Experiment:
    return usual(cell, Optimizes(Sharp))


def prodigy(cell: Cell) -> Experiment:
    return usual(cell, Optimizes(Prodigy))


def tries_twice(cell: Cell) -> Experiment:
    return usual(cell, Optimizes(TriesTwice))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            sharp,
            "Sharp evaluates the step several times per optimizer step.*Use a first-order optimizer",
            marks=pytest.mark.contract("Loop", "sharpness-aware optimizers (SAM)", "refused"),
        ),
        pytest.param(
            prodigy,
            "Prodigy sums over the parameters of the whole model.*each rank .* has those of its own stages.*Use an",
            marks=pytest.mark.contract("Loop", "Prodigy and D-Adaptation, which sum over the whole model", "refused"),
        ),
        pytest.param(
            tries_twice,
            "TriesTwice evaluates the step several times per optimizer step.*Use a first-order optimizer",
            marks=pytest.mark.contract("Loop", "any optimizer that calls its closure more than once", "refused"),
        ),
    ],
)
def test_an_optimizer_that_needs_more_than_a_gradient_is_refused(world: World, make: Make, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        world.run(train, FEW, make, size=2, limit=30)


# ------------------------------------------------------------------------------------------------- another Lightning


def train_with_the_old_names(what: str) -> None:
    import pytorch_lightning as old

    if what == "module":
        make_trainer(FEW).fit(old.LightningModule())
    importlib.reload(lightning_chimera)  # as if it were imported now
    old.Trainer(strategy=what, accelerator="cpu", devices=2)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        pytest.param(
            "chimera",
            "given to a Trainer of pytorch_lightning.*for `lightning` alone.*write `import lightning as L`",
            marks=pytest.mark.contract("Launch", "a Trainer of `pytorch_lightning`", "refused"),
        ),
        pytest.param(
            "module",
            "You passed a `pytorch_lightning` object.*Please switch to a single import style",
            marks=pytest.mark.contract("Launch", "a LightningModule of `pytorch_lightning`", "refused"),
        ),
    ],
)
def test_the_old_namespace_is_refused(world: World, what: str, message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        world.run(train_with_the_old_names, what, size=1)


def train_compiled() -> None:
    make_trainer(FEW).fit(torch.compile(LanguageModule()), make_loader(make_rows("gpt2", 8)))


@pytest.mark.contract("Models", "a model or a LightningModule compiled by `torch.compile`", "refused")
def test_a_compiled_module_is_refused(world: World) -> None:
    said = (
        "compiled model is incompatible with the current strategy: `ChimeraStrategy`.*avoid passing in compiled model"
    )
    with pytest.raises(RankFailed, match=said):  # by Lightning itself
        world.run(train_compiled, size=1)


# ---------------------------------------------------------------------------------------- what a module has besides


class Normalizes(LanguageModule):
    """Has a batch norm on the hidden states."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.norm = nn.BatchNorm1d(VOCABULARY)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.norm(self.model(**batch).logits[:, 0]).logsumexp(-1).mean()


class Counts(LanguageModule):
    """Counts its steps in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.count = self.count + 1
        return super().training_step(batch, batch_idx)


def error_of(cell: Cell, make: Make) -> str:
    try:
        train(cell, make)
    except RuntimeError as error:
        return str(error)
    return "none"


def without_labels(cell: Cell) -> Experiment:
    rows = [{"input_ids": row["input_ids"]} for row in usual_rows(cell, padded=False)]
    return usual(cell, Normalizes(), rows)


@pytest.mark.contract(
    "The module", "a batch norm that trains, or any other buffer that a training step changes", "refused"
)
@pytest.mark.parametrize(("make", "name"), [(without_labels, r"norm\."), (Counts, "count")])
def test_a_buffer_that_a_training_step_changes_is_refused_on_every_rank(world: World, make: Make, name: str) -> None:
    for rank, error in enumerate(world.run(error_of, FEW, make, size=2)):
        assert re.match(rf"A training step changed the buffer '{name}.*on_train_batch_end", error), f"{rank}: {error}"


class CountsBatches(Counts):
    """Has a frozen norm, and counts in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(LENGTH)

    def on_train_epoch_start(self) -> None:
        self.norm.eval()

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch).loss + self.norm(batch["input_ids"].double()).sum() * 0.0

    def on_train_batch_end(self, *_: Any) -> None:
        self.count += 1


def counts_batches(cell: Cell) -> Experiment:
    return usual(cell, CountsBatches(), usual_rows(cell, padded=False))


@pytest.mark.contract("The module", "buffers that hooks change, and batch norms in `eval()`")
def test_a_buffer_that_a_hook_changes_is_no_error(world: World) -> None:
    check(world, FEW, counts_batches)


class KeepsTheModelAsAHyperparameter(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.save_hyperparameters({"model": self.model})


def keeps_the_model(cell: Cell) -> Experiment:
    return usual(cell, KeepsTheModelAsAHyperparameter(), enable_checkpointing=True)


@pytest.mark.contract(
    "The module",
    "`save_hyperparameters()` that keeps the model in checkpoints: `save_hyperparameters(ignore=[...])`",
    "refused",
)
def test_a_model_among_the_hyperparameters_is_refused(world: World) -> None:
    with pytest.raises(
        RankFailed, match=r"hyperparameter 'model' of Keeps.*save_hyperparameters\(ignore=\['model'\]\)"
    ):
        world.run(train, FEW, keeps_the_model, size=2)
