"""Every head, family and feature of HuggingFace's models that a pipeline supports trains as in one process."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import lightning as L
import pytest
import torch
from torch import Tensor, nn

from lightning_chimera import Family, register_family

from .fidelity import STEPS, Cell, Experiment, check, train
from .users import LENGTH, ROWS, Row, make_loader
from .world import RankFailed, World
from .zoo import CLASSES, WIDTH, make_model, make_rows

SMALL = Cell("chimera", 2, clip=False, accumulate=1)
UNEVEN = Cell("gpipe", 2, microbatches=3, clip=False, accumulate=1)
DEEP = Cell("1f1b", 4, microbatches=4, clip=False, accumulate=1)
PAIRS = Cell("chimera", 4, microbatches=4, clip=False, accumulate=1)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=4, clip=False, accumulate=1)
BOTH = Cell("chimera", 2, replicas=2, microbatches=3, clip=False, accumulate=2)
LAYOUTS = [SMALL, UNEVEN, DEEP, PAIRS, REPLICAS, BOTH]


def short(value: Any) -> str:
    """The name of a case or of a layout."""
    if isinstance(value, Cell):
        return f"{value.schedule}-D{value.stages}-W{value.replicas}-N{value.microbatches}"
    return str(value)


class Wrapped(L.LightningModule):
    """The module that people write around any model.

    Args:
        model: The model.
        lr: Learning rate.
    """

    def __init__(self, model: nn.Module, lr: float) -> None:
        super().__init__()
        self.model = model
        self.lr = lr
        self.notes: list[Tensor] = []

    def loss(self, output: Any) -> Tensor:
        """The loss; that of two heads is the sum of its two terms."""
        return output.loss + 0.7 * output.mc_loss if "mc_loss" in output else output.loss

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        loss = self.loss(self.model(**batch))
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        output = self.model(**batch)
        self.notes += [self.loss(output), *(value for key, value in output.items() if "logits" in key)]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@dataclass(frozen=True)
class Case:
    """A model, its rows, and what is special about it.

    Attributes:
        model: Class name.
        task: What the rows are for.
        options: Arguments of the config.
        batch: What is special about the batches, see ``Collate``.
        padding: On which side rows are padded.
        trains: Parts of names of the parameters that train; all if there are none.
        checkpointing: Arguments of gradient checkpointing.
        lr: Learning rate.
    """

    model: str
    task: str
    options: tuple[tuple[str, Any], ...] = ()
    batch: str = ""
    padding: str = "right"
    trains: tuple[str, ...] = ()
    checkpointing: bool | None = None
    lr: float = 1.0

    def __str__(self) -> str:
        options = [f"{name}={value}" for name, value in self.options]
        special = [*options, self.batch, *self.trains]
        special += [self.padding] * (self.padding != "right")
        special += [f"reentrant={self.checkpointing}"] * (self.checkpointing is not None)
        return "-".join([self.model, self.task, *filter(None, special)])

    def __call__(self, cell: Cell) -> Experiment:
        model = make_model(self.model, **dict(self.options))
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.trains or any(part in name for part in self.trains))
        if self.checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": self.checkpointing})
            model.enable_input_require_grads()
        return experiment(cell, Wrapped(model, self.lr), self.task, self.batch, self.padding)


def experiment(cell: Cell, module: L.LightningModule, task: str, batch: str = "", padding: str = "right") -> Experiment:
    """Trains on rows of a task, and validates where the layout of the batches does not depend on the replicas."""
    rows = make_rows(task, STEPS * cell.accumulate * cell.replicas * ROWS + 11, padding=padding)
    collate = Collate(batch, cell)
    loaders = {"train_dataloaders": make_loader(rows[:-11], cell.batch_size, collate_fn=collate)}
    if cell.replicas == 1:
        loaders["val_dataloaders"] = make_loader(rows[-11:], 6, collate_fn=collate)
    return Experiment(module, loaders)


class Collate:
    """Makes batches in one of the forms that HuggingFace's models take.

    Args:
        form: The form.
        cell: The training.
    """

    def __init__(self, form: str, cell: Cell) -> None:
        self.form = form
        self.dtype = torch.float32 if cell.precision == "32-true" else torch.float64

    def __call__(self, rows: list[Row]) -> Row:
        batch = torch.utils.data.default_collate(rows)
        mask, lower = batch["attention_mask"], torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
        if self.form == "types":
            batch["token_type_ids"] = batch["input_ids"] % 2
        elif self.form == "positions":
            batch["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
        elif self.form == "bool":
            batch["attention_mask"] = mask.bool()
        elif self.form == "square":
            batch["attention_mask"] = (lower & mask[:, None, None, :].bool()) | torch.eye(LENGTH, dtype=torch.bool)
        elif self.form == "shared":
            batch["attention_mask"] = lower[None, None]
        elif self.form == "added":
            batch["attention_mask"] = torch.zeros(1, 1, LENGTH, LENGTH, dtype=self.dtype).masked_fill(~lower, -1e30)
        elif self.form == "layers":
            near = lower & torch.ones_like(lower).triu(-2)
            batch["attention_mask"] = {"full_attention": lower[None, None], "sliding_attention": near[None, None]}
        elif self.form == "packed":
            del batch["attention_mask"]
            batch["position_ids"] = (torch.arange(LENGTH) % 6).expand(len(rows), -1)
        return batch


def check_all(world: World, cell: Cell, make: Any) -> None:
    """Checks the training, and the losses and logits of validation on every rank of a single group."""
    plain, ranks = check(world, cell, make)
    assert cell.replicas > 1 or plain.notes
    if cell.replicas == 1:
        tolerance = 1e-4 if cell.precision == "32-true" else 1e-9
        for seen in ranks:
            torch.testing.assert_close(seen.notes, plain.notes, rtol=tolerance, atol=tolerance)


def options(**options: Any) -> tuple[tuple[str, Any], ...]:
    return tuple(options.items())


# -------------------------------------------------------------------------------------------------------------- heads

REGRESSION = options(num_labels=1)
SEVERAL = options(problem_type="multi_label_classification")
HEADS = {
    Case("GPT2LMHeadModel", "causal"): SMALL,
    Case("GPT2DoubleHeadsModel", "double", REGRESSION): SMALL,
    Case("GPT2ForSequenceClassification", "classes"): REPLICAS,
    Case("GPT2ForSequenceClassification", "scores", REGRESSION, lr=0.1): UNEVEN,
    Case("GPT2ForSequenceClassification", "several", SEVERAL): UNEVEN,
    Case("GPT2ForTokenClassification", "tokens"): SMALL,
    Case("GPT2ForQuestionAnswering", "answers"): SMALL,
    Case("BertForMaskedLM", "masked"): SMALL,
    Case("BertForPreTraining", "pretraining"): BOTH,
    Case("BertForNextSentencePrediction", "next_sentence", lr=0.1): SMALL,
    Case("BertForMultipleChoice", "choice", lr=0.1): SMALL,
    Case("BertForSequenceClassification", "classes", lr=0.1): SMALL,
    Case("BertForSequenceClassification", "scores", REGRESSION, lr=0.1): UNEVEN,
    Case("BertForSequenceClassification", "several", SEVERAL, lr=0.1): UNEVEN,
    Case("BertForTokenClassification", "tokens"): SMALL,
    Case("BertForQuestionAnswering", "answers", options(num_labels=2), lr=0.1): SMALL,
    Case("BertLMHeadModel", "causal", options(is_decoder=True)): SMALL,
}


@pytest.mark.contract(
    "Models", "GPT-2 and BERT with every head that transformers has for them", reported="HF#34191, HF#46204"
)
@pytest.mark.parametrize(("case", "cell"), HEADS.items(), ids=short)
def test_a_head_trains_and_validates_as_in_one_process(world: World, case: Case, cell: Cell) -> None:
    check_all(world, cell, case)


@pytest.mark.contract("Models", "GPT-2 and BERT with every head that transformers has for them")
@pytest.mark.long
@pytest.mark.parametrize("case", HEADS, ids=short)
@pytest.mark.parametrize("cell", LAYOUTS, ids=short)
def test_a_head_does_so_in_every_layout(world: World, case: Case, cell: Cell) -> None:
    if cell != HEADS[case]:
        check_all(world, cell, case)


@pytest.mark.parametrize("task", ["pretraining", "double", "answers"])
def test_the_rows_have_microbatches_without_a_label_of_each_kind(task: str) -> None:
    firsts, seconds = {
        "pretraining": ("labels", "next_sentence_label"),
        "double": ("labels", "mc_labels"),
        "answers": ("start_positions", "end_positions"),
    }[task]
    rows = make_rows(task, 8)
    counts = [
        [int(((row[name] >= 0) & ((row[name] < LENGTH) | (task != "answers"))).sum()) for row in rows]
        for name in (firsts, seconds)
    ]
    assert [bool(count) for count in counts[1]] == [True] * 6 + [False] * 2
    assert counts[0][2:4] == [0, 0]
    assert all(counts[0][4:])


class OwnHead(Wrapped):
    """A base model with a head and a loss of the user's own, a mean over rows."""

    def __init__(self, base: str) -> None:
        super().__init__(make_model(base), 0.5)
        width = getattr(self.model.config, "word_embed_proj_dim", WIDTH)
        self.head = nn.Sequential(nn.Linear(width, WIDTH), nn.Tanh(), nn.Linear(WIDTH, CLASSES))

    def step(self, batch: Row) -> tuple[Tensor, Tensor]:
        labels = batch.pop("labels")
        hidden = self.model(**batch).last_hidden_state
        kept = batch["attention_mask"][..., None]
        logits = self.head((hidden * kept).sum(1) / kept.sum(1))
        return nn.functional.binary_cross_entropy_with_logits(logits, labels), logits

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        loss, _ = self.step(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.notes += self.step(batch)


@dataclass(frozen=True)
class Own:
    """An own head on a base model."""

    base: str

    def __call__(self, cell: Cell) -> Experiment:
        return experiment(cell, OwnHead(self.base), "several")


@pytest.mark.contract("Models", "a bare base model below the user's own head and loss")
@pytest.mark.parametrize(
    ("base", "cell"),
    [
        ("GPT2Model", UNEVEN),
        ("BertModel", REPLICAS),
        *(pytest.param(base, DEEP, marks=pytest.mark.long) for base in ("DistilBertModel", "OPTModel", "LlamaModel")),
    ],
    ids=short,
)
def test_a_base_model_trains_below_a_head_of_ones_own(world: World, base: str, cell: Cell) -> None:
    check_all(world, cell, Own(base))


# ----------------------------------------------------------------------------------------------------------- families

UNTIED, TIED = options(tie_word_embeddings=False), options(tie_word_embeddings=True)
WINDOWS = options(
    layer_types=("full_attention", "sliding_attention", "sliding_attention", "full_attention"),
    use_sliding_window=True,
    sliding_window=3,
)
LANGUAGE = {
    Case("RobertaForMaskedLM", "masked"): SMALL,
    Case("DistilBertForMaskedLM", "masked"): SMALL,
    Case("OPTForCausalLM", "causal"): SMALL,
    Case("GPTNeoXForCausalLM", "causal"): SMALL,
    Case("LlamaForCausalLM", "causal"): REPLICAS,
    Case(
        "Qwen2ForCausalLM", "causal", tuple((key, tuple(v) if isinstance(v, list) else v) for key, v in WINDOWS)
    ): DEEP,
}
CLASSIFIERS = [
    Case(f"{family}ForSequenceClassification", "classes", lr=0.1)
    for family in ("Roberta", "DistilBert", "OPT", "GPTNeoX", "Llama", "Qwen2")
]
VARIANTS = [
    Case("GPT2LMHeadModel", "causal", UNTIED),
    Case("BertForMaskedLM", "masked", UNTIED),
    Case("RobertaForMaskedLM", "masked", UNTIED),
    Case("RobertaForCausalLM", "causal", options(is_decoder=True)),
    Case("DistilBertForMaskedLM", "masked", UNTIED),
    Case("OPTForCausalLM", "causal", UNTIED),
    Case("OPTForCausalLM", "causal", options(word_embed_proj_dim=WIDTH, do_layer_norm_before=False)),
    Case("GPTNeoXForCausalLM", "causal", TIED),
    Case("GPTNeoXForCausalLM", "causal", options(use_parallel_residual=False)),
    Case("LlamaForCausalLM", "causal", TIED),
    Case("LlamaForTokenClassification", "tokens", lr=0.1),
    Case("LlamaForQuestionAnswering", "answers", lr=0.1),
    Case("Qwen2ForCausalLM", "causal", TIED),
    Case("DistilBertForMultipleChoice", "choice", lr=0.1),
    Case("RobertaForQuestionAnswering", "answers", options(num_labels=2), lr=0.1),
]


@pytest.mark.contract("Models", "RoBERTa, DistilBERT, OPT, GPT-NeoX, Llama and Qwen2, with every head")
@pytest.mark.parametrize(("case", "cell"), LANGUAGE.items(), ids=short)
def test_a_family_trains_and_validates_as_in_one_process(world: World, case: Case, cell: Cell) -> None:
    check_all(world, cell, case)


@pytest.mark.contract("Models", "RoBERTa, DistilBERT, OPT, GPT-NeoX, Llama and Qwen2, with every head")
@pytest.mark.long
@pytest.mark.parametrize("case", [*LANGUAGE, *CLASSIFIERS, *VARIANTS], ids=short)
@pytest.mark.parametrize("cell", [PAIRS, BOTH], ids=short)
def test_a_family_does_so_with_every_head(world: World, case: Case, cell: Cell) -> None:
    check_all(world, cell, case)


@dataclass(frozen=True)
class Registered:
    """A model of a family that the user makes known."""

    case: Case
    base: str
    family: Family

    def __call__(self, cell: Cell) -> Experiment:
        register_family(self.base, self.family)
        return self.case(cell)


@pytest.mark.contract("Models", "another architecture, made known by `register_family`")
@pytest.mark.parametrize(
    ("make", "cell"),
    [
        (
            Registered(
                Case("ElectraForMaskedLM", "masked"),
                "ElectraModel",
                Family("encoder.layer", prologue=("embeddings", "embeddings_project")),
            ),
            SMALL,
        ),
        # Its blocks return tuples, and its attention is computed in single precision.
        (
            Registered(
                Case("GPTNeoForSequenceClassification", "classes", options(attn_implementation="eager"), lr=0.1),
                "GPTNeoModel",
                Family("h", prologue=("wte", "wpe", "drop")),
            ),
            replace(DEEP, precision="32-true"),
        ),
    ],
    ids=["electra", "gpt_neo"],
)
def test_a_family_may_be_registered(world: World, make: Registered, cell: Cell) -> None:
    check_all(world, cell, make)


# ----------------------------------------------------------------------------------------------------------- features

GPT2 = Case("GPT2LMHeadModel", "causal")
BERT = Case("BertForMaskedLM", "masked")
LORA = ("q_proj", "v_proj")
FEATURES = {
    replace(GPT2, options=options(attn_implementation="eager", scale_attn_by_inverse_layer_idx=True)): DEEP,
    replace(GPT2, options=options(attn_implementation="eager", reorder_and_upcast_attn=True)): replace(
        SMALL, precision="32-true"
    ),
    replace(GPT2, checkpointing=True): DEEP,
    replace(BERT, checkpointing=False): SMALL,
    Case("LlamaForCausalLM", "causal", checkpointing=True, trains=LORA): PAIRS,
    replace(GPT2, batch="shared"): SMALL,
    replace(GPT2, padding="left"): SMALL,
    replace(BERT, batch="types", trains=("layer.2.", "layer.3.", "cls")): DEEP,
}
MORE_FEATURES = [
    replace(BERT, options=options(attn_implementation="eager")),
    replace(GPT2, options=options(scale_attn_by_inverse_layer_idx=True)),
    *(replace(case, checkpointing=reentrant) for case in (GPT2, BERT) for reentrant in (True, False)),
    Case("LlamaForCausalLM", "causal", checkpointing=False, trains=LORA),
    Case("LlamaForCausalLM", "causal", trains=LORA),
    Case("GPTNeoXForCausalLM", "causal", checkpointing=True),
    Case("OPTForCausalLM", "causal", checkpointing=True),
    Case("DistilBertForMaskedLM", "masked", checkpointing=True),
    *(replace(case, padding=side) for case in (GPT2, BERT) for side in ("left", "right")),
    *(replace(case, padding=side, batch="positions") for case in (GPT2, BERT) for side in ("left", "right")),
    Case("LlamaForCausalLM", "causal", padding="left"),
    Case("LlamaForCausalLM", "causal", padding="left", batch="positions"),
    Case("OPTForCausalLM", "causal", padding="left"),
    Case("GPT2ForSequenceClassification", "classes", padding="left"),
    *(replace(case, batch=form) for case in (GPT2, BERT) for form in ("types", "bool", "square", "shared", "added")),
    *(
        Case("LlamaForCausalLM", "causal", batch=form)
        for form in ("bool", "square", "shared", "added", "packed", "positions")
    ),
    Case("Qwen2ForCausalLM", "causal", WINDOWS, batch="layers"),
    replace(GPT2, batch="packed"),
    replace(GPT2, batch="packed", options=options(use_cache=False)),
    Case("LlamaForCausalLM", "causal", options(use_cache=False), batch="packed"),
    replace(GPT2, trains=("h.0.", "h.1.", "h.3.", "ln_f")),  # one stage of four is frozen
    replace(GPT2, trains=("h.1.", "h.2.")),
    replace(BERT, trains=("embeddings",), options=UNTIED),
    replace(BERT, trains=("query", "value")),
]


@pytest.mark.contract(
    "Models",
    "attention scaled by layer or upcast, gradient checkpointing of both kinds, 2-D, 4-D and shared masks, padding on"
    " either side",
    reported="HF#9173, HF#3167, TT#1723",
)
@pytest.mark.parametrize(("case", "cell"), FEATURES.items(), ids=short)
def test_a_feature_of_the_models_changes_nothing(world: World, case: Case, cell: Cell) -> None:
    check_all(world, cell, case)


@pytest.mark.contract(
    "Models",
    "attention scaled by layer or upcast, gradient checkpointing of both kinds, 2-D, 4-D and shared masks, padding on"
    " either side",
)
@pytest.mark.long
@pytest.mark.parametrize("case", MORE_FEATURES, ids=short)
@pytest.mark.parametrize("cell", [UNEVEN, PAIRS, REPLICAS], ids=short)
def test_no_other_feature_changes_anything(world: World, case: Case, cell: Cell) -> None:
    check_all(world, cell, case)


# ------------------------------------------------------------------------------------------------ more than the model


class Distills(Wrapped):
    """Learns from a model that is frozen, which is asked before or after the one that trains."""

    def __init__(self, *, asks_first: bool) -> None:
        super().__init__(make_model("GPT2LMHeadModel"), 1.0)
        self.teacher = make_model("GPT2LMHeadModel", n_layer=2).requires_grad_(False)
        self.asks_first = asks_first

    def loss(self, batch: Any) -> Tensor:
        texts = without(batch, "labels")
        wanted = self.teacher(**texts).logits if self.asks_first else None
        logits = self.model(**texts).logits
        wanted = self.teacher(**texts).logits if wanted is None else wanted
        return nn.functional.kl_div(logits.log_softmax(-1), wanted.softmax(-1), reduction="batchmean") / LENGTH

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        del batch["labels"]
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.notes += [self.loss(batch)]

    def microbatch_weight(self, batch: Row) -> int:
        return len(batch["input_ids"])


def distills(cell: Cell) -> Experiment:
    return experiment(cell, Distills(asks_first=True), "causal")


def distills_afterwards(cell: Cell) -> Experiment:
    return experiment(cell, Distills(asks_first=False), "causal")


@pytest.mark.contract(
    "Models", "distillation from a frozen HuggingFace model beside the one that trains; every rank holds it whole"
)
@pytest.mark.parametrize(("cell", "make"), [(SMALL, distills), (BOTH, distills_afterwards)], ids=short)
def test_a_frozen_model_beside_the_one_that_trains_is_held_whole(world: World, cell: Cell, make: Any) -> None:
    plain, ranks = check(world, cell, make)
    frozen = {name for name in plain.before if name.startswith("teacher.")}
    for seen in ranks:
        assert frozen <= set(seen.keys)
        torch.testing.assert_close(seen.notes, plain.notes, rtol=1e-9, atol=1e-9)


class Adapted(nn.Module):
    """A layer that does not train, with an adapter of low rank that does, as peft makes it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = layer.requires_grad_(False)
        rows, columns = layer.weight.shape
        self.lora_a = nn.Parameter(torch.randn(rows, 2) / 4)
        self.lora_b = nn.Parameter(torch.randn(2, columns) / 4)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.base_layer(hidden) + hidden @ self.lora_a @ self.lora_b


class Around(nn.Module):
    """What stands around an adapted model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.base_model = nn.ModuleDict({"model": model})

    def forward(self, **batch: Any) -> Any:
        return self.base_model["model"](**batch)


def adapters(cell: Cell) -> Experiment:
    model = make_model("GPT2LMHeadModel").requires_grad_(False)
    for block in model.transformer.h:
        block.attn.c_attn = Adapted(block.attn.c_attn)
    return experiment(cell, Wrapped(Around(model), 0.1), "causal")


@pytest.mark.contract("Models", "LoRA adapters on frozen blocks, by hand or as peft's `get_peft_model` puts them")
@pytest.mark.parametrize("cell", [PAIRS, BOTH], ids=short)
def test_adapters_of_low_rank_train_on_frozen_blocks(world: World, cell: Cell) -> None:
    check_all(world, cell, adapters)


# ----------------------------------------------------------------------------------------------------------- refusals


class Generates(Wrapped):
    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        self.model.generate(batch["input_ids"][:, :3], max_new_tokens=2)
        return super().training_step(batch, batch_idx)


class GeneratesInValidation(Wrapped):
    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.model.generate(batch["input_ids"][:, :3], max_new_tokens=2)


def generates(cell: Cell) -> Experiment:
    return experiment(cell, Generates(make_model("GPT2LMHeadModel"), 1.0), "causal")


def generates_in_validation(cell: Cell) -> Experiment:
    return experiment(cell, GeneratesInValidation(make_model("GPT2LMHeadModel"), 1.0), "causal")


class AsTuple(Wrapped):
    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        loss: Tensor = self.model(**batch, return_dict=False)[0]
        return loss


class LabelsOutsideOfTheBatch(Wrapped):
    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "mc_labels": torch.zeros_like(batch["input_ids"][:, 0, 0])}, batch_idx)


class OtherLabels(Wrapped):
    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        labels = batch["labels"].masked_fill(batch["labels"] % 2 == 0, -100)
        return super().training_step({**batch, "labels": labels}, batch_idx)


class IgnoresAnotherLabel(Wrapped):
    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        return super().training_step({**batch, "ignore_index": 7}, batch_idx)


def without(rows: Mapping[str, Tensor], *names: str) -> Row:
    return {name: value for name, value in rows.items() if name not in names}


def as_tuple(cell: Cell) -> Experiment:
    return experiment(cell, AsTuple(make_model("BertForPreTraining"), 1.0), "pretraining")


def labels_outside_of_the_batch(cell: Cell) -> Experiment:
    rows = [without(row, "mc_labels") for row in make_rows("double", ROWS)]
    module = LabelsOutsideOfTheBatch(make_model("GPT2DoubleHeadsModel", num_labels=1), 1.0)
    return Experiment(module, make_loader(rows))


def other_labels(cell: Cell) -> Experiment:
    return experiment(cell, OtherLabels(make_model("BertForPreTraining"), 1.0), "pretraining")


def ignores_another_label(cell: Cell) -> Experiment:
    return experiment(cell, IgnoresAnotherLabel(make_model("GPT2LMHeadModel"), 1.0), "causal")


def layerdrop(cell: Cell) -> Experiment:
    return Case("OPTForCausalLM", "causal", options(layerdrop=0.1))(cell)


def unknown(cell: Cell) -> Experiment:
    return Case("ElectraForMaskedLM", "masked")(cell)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        pytest.param(
            as_tuple,
            "return_dict=False hides which is which. Leave return_dict out",
            marks=pytest.mark.contract("Loss", "`return_dict=False` for a head that adds several means", "refused"),
        ),
        (labels_outside_of_the_batch, "the batch does not hold 'mc_labels'. Put the labels into it"),
        (other_labels, r"the step gave it labels of which \d+ count where those in the batch say \d+"),
        (ignores_another_label, "gives ignore_index to the model, whose loss is then not the mean over its labels"),
        pytest.param(
            generates,
            r"generate\(\) was called inside a step.*one forward of the model per step.*strategy.full_parameters\(\)",
            marks=pytest.mark.contract("Models", "`model.generate` inside a training step", "refused"),
        ),
        pytest.param(
            generates_in_validation,
            r"generate\(\) was called inside a step.*one forward of the model per step.*strategy.full_parameters\(\)",
            marks=pytest.mark.contract(
                "Models", "`model.generate` inside a validation, test or predict step", "refused"
            ),
        ),
        (layerdrop, r"leaves out blocks at random \(layerdrop=0.1\).*Set layerdrop=0.0"),
        (unknown, r"holds the HuggingFace models .*ElectraModel.*must contain exactly one of.*register_family"),
    ],
)
def test_what_cannot_be_cut_or_weighed_is_refused_by_name(world: World, make: Any, message: str) -> None:
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        world.run(train, SMALL, make, size=2, limit=30)
