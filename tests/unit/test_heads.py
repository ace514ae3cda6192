"""Every head of the table adds up to what HuggingFace computes, whichever way its rows are parted."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AlbertConfig,
    AlbertForPreTraining,
    BertConfig,
    BertForNextSentencePrediction,
    BertForPreTraining,
    BertForQuestionAnswering,
    BertForSequenceClassification,
    GPT2Config,
    GPT2DoubleHeadsModel,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from lightning_chimera.partition.heads import (
    AnswerCount,
    HeadLoss,
    LabelCount,
    Weighing,
    head_loss_of,
    hold_ignored,
    weigh_terms,
)

VOCABULARY, LENGTH = 19, 5
BERT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
}
GPT2 = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "bos_token_id": 1, "eos_token_id": 2}
IDS = torch.arange(4 * LENGTH).reshape(4, LENGTH) % VOCABULARY
LABELS = IDS.clone()
LABELS[0, 2:] = LABELS[2, :4] = -100
NOWHERE = torch.full((4,), -100)


@pytest.fixture(autouse=True)
def _double_precision() -> Iterator[None]:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def pretraining() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    labels = {"labels": LABELS, "next_sentence_label": torch.tensor([1, -100, 0, 1])}
    return BertForPreTraining(BertConfig(**BERT)), {"input_ids": IDS, **labels}


def double_heads() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    texts = torch.stack([IDS, IDS.flip(0)], dim=1)
    labels = {"labels": torch.stack([LABELS, LABELS], dim=1), "mc_labels": torch.tensor([1, -100, -100, 0])}
    model = GPT2DoubleHeadsModel(GPT2Config(num_labels=1, **GPT2))
    return model, {"input_ids": texts, "mc_token_ids": torch.full((4, 2), LENGTH - 1), **labels}


def answers() -> tuple[PreTrainedModel, dict[str, Tensor]]:
    # Outside of the text, so ignored; before its start, so taken as its first position; with a dimension too many.
    starts, ends = torch.tensor([2, LENGTH, 70, -1]), torch.tensor([[4], [LENGTH + 1], [3], [3]])
    return BertForQuestionAnswering(BertConfig(**BERT)), {
        "input_ids": IDS,
        "start_positions": starts,
        "end_positions": ends,
    }


def weighing(head: HeadLoss, *scales: float | None) -> Weighing:
    return Weighing(lambda place, given: head.counts[place](given), scales)


def losses(output: Any) -> Tensor:
    return torch.stack([output[name] for name in ("loss", "mc_loss") if name in output])


@pytest.mark.parametrize("make", [pretraining, double_heads, answers])
@pytest.mark.parametrize("parts", [[4], [2, 2], [1, 3], [1, 1, 1, 1]], ids=str)
def test_terms_weighed_one_by_one_add_up_to_the_whole_loss(make: Any, parts: list[int]) -> None:
    model, batch = make()
    model.eval()
    head = head_loss_of(model)
    assert head is not None
    whole = losses(model(**batch))
    totals = [count(batch) for count in head.counts]
    found = torch.zeros_like(whole)
    pieces = zip(*(value.split(parts) for value in batch.values()), strict=True)
    for rows, piece in zip(parts, pieces, strict=True):
        given = dict(zip(batch, piece, strict=True))
        counts = tuple(count(given) for count in head.counts)
        scales = tuple(count / total / (rows / 4) for count, total in zip(counts, totals, strict=True))
        output = model(**given)
        assert weigh_terms(output, given, head, weighing(head, *scales), model.config) == counts
        found += losses(output) * (rows / 4)
    torch.testing.assert_close(found, whole, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("make", [pretraining, double_heads, answers])
def test_a_part_without_any_label_is_zero_and_depends_on_nothing(make: Any) -> None:
    model, batch = make()
    output = model(**batch)
    head = head_loss_of(model)
    assert head is not None
    weigh_terms(output, batch, head, weighing(head, 0.0, 0.0), model.config)
    assert losses(output).tolist() == [0.0] * len(losses(output))
    assert not losses(output).requires_grad


def test_terms_that_the_head_did_not_compute_are_left_alone() -> None:
    model, batch = double_heads()
    del batch["mc_labels"]
    output, head = model(**batch), head_loss_of(model)
    assert head is not None
    before = output.loss
    assert weigh_terms(output, batch, head, weighing(head, 2.0, None), model.config) == (
        int((LABELS[:, 1:] != -100).sum()) * 2,
        None,
    )
    torch.testing.assert_close(output.loss, 2 * before)
    assert output.mc_loss is None


def test_a_term_whose_labels_are_not_in_the_batch_is_refused() -> None:
    model, batch = double_heads()
    head = head_loss_of(model)
    assert head is not None
    with pytest.raises(ValueError, match=r"does not hold 'mc_labels'.*or define `microbatch_weight"):
        weigh_terms(model(**batch), batch, head, weighing(head, 1.0, None), model.config)


def test_a_tuple_of_several_terms_is_refused_where_labels_are_given() -> None:
    model, batch = pretraining()
    head = head_loss_of(model)
    assert head is not None
    with pytest.raises(ValueError, match="Leave return_dict out of the call and of the config"):
        weigh_terms(model(**batch, return_dict=False), batch, head, weighing(head, 1.0, 1.0), model.config)
    unlabelled = {"input_ids": IDS}
    assert (
        weigh_terms(model(**unlabelled, return_dict=False), unlabelled, head, weighing(head, None, None), model.config)
        == ()
    )


@pytest.mark.parametrize(
    ("labels", "count", "ignores"),
    [
        (LABELS, 13, True),
        (torch.tensor([0, 1, -100, 1]), 3, True),
        (torch.rand(4), 4, False),
        (torch.rand(4, 3), 4, False),
        (NOWHERE, 0, True),
        (None, None, False),
        ("words", None, False),
    ],
    ids=str,
)
def test_labels_are_counted_by_what_a_loss_makes_of_them(labels: Any, count: int | None, ignores: bool) -> None:
    given = {"labels": labels}
    assert (LabelCount()(given), hold_ignored([labels, torch.ones(2)])) == (count, ignores)


def test_answers_are_counted_where_they_lie_in_the_text() -> None:
    given = {"input_ids": IDS, "start_positions": torch.tensor([-3, 0, LENGTH - 1, LENGTH])}
    assert AnswerCount("start_positions")(given) == 3
    assert AnswerCount("end_positions")(given) is None


def on_meta(model: type[PreTrainedModel], config: Any) -> PreTrainedModel:
    with torch.device("meta"):
        return model(config)


@pytest.mark.parametrize(
    ("model", "entry"),
    [
        (on_meta(GPT2LMHeadModel, GPT2Config(**GPT2)), HeadLoss(LabelCount(shift=1))),
        (on_meta(LlamaForCausalLM, LlamaConfig(num_hidden_layers=1)), HeadLoss(LabelCount(shift=1))),
        (on_meta(BertForSequenceClassification, BertConfig(**BERT)), HeadLoss(LabelCount())),
        (on_meta(BertForNextSentencePrediction, BertConfig(**BERT)), HeadLoss(LabelCount())),
        (on_meta(AlbertForPreTraining, AlbertConfig(num_hidden_layers=1)), None),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_head_is_known_by_its_name_or_the_end_of_it(model: PreTrainedModel, entry: HeadLoss | None) -> None:
    assert head_loss_of(model) == entry


def test_a_head_of_one_mean_has_one_count() -> None:
    assert HeadLoss().counts == (LabelCount(),)
