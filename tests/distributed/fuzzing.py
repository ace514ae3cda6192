"""Configurations of a training drawn at random, what each must do, and whether it did.

A draw is one flat value. Its ``repr`` can be pasted into a test. It makes its own rows, module and Trainer's options,
for the plain training and for the piped one.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from random import Random
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, default_collate
from transformers.utils import ModelOutput

from lightning_chimera import ChimeraStrategy
from lightning_chimera.partition.heads import head_loss_of
from lightning_chimera.schedules import SCHEDULES

from .fidelity import Cell, Experiment, Trained, same_changes, same_copies, snapshot, train
from .users import Row
from .world import RankFailed, World
from .zoo import make_model, make_rows, sizes_of

HEADS: dict[str, tuple[str, dict[str, Any]]] = {
    "GPT2LMHeadModel": ("causal", {}),
    "GPT2DoubleHeadsModel": ("double", {"num_labels": 1}),
    "GPT2ForSequenceClassification": ("classes", {}),
    "GPT2ForTokenClassification": ("tokens", {}),
    "GPT2ForQuestionAnswering": ("answers", {}),
    "BertForMaskedLM": ("masked", {}),
    "BertLMHeadModel": ("causal", {"is_decoder": True}),
    "BertForPreTraining": ("pretraining", {}),
    "BertForNextSentencePrediction": ("next_sentence", {}),
    "BertForMultipleChoice": ("choice", {}),
    "BertForSequenceClassification": ("scores", {"num_labels": 1}),
    "BertForTokenClassification": ("tokens", {}),
    "BertForQuestionAnswering": ("answers", {"num_labels": 2}),
    "RobertaForMaskedLM": ("masked", {}),
    "RobertaForSequenceClassification": ("classes", {}),
    "DistilBertForMaskedLM": ("masked", {}),
    "DistilBertForSequenceClassification": ("several", {"problem_type": "multi_label_classification"}),
    "OPTForCausalLM": ("causal", {}),
    "GPTNeoXForCausalLM": ("causal", {}),
    "LlamaForCausalLM": ("causal", {}),
    "Qwen2ForCausalLM": ("causal", {}),
    "LlamaForSequenceClassification": ("classes", {}),
}
"""The task of each model's head, and arguments of its config."""

LABELS = ("labels", "next_sentence_label", "mc_labels", "start_positions", "end_positions")
TIES = ("causal", "masked", "pretraining", "double")
COUNTED = ("causal", "masked", "tokens", "classes", "next_sentence", "choice", "pretraining", "double")
"""Tasks whose ``labels`` a loss of the user's own may count."""
STEPPING = 0.1


OPPOSITE = {name for name in SCHEDULES if name.startswith("chimera")} | {"gems", "dualpipe"}
"""Schedules whose pipes meet in the middle."""
SEVERAL_STAGES = {"chimera_split_v", "dualpipe_v", "hanayo", "interleaved", "v_half", "v_min", "zb_v"}
"""Schedules that give a rank two stages of a pipe."""


@dataclass(frozen=True)
class Draw:
    """One configuration.

    Attributes:
        model: The HuggingFace class.
        blocks: Number of its blocks.
        schedule: Name of the schedule.
        stages: Number of stages.
        replicas: Number of replicas.
        microbatches: Number of microbatches.
        cuts: ``None`` for balanced ones, ``early`` for those as early as possible, ``many`` for one too many.
        windows: For each batch of training its length, then the rows of each replica.
        spare: Whether one batch more is left that has no partner on the other replica.
        epochs: Number of epochs.
        padding: Side of the padding, or ``none``.
        labels: ``some`` rows have none, ``all`` tokens and rows have one, or whole batches are ``missing`` them.
        structure: Form of a batch: dict, output, tuple, nested, samples.
        extras: Whether a batch holds strings, numbers, ``None`` and tensors besides.
        source: What gives the batches: a batch ``sampler``, any ``iterable``, a ``stream``, ``workers``.
        loss: Of the ``model``; ``scaled``; of one's own by ``rows``, over ``tokens``, or ``weighed`` tokens.
        returns: ``tensor``, ``dict``, ``output``.
        call: How the model is called: ``dict`` or ``tuple`` (return_dict=False).
        keeps: What a step appends to a list of the module: ``nothing``, ``tensors``, a ``float``, or ``floats``.
        logs: Whether it logs, and gives the batch's size where it does.
        late: Whether the model is made in ``configure_model``.
        accumulate: Batches per step.
        clip: ``none``, ``norm``, ``value``.
        precision: As in the Trainer.
        tied: Whether the embeddings are the head's weights, where there is such a head.
        attention: HuggingFace's name of the implementation.
        recompute: Gradient checkpointing: ``none``, ``reentrant``, ``other``.
        frozen: What does not train: ``nothing``, ``embeddings``, ``first``, ``last``, ``body``.
        dropout: Probability of every dropout.
        optimizer: ``sgd``, ``momentum``, ``groups``, ``adamw``.
        scheduler: ``none``, ``step``, ``epoch``.
        validation: Rows of each validation batch; none for no validation.
        interval: ``val_check_interval``.
        limit: Validation batches that each replica may see.
        sanity: ``num_sanity_val_steps``.
        misuse: What the user does wrong.
    """

    model: str = "GPT2LMHeadModel"
    blocks: int = 4
    schedule: str = "chimera"
    stages: int = 2
    replicas: int = 1
    microbatches: int = 2
    cuts: str | None = None
    windows: tuple[tuple[int, int, int], ...] = ((9, 4, 4), (9, 4, 4))
    spare: bool = False
    epochs: int = 1
    padding: str = "right"
    labels: str = "some"
    structure: str = "dict"
    extras: bool = False
    source: str = "sampler"
    loss: str = "model"
    returns: str = "tensor"
    call: str = "dict"
    keeps: str = "nothing"
    logs: str = "sized"
    late: bool = False
    accumulate: int = 1
    clip: str = "none"
    precision: str = "64-true"
    tied: bool = True
    attention: str = "sdpa"
    recompute: str = "none"
    frozen: str = "nothing"
    dropout: float = 0.0
    optimizer: str = "sgd"
    scheduler: str = "none"
    validation: tuple[int, ...] = ()
    interval: int | float = 1.0
    limit: int | None = None
    sanity: int = 0
    misuse: str = "nothing"

    def __repr__(self) -> str:
        """What differs from the usual, to be pasted."""
        given = ((field.name, getattr(self, field.name), field.default) for field in fields(self))
        return f"Draw({', '.join(f'{name}={value!r}' for name, value, usual in given if value != usual)})"

    @property
    def task(self) -> str:
        return HEADS[self.model][0]

    @property
    def cell(self) -> Cell:
        """The layout."""
        return Cell(
            self.schedule,
            self.stages,
            self.replicas,
            self.microbatches,
            self.model,
            self.precision,
            clip=False,
            accumulate=self.accumulate,
        )

    @property
    def reference(self) -> Cell:
        """The layout of what it must equal: a plain training, or with dropout the one of a single stage."""
        if not self.dropout:
            return self.cell.reference
        parts = self.microbatches * (2 if self.schedule == "chimera_halving" else 1)
        return replace(self.cell, schedule="gpipe", stages=1, microbatches=parts)

    @property
    def model_stages(self) -> int:
        """Into how many stages the model is cut: some schedules give a rank several."""
        chunks = 2 if self.schedule in SEVERAL_STAGES else 1
        return self.stages * chunks

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if self.precision == "64-true" else torch.float32

    @property
    def is_exact(self) -> bool:
        return self.precision == "64-true" and self.optimizer != "adamw"

    # ------------------------------------------------------------------------------------------------------- data

    def training_rows(self) -> list[list[list[Row]]]:
        """The rows of each replica in each batch."""
        sizes = [window[1 : 1 + self.replicas] for window in self.windows]
        rows = iter(self.rows(sum(map(sum, sizes)), self.padding))
        batches = [[[next(rows) for _ in range(size)] for size in window] for window in sizes]
        for number, ((length, *_), replicas) in enumerate(zip(self.windows, batches, strict=True)):
            for replica in replicas:
                replica[:] = [self.crop(row, length) for row in replica]
            self.label(replicas[0][0], [row for replica in replicas for row in replica], length, number)
        return batches

    def rows(self, count: int, padding: str) -> list[Row]:
        return [
            {name: value.to(self.dtype) if value.is_floating_point() else value for name, value in row.items()}
            | {"row": torch.tensor(number)}
            for number, row in enumerate(make_rows(self.task, count, padding=padding))
        ]

    def crop(self, row: Row, length: int) -> Row:
        """A row of another length, without its padding first; with all labels if they shall all be there."""
        part = slice(-length, None) if self.padding == "left" else slice(length)
        cropped = {
            name: value[..., part] if value.ndim and value.shape[-1] == 16 else value for name, value in row.items()
        }
        if "mc_token_ids" in row:
            cropped["mc_token_ids"] = row["mc_token_ids"].clamp(max=length - 1)
        if self.labels == "all":
            for name in set(LABELS) & set(row):
                cropped[name] = cropped[name].where(cropped[name] != -100, 1)
                cropped[name] = cropped[name].clamp(max=length - 1) if "positions" in name else cropped[name]
        return cropped

    def label(self, first: Row, rows: Sequence[Row], length: int, number: int) -> None:
        """Takes all labels from a batch, or sees to it that there is one of each kind: the plain loss is NaN else."""
        for name in set(LABELS) & set(first):
            if first[name].is_floating_point():
                continue
            nothing = length if "positions" in name else -100
            if self.labels == "missing" and number % 2:
                for row in rows:
                    row[name] = torch.full_like(row[name], nothing)
            elif first[name].ndim:
                first[name][..., -1] = 1
            else:
                first[name] = torch.tensor(1)

    def loader(self, cell: Cell, batches: list[list[list[Row]]]) -> Any:
        """The training's loader: the plain one gives the batches of all replicas at once."""
        if cell.schedule == "plain":
            drawn = [[row for replica in window for row in replica] for window in batches]
        else:
            drawn = [replica for window in batches for replica in window]
            drawn += drawn[:1] * (self.spare and self.replicas > 1)
        return self.serve(drawn)

    def serve(self, drawn: list[list[Row]]) -> Any:
        """A loader of batches."""
        collate = Collate(self)
        if self.source == "iterable":
            return Iterable([collate(rows) for rows in drawn])
        if self.source == "stream":
            return DataLoader(Stream(drawn), batch_size=None, collate_fn=collate)
        ends = torch.tensor([len(rows) for rows in drawn]).cumsum(0).tolist()
        indices = [list(range(end - len(rows), end)) for end, rows in zip(ends, drawn, strict=True)]
        rows = [row for batch in drawn for row in batch]
        workers = 2 if self.source == "workers" else 0
        return DataLoader(rows, batch_sampler=indices, collate_fn=collate, num_workers=workers)

    def validation_loader(self) -> Any:
        rows = iter(self.rows(sum(self.validation), self.padding))
        return self.serve([[self.crop(next(rows), 11) for _ in range(size)] for size in self.validation])

    # ----------------------------------------------------------------------------------------------------- module

    def make_model(self) -> Any:
        torch.manual_seed(0)
        _, options = HEADS[self.model]
        ties = {"tie_word_embeddings": self.tied} if self.task in TIES else {}
        sizes = sizes_of(self.model, blocks=self.blocks, dropout=self.dropout)
        model = make_model(self.model, attn_implementation=self.attention, **options, **ties, **sizes)
        if self.recompute != "none":
            model.gradient_checkpointing_enable({"use_reentrant": self.recompute == "reentrant"})
            model.enable_input_require_grads()
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(not self.freezes(name))
        return model

    def freezes(self, name: str) -> bool:
        """Whether a parameter of the model shall not train."""
        block = re.search(r"(?:^|\.)(?:h|layer|layers)\.(\d+)\.", name)
        number = int(block[1]) if block else None
        return {
            "nothing": False,
            "embeddings": number is None and re.search(r"wte|wpe|embed", name) is not None,
            "first": number == 0,
            "last": number == self.blocks - 1,
            "body": number is not None,
        }[self.frozen]

    def __call__(self, cell: Cell) -> Experiment:
        is_plain = cell.schedule == "plain"
        bases = (*[Late] * self.late, *[Weighed] * (self.loss == "weighed"), *[Validated] * bool(self.validation))
        module = type("Drawn", (*bases, Drawn), {})(self, is_plain=is_plain)
        loaders = {"train_dataloaders": self.loader(cell, self.training_rows())}
        if self.validation:
            loaders["val_dataloaders"] = self.validation_loader()
        return Experiment(module, loaders, self.options(cell, is_plain=is_plain))

    def options(self, cell: Cell, *, is_plain: bool) -> dict[str, Any]:
        options: dict[str, Any] = {
            "max_epochs": self.epochs,
            "max_steps": -1,
            "num_sanity_val_steps": self.sanity * (self.replicas if is_plain else 1),
            "log_every_n_steps": 1,
        }
        if self.clip != "none":
            options |= {"gradient_clip_val": 0.01, "gradient_clip_algorithm": self.clip}
        if self.validation:
            options["val_check_interval"] = self.interval
            if self.limit is not None:
                options["limit_val_batches"] = self.limit * (self.replicas if is_plain else 1)
        if self.cuts is not None and not is_plain:
            options["strategy"] = ChimeraStrategy(
                schedule=cell.schedule,
                num_stages=cell.stages,
                num_microbatches=cell.microbatches,
                cuts=range(1, (self.model_stages if cell == self.cell else cell.stages) + (self.cuts == "many")),
                print_plan=False,
                timeout=30,
            )
        return options


class Iterable:
    """Batches that are there already; a list would be one of loaders."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)

    def __len__(self) -> int:
        return len(self.batches)


class Stream(IterableDataset):
    """Gives batches of rows, one by one."""

    def __init__(self, batches: list[list[Row]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[Row]]:
        return iter(self.batches)


class Collate:
    """Makes batches of rows in the form of a draw; ``unpack`` undoes it."""

    def __init__(self, draw: Draw) -> None:
        self.draw = draw

    def __call__(self, rows: list[Row]) -> Any:
        if self.draw.structure == "samples":
            return rows
        text = default_collate(rows)
        numbers = text.pop("row")
        extras: dict[str, Any] = {"row": numbers}
        if self.draw.extras:
            extras |= {
                "names": [f"row {number}" for number in numbers.tolist()],
                "nothing": None,
                "count": 3,
                "kind": "text",
                "scalar": torch.tensor(2.5),
                "table": torch.ones(11, 2),
            }
        if self.draw.structure == "tuple":
            return (*text.values(), extras)
        if self.draw.structure == "nested":
            labels = {name: text.pop(name) for name in LABELS if name in text}
            return {"text": {"inputs": text, "targets": labels}, "rest": (extras,)}
        return (ModelOutput if self.draw.structure == "output" else dict)({**text, **extras})


def unpack(draw: Draw, batch: Any) -> tuple[Row, dict[str, Any]]:
    """The model's arguments and all else in a batch."""
    if draw.structure == "samples":
        text = {name: torch.stack([row[name] for row in batch]) for name in batch[0]}
        return text, {"row": text.pop("row")}
    if draw.structure == "tuple":
        names = list(make_rows(draw.task, 1)[0])
        return dict(zip(names, batch[:-1], strict=True)), batch[-1]
    if draw.structure == "nested":
        return {**batch["text"]["inputs"], **batch["text"]["targets"]}, batch["rest"][0]
    names = list(make_rows(draw.task, 1)[0])
    return {name: batch[name] for name in names}, {name: value for name, value in batch.items() if name not in names}


class Drawn(L.LightningModule):
    """The module of a draw.

    Args:
        draw: The draw.
        is_plain: Whether it is trained plainly. Then it leaves out a batch without a label itself.
    """

    def __init__(self, draw: Draw, *, is_plain: bool) -> None:
        super().__init__()
        self.draw = draw
        self.is_plain = is_plain
        self.automatic_optimization = draw.misuse != "manual"
        self.kept: list[Any] = []
        self.returned: list[Any] = []
        self.notes: dict[str, Any] = {}
        if not draw.late:
            self.model = draw.make_model()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        text, extras = unpack(self.draw, batch)
        self.check_extras(extras)
        if self.draw.keeps == "tensors":
            self.kept.append(extras["row"].double())
        output, loss, logits = self.losses(text)
        if self.draw.logs != "nothing":
            self.report(loss, text)
        if self.draw.keeps in ("floats", "float"):
            self.kept.append(float(loss.detach()))
            if self.draw.keeps == "floats":
                self.kept.append(1.5)
                self.kept.extend(extras["row"].tolist())
        elif self.draw.keeps == "tensors":
            self.kept.append(logits.detach().flatten(1).mean(1))
        if self.draw.misuse == "none" or (self.is_plain and not self.counts(text)):
            return None
        if self.draw.misuse == "twice":
            self.model(**text)
        if self.draw.returns == "dict":
            return {"loss": loss, "row": extras["row"], "note": loss.detach(), "kind": "text"}
        return output if self.draw.returns == "output" else loss

    def check_extras(self, extras: Mapping[str, Any]) -> None:
        if self.draw.extras:
            assert extras["names"] == [f"row {number}" for number in extras["row"].tolist()]
            assert (extras["nothing"], extras["count"], extras["kind"]) == (None, 3, "text")
            assert (extras["scalar"].shape, extras["table"].shape) == ((), (11, 2))

    def losses(self, text: Row) -> tuple[Any, Tensor, Tensor]:
        """The model's output, the loss and the logits."""
        own = self.draw.loss in ("rows", "tokens", "weighed")
        given = {name: value for name, value in text.items() if not (own and name in LABELS)}
        more = {"output_hidden_states": True} if self.draw.misuse == "hidden" else {}
        if self.draw.call == "tuple":
            output = self.model(**given, **more, return_dict=False)
            return output, output[0], output[1]
        output = self.model(**given, **more)
        logits = next(output[name] for name in ("logits", "prediction_logits", "start_logits") if name in output)
        if self.draw.loss == "rows":
            return output, logits.flatten(1).square().mean(), logits
        if own:
            return output, self.token_loss(logits, text["labels"]), logits
        if self.draw.loss == "scaled":
            return output, 0.5 * (output.loss + 0.7 * output.mc_loss if "mc_loss" in output else output.loss), logits
        return output, output.loss, logits

    def token_loss(self, logits: Tensor, labels: Tensor) -> Tensor:
        if self.draw.task in ("causal", "double"):
            logits, labels = logits[..., :-1, :], labels[..., 1:]
        return nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())

    def counts(self, text: Row) -> bool:
        """Whether there is a label of some kind, or the loss needs none."""
        given = {name: value for name, value in text.items() if name in LABELS}
        if self.draw.loss in ("tokens", "weighed"):
            given = {"labels": given["labels"]}
        length = text["input_ids"].shape[-1]
        return self.draw.loss == "rows" or any(
            value.is_floating_point() or bool(((value != -100) & (("positions" not in name) | (value < length))).any())
            for name, value in given.items()
        )

    def report(self, loss: Tensor, text: Row) -> None:
        rows = len(text["input_ids"])
        size = {"batch_size": rows} if self.draw.logs == "sized" else {}
        self.log("train_loss", loss, on_step=True, on_epoch=True, **size)
        self.log_dict({"rows": float(rows)}, reduce_fx="sum", on_step=True, on_epoch=True, **size)
        self.log("most", text["attention_mask"].sum(-1).max().float(), reduce_fx="max", on_epoch=True, **size)
        self.log("least", text["attention_mask"].sum(-1).min().float(), reduce_fx=min, on_step=True, **size)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.draw.returns == "dict":
            self.returned.append({name: outputs.get(name) for name in ("row", "note", "kind")})

    def on_fit_end(self) -> None:
        self.notes["metrics"] = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        self.notes["steps"] = (self.trainer.global_step, self.trainer.num_training_batches, self.trainer.current_epoch)
        self.notes["rates"] = [group["lr"] for group in self.trainer.optimizers[0].param_groups]
        self.notes["kept"] = self.kept
        self.notes["returned"] = self.returned

    def configure_optimizers(self) -> Any:
        lr = 0.01 if self.draw.precision == "bf16-mixed" else STEPPING
        if self.draw.misuse == "lbfgs":
            return torch.optim.LBFGS(self.parameters(), lr=lr)
        if self.draw.misuse == "several":
            return [torch.optim.SGD([parameter], lr=lr) for parameter in list(self.parameters())[:2]]
        if self.draw.optimizer == "groups":
            groups = [
                [value for name, value in self.named_parameters() if ("bias" in name) == has] for has in (True, False)
            ]
            chosen = [{"params": groups[0], "lr": lr / 2}, {"params": groups[1], "weight_decay": 0.1}]
            optimizer: torch.optim.Optimizer = torch.optim.SGD([group for group in chosen if group["params"]], lr=lr)
        elif self.draw.optimizer == "adamw":
            optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4, eps=1e-4)
        else:
            momentum = {"momentum": 0.9, "weight_decay": 0.1} if self.draw.optimizer == "momentum" else {}
            optimizer = torch.optim.SGD(self.parameters(), lr=lr, **momentum)
        if self.draw.scheduler == "none":
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": self.draw.scheduler}}


class Late(Drawn):
    """Makes its model when the Trainer asks for it."""

    def configure_model(self) -> None:
        if not hasattr(self, "model"):
            self.model = self.draw.make_model()


class Weighed(Drawn):
    """Says over how many labels its loss is a mean."""

    def microbatch_weight(self, batch: Any) -> Tensor:
        labels = unpack(self.draw, batch)[0]["labels"]
        return (labels[..., 1:] != -100).sum() if self.draw.task in ("causal", "double") else (labels != -100).sum()


class Validated(Drawn):
    """Validates."""

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        text, extras = unpack(self.draw, batch)
        self.check_extras(extras)
        output = self.model(**text)
        rows = len(text["input_ids"])
        self.log("val_loss", output.loss, batch_size=rows)
        self.log("val_rows", float(rows), reduce_fx="sum", batch_size=rows)
        self.notes["validation"][-1].append(output.loss)
        return {"loss": output.loss, "row": extras["row"]}

    def on_validation_start(self) -> None:
        for name in ("validation", "rows"):
            self.notes.setdefault(name, []).append([])

    def on_validation_batch_end(self, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        if outputs is not None:  # on a replica that has no batch left
            self.notes["rows"][-1].append(outputs["row"].tolist())


# ------------------------------------------------------------------------------------------------------------ drawing


def drawn(number: int) -> Draw:
    """The draw of a number; a few draws have one thing that is to be refused."""
    random = Random(number)

    def one_of(*values: Any) -> Any:
        return random.choice(values)

    def usually(usual: Any, *others: Any) -> Any:
        return usual if random.random() < 0.7 else one_of(*others)

    def rarely(usual: Any, *others: Any) -> Any:
        return usual if random.random() < 0.97 else one_of(*others)

    model = one_of(*HEADS)
    task = HEADS[model][0]
    precision = usually("64-true", "32-true", "bf16-mixed")
    is_single, has_eager = precision != "64-true", model.startswith(("GPT2", "Bert", "Roberta", "DistilBert"))
    loss = usually("model", "scaled", "rows", *(("tokens", "weighed") if task in COUNTED else ()))
    needs_all = loss in ("scaled", "rows", "tokens")
    call = usually("dict", "tuple") if loss == "model" else "dict"
    structure = one_of("dict", "output", "tuple", "nested", *(("samples",) if task not in ("choice", "double") else ()))
    labels = usually("all", "some", "missing") if needs_all else one_of("all", "some", "missing")
    windows = tuple(
        (random.randint(3, 16), random.randint(1, 9), random.randint(1, 9)) for _ in range(one_of(1, 2, 3, 4))
    )
    return Draw(
        model=model,
        blocks=usually(4, 1, 2, 3, 5),
        schedule=one_of(*SCHEDULES),
        stages=usually(2, 1, 3, 4),
        replicas=usually(1, 2),
        microbatches=rarely(random.randint(1, 8), 0),
        cuts=rarely(usually(None, "early"), "many"),
        windows=windows,
        spare=one_of(False, True),
        epochs=one_of(1, 2),
        padding=one_of("right", "left", "none"),
        labels=labels,
        structure=structure,
        extras=structure != "samples" and one_of(False, True),
        source=one_of("sampler", "sampler", "iterable", "stream", "workers"),
        loss=loss,
        returns=one_of("tensor", "dict", *(("output",) if loss == "model" and call == "dict" else ())),
        call=call,
        keeps=one_of("nothing", "tensors", "float", "floats") if call == "dict" else "nothing",
        logs=one_of("nothing", "sized", *(("plain",) if structure != "samples" else ())),
        late=usually(False, True),
        accumulate=one_of(1, 2, 3, 4),
        # Without any gradient clipping by value fails in a plain training.
        clip=one_of("none", "norm", *(("value",) if labels != "missing" else ())),
        precision=precision,
        tied=one_of(True, False),
        # HuggingFace's eager attention of the other families is computed in single precision.
        attention=one_of("sdpa", "eager") if has_eager or is_single else "sdpa",
        recompute=usually("none", "reentrant", "other"),
        frozen=usually("nothing", "embeddings", "first", "last", "body"),
        dropout=usually(0.0, 0.2),
        optimizer="sgd" if precision == "32-true" else one_of("sgd", "momentum", "groups", "adamw"),
        scheduler="none" if precision == "32-true" else one_of("none", "step", "epoch"),
        validation=tuple(random.randint(1, 9) for _ in range(one_of(0, 1, 2, 3))),
        interval=one_of(1.0, random.randint(1, len(windows))),
        limit=one_of(None, 1, 2),
        sanity=one_of(0, 2),
        misuse=rarely(rarely("nothing", "manual", "lbfgs", "several"), "none", "twice", "hidden"),
    )


# ----------------------------------------------------------------------------------------------------------- judging


def refusals(draw: Draw) -> list[str]:
    """What the message must say, one for each reason to refuse a draw."""
    head = head_loss_of_name(draw.model)
    has_terms = head is not None and bool(head.terms)
    gives_labels = draw.loss in ("model", "scaled")
    hides_labels = draw.structure in ("tuple", "nested", "samples")
    batches = [row for window in draw.training_rows() for replica in window for row in replica]
    ignored = any(bool((row[name] == -100).any()) for row in batches for name in LABELS if name in row)
    weighs_by_rows = draw.loss in ("rows", "tokens") or (draw.loss == "scaled" and not has_terms)
    table = [
        (draw.microbatches < 1, "num_microbatches=0: it must be a whole number of at least 1"),
        (draw.schedule in OPPOSITE and draw.stages == 3, "needs an even number of stages.*Use 2 or 4 stages"),
        (
            draw.schedule == "dualpipe_v" and draw.microbatches < 2 * draw.stages,
            "needs at least twice as many microbatches as ranks",
        ),
        (
            draw.schedule == "dualpipe"
            and draw.stages > 1
            and (draw.microbatches % 2 == 1 or draw.microbatches < 2 * draw.stages),
            "needs an even number of microbatches, at least twice as many as stages",
        ),
        (draw.cuts is None and draw.model_stages > draw.blocks, "can't be cut into . stages.*Use at most"),
        (draw.cuts == "early" and draw.model_stages > draw.blocks, "do not cut . blocks? into . stages: give"),
        (draw.cuts == "many", "do not cut . blocks? into . stages: give"),
        (draw.misuse == "manual", "sets automatic_optimization=False.*needs automatic optimization"),
        (draw.misuse == "lbfgs", "LBFGS evaluates the step several times.*Use a first-order optimizer"),
        (draw.misuse == "several", "returned several optimizers.*give it several parameter groups"),
        (draw.misuse == "none", "training_step returned NoneType without a loss.*must return the loss"),
        (draw.misuse == "twice", "called more than once in one step.*compute everything from one call"),
        (draw.misuse == "hidden" and draw.model_stages > 1, "output_hidden_states=True asks.*Leave .* out"),
        (has_terms and gives_labels and draw.call == "tuple", "return_dict=False hides.*Leave return_dict out"),
        (has_terms and gives_labels and hides_labels, "the batch does not hold '.*Put the labels into it"),
        (weighs_by_rows and ignored, "labels hold -100.*Define `microbatch_weight"),
    ]
    return [message for holds, message in table if holds]


def head_loss_of_name(model: str) -> Any:
    """The table's entry of a class."""
    return head_loss_of(type(model, (), {})())  # type: ignore[arg-type]


def verify(world: World, draw: Draw) -> str:
    """Checks that a draw trains as its reference does, or is refused as it must be.

    Returns:
        ``equal`` or ``refused``.
    """
    expected = refusals(draw)
    failed, ranks = attempt(world, draw)
    if failed is not None:
        kind = failed.error.partition(":")[0].rpartition(".")[2]
        has_right_type = kind in ("ValueError", "RuntimeError", "MisconfigurationException")
        says_so = any(re.search(message, failed.error, re.DOTALL) for message in expected)
        assert expected, f"{draw!r}\nshould train, but: {failed}"
        assert has_right_type, f"{draw!r}\nshould be refused by an error of ours, but: {failed}"
        assert says_so, f"{draw!r}\nshould be refused with one of {expected}, but: {failed}"
        return "refused"
    assert not expected, f"{draw!r}\nshould be refused with {expected}"
    references = world.run(train, draw.reference, draw, size=draw.reference.size, limit=60)
    try:
        same_training(draw, ranks, references)
    except AssertionError as error:
        raise AssertionError(f"{draw!r}\n{error}") from error
    return "equal"


def attempt(world: World, draw: Draw) -> tuple[RankFailed | None, list[Trained]]:
    """Trains a draw; gives the failure, or what the ranks saw."""
    try:
        return None, world.run(train, draw.cell, draw, size=draw.cell.size, limit=60)
    except RankFailed as failed:
        return failed, []


def same_training(draw: Draw, ranks: list[Trained], references: list[Trained]) -> None:
    plain = references[0]
    if draw.late:
        before = {f"model.{name}": value for name, value in snapshot(draw.make_model()).items()}
        for seen in (*ranks, *references):
            seen.before = before
    if draw.precision == "32-true":
        for seen in ranks:
            # What is zero in exact arithmetic, as the bias of a softmax's logits, is the noise of single precision.
            same_changes(seen, plain, draw.precision, absolute_in_single=1e-6)
    elif draw.is_exact:
        same_changes(ranks[0], plain)
    for seen in ranks:
        torch.testing.assert_close(seen.after, ranks[0].after, rtol=0.0, atol=0.0)
        for name, value in ranks[0].after.items():
            assert value.isfinite().all(), name
    if draw.recompute == "none" or draw.precision == "64-true":
        same_copies(ranks)
    has_gaps = draw.labels == "missing" and len(draw.windows) > 1 and draw.loss != "rows"
    tolerance = {"64-true": 1e-9, "32-true": 1e-4, "bf16-mixed": 5e-2}[draw.precision]
    tolerance = 1e-6 if draw.optimizer == "adamw" and draw.precision == "64-true" else tolerance
    for rank, seen in enumerate(ranks):
        counted = [
            number for number, loss in enumerate(plain.losses) if not (has_gaps and number % len(draw.windows) % 2)
        ]
        close([seen.losses[number] for number in counted], [plain.losses[number] for number in counted], tolerance)
        reference = references[rank // draw.stages] if draw.dropout else plain
        same_notes(draw, seen.notes, reference.notes, max(tolerance, 2e-6), rank // draw.stages, has_gaps=has_gaps)


def same_notes(draw: Draw, found: Any, wanted: Any, tolerance: float, replica: int, *, has_gaps: bool) -> None:
    assert found["steps"] == wanted["steps"]
    close(found["rates"], wanted["rates"], 1e-9)
    in_gaps = ("train_loss", "train_loss_step", "train_loss_epoch") if has_gaps else ()
    metrics = [{name: value for name, value in it["metrics"].items() if name not in in_gaps} for it in (found, wanted)]
    assert metrics[0].keys() == metrics[1].keys()
    close(*metrics, tolerance)
    if not has_gaps:
        close(found["kept"], wanted["kept"], tolerance)
        close(found["returned"], wanted["returned"], tolerance)
    for name in ("validation", "rows") if draw.validation else ():
        if draw.dropout:
            close(found[name], wanted[name], tolerance)
            continue
        assert len(found[name]) == len(wanted[name])
        for one, other in zip(found[name], wanted[name], strict=True):
            close(one, other[replica :: draw.replicas], tolerance)


def close(found: Any, wanted: Any, tolerance: float) -> None:
    """Compares numbers, tensors, strings, and lists and dicts of them."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name, value in wanted.items():
            close(found[name], value, tolerance)
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), f"{len(found)} entries, not {len(wanted)}"
        for one, other in zip(found, wanted, strict=True):
            close(one, other, tolerance)
    elif isinstance(wanted, float | Tensor):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True, check_dtype=False)
    else:
        assert found == wanted
