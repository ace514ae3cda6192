"""How the heads of HuggingFace models normalise their own losses.

A head's loss is a mean over what its labels count: tokens, rows, answers. Parts of a batch can only be added up to the
whole batch's loss by these counts. A head with one mean is entered with its count; a head that adds several means of
different counts (MLM and next sentence, language model and multiple choice, start and end of an answer) with all of its
terms, which are then weighed one by one.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

Given = Mapping[str, Any]
"""Arguments of a head's ``forward`` by name, or a batch with the same keys."""

Scales = tuple[float | None, ...]
"""What each of a head's terms counts for, relative to the rows; ``None`` for one whose labels are not in the batch."""

IGNORED = -100
"""The label that HuggingFace's losses leave out."""

_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
"""What can hold it."""


@dataclass(frozen=True)
class LabelCount:
    """Counts the labels that a mean is taken over.

    Attributes:
        name: The argument of the head's ``forward``, and the key in the batch.
        shift: How many leading positions have no prediction: 1 for a causal language model, else 0.
    """

    name: str = "labels"
    shift: int = 0

    def __call__(self, given: Given) -> int | None:
        """Number of labels that count; ``None`` where there are none of that name."""
        labels = self.labels(given)
        return None if labels is None else self.of(labels)

    def basis(self, given: Given) -> tuple[Any, ...]:
        """What the number follows from."""
        return (given.get(self.name),)

    def labels(self, given: Given) -> Tensor | None:
        """The labels, if there are some of that name."""
        labels = given.get(self.name)
        return labels if isinstance(labels, Tensor) else None

    def of(self, labels: Tensor) -> int:
        """Number of labels that count."""
        if labels.is_floating_point():  # targets of a regression: a mean over rows
            return labels.shape[0]
        return int((labels[..., self.shift :] != IGNORED).sum())


def hold_ignored(values: Iterable[Any]) -> bool:
    """Whether tensors are among some values that are labels and ignored in part; a device is waited for once."""
    found: dict[torch.device, list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor) and value.dtype in _SIGNED:
            found.setdefault(value.device, []).append(value.reshape(-1))
    return any(bool((torch.cat(flat) == IGNORED).any()) for flat in found.values())


@dataclass(frozen=True)
class AnswerCount:
    """Counts the rows whose answer starts (or ends) inside of the text.

    Attributes:
        name: The argument with the positions.
    """

    name: str

    def __call__(self, given: Given) -> int | None:
        """Number of rows that count; ``None`` where there are no positions or no text."""
        positions, ids = given.get(self.name), given.get("input_ids")
        if not isinstance(positions, Tensor) or not isinstance(ids, Tensor):
            return None
        return int((positions.clamp(min=0) < ids.shape[1]).sum())

    def basis(self, given: Given) -> tuple[Any, ...]:
        """What the number follows from."""
        ids = given.get("input_ids")
        return given.get(self.name), ids.shape[1] if isinstance(ids, Tensor) else None


Count = LabelCount | AnswerCount


@dataclass(frozen=True)
class Term:
    """One of several means that a head's output holds.

    Attributes:
        count: Over how many things it is a mean.
        value: Computes it again from the head's output, its arguments and its config.
        attribute: The output's attribute that it is part of.
    """

    count: Count
    value: Callable[[Any, Given, Any], Tensor]
    attribute: str = "loss"


@dataclass(frozen=True)
class HeadLoss:
    """How a head's own loss normalises: one mean, or several terms.

    Attributes:
        count: The count of the one mean.
        terms: The terms, where there are several.
    """

    count: LabelCount = LabelCount()
    terms: tuple[Term, ...] = ()

    @property
    def counts(self) -> tuple[Count, ...]:
        """The count of each mean."""
        return tuple(term.count for term in self.terms) if self.terms else (self.count,)


@dataclass(frozen=True)
class Weighing:
    """How the means of a head are weighed for a part of a batch.

    Attributes:
        count: Over how many things a mean is taken, given its place among those of the head and the head's arguments.
        scales: What each of several terms counts for; ``None`` where there is one mean.
    """

    count: Callable[[int, Given], int | None]
    scales: Scales | None = None


def _cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))


def _masked_language(output: Any, given: Given, _config: Any) -> Tensor:
    return _cross_entropy(output.prediction_logits, given["labels"])


def _next_sentence(output: Any, given: Given, _config: Any) -> Tensor:
    return _cross_entropy(output.seq_relationship_logits, given["next_sentence_label"])


def _causal_language(output: Any, given: Given, _config: Any) -> Tensor:
    return _cross_entropy(output.logits[..., :-1, :], given["labels"][..., 1:])


def _multiple_choice(output: Any, given: Given, _config: Any) -> Tensor:
    return _cross_entropy(output.mc_logits, given["mc_labels"])


def _half_answer(logits: str, positions: str) -> Callable[[Any, Given, Any], Tensor]:
    """Half of the loss of a question answering head: its mean over the starts, or over the ends."""

    def value(output: Any, given: Given, _config: Any) -> Tensor:
        scores: Tensor = getattr(output, logits)
        outside = scores.shape[1]
        clamped = given[positions].reshape(-1).clamp(0, outside)
        return functional.cross_entropy(scores, clamped, ignore_index=outside) / 2

    return value


_CAUSAL = HeadLoss(LabelCount(shift=1))
_LABELS = HeadLoss(LabelCount())

HEAD_LOSSES: dict[str, HeadLoss] = {
    "GPT2LMHeadModel": _CAUSAL,
    "BertLMHeadModel": _CAUSAL,
    "GPT2DoubleHeadsModel": HeadLoss(
        terms=(
            Term(LabelCount("labels", shift=1), _causal_language),
            Term(LabelCount("mc_labels"), _multiple_choice, "mc_loss"),
        )
    ),
    "BertForPreTraining": HeadLoss(
        terms=(
            Term(LabelCount("labels"), _masked_language),
            Term(LabelCount("next_sentence_label"), _next_sentence),
        )
    ),
}
"""By class name. Heads that every family has are known by the end of their names, see ``_BY_SUFFIX``."""

_BY_SUFFIX: dict[str, HeadLoss] = {
    "ForCausalLM": _CAUSAL,
    "ForMaskedLM": _LABELS,
    "ForTokenClassification": _LABELS,
    "ForSequenceClassification": _LABELS,
    "ForMultipleChoice": _LABELS,
    "ForNextSentencePrediction": _LABELS,
    "ForQuestionAnswering": HeadLoss(
        terms=(
            Term(AnswerCount("start_positions"), _half_answer("start_logits", "start_positions")),
            Term(AnswerCount("end_positions"), _half_answer("end_logits", "end_positions")),
        )
    ),
}


def head_loss_of(top: PreTrainedModel) -> HeadLoss | None:
    """The entry of a head; ``None`` for one that is not known, whose loss then counts by rows."""
    name = type(top).__name__
    if name in HEAD_LOSSES:
        return HEAD_LOSSES[name]
    return next((loss for suffix, loss in _BY_SUFFIX.items() if name.endswith(suffix)), None)


def weigh_terms(output: Any, given: Given, head: HeadLoss, weighing: Weighing, config: Any) -> tuple[int | None, ...]:
    """Puts the weighed sums of a head's terms in the place of its losses.

    Args:
        output: The head's output; its losses are replaced.
        given: The head's arguments.
        head: The head's entry.
        weighing: What each term counts for.
        config: The model's config.

    Returns:
        Over how many things each term is a mean; ``None`` for one that the output does not hold.

    Raises:
        ValueError: The output is no ``ModelOutput``, or it holds a term whose labels are not in the batch.
    """
    if isinstance(output, tuple):
        if all(count(given) is None for count in head.counts):
            return ()
        raise ValueError(
            "The model's head adds several means, which are weighed one by one, and return_dict=False hides which is"
            " which. Leave return_dict out of the call and of the config."
        )
    weighed: dict[str, Tensor] = {}
    counts: list[int | None] = []
    assert weighing.scales is not None
    for place, (term, scale) in enumerate(zip(head.terms, weighing.scales, strict=True)):
        loss = getattr(output, term.attribute, None)
        counts.append(None if loss is None else weighing.count(place, given))
        if loss is None:
            continue
        if scale is None:
            raise ValueError(
                "The model's head adds several means, which are weighed by the labels in the batch, and the batch does"
                f" not hold {term.count.name!r}. Put the labels into it under the names of the model's arguments, or"
                " define `microbatch_weight(self, batch)` in your LightningModule: it gets one microbatch and returns"
                " what its loss counts for."
            )
        # A term without a label is left out: its mean is NaN, and would stay so times zero.
        part = term.value(output, given, config) * scale if scale else loss.new_zeros(())
        weighed[term.attribute] = weighed[term.attribute] + part if term.attribute in weighed else part
    for attribute, loss in weighed.items():
        setattr(output, attribute, loss)
    return tuple(counts)
