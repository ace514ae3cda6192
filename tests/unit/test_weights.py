from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_chimera.partition.heads import HEAD_LOSSES, HeadLoss, LabelCount
from lightning_chimera.partition.stage import HeadCall
from lightning_chimera.runtime.microbatches import split
from lightning_chimera.runtime.weights import LossWeights

LABELS = torch.tensor([[5, 6, 7], [5, -100, -100], [-100, 6, 7], [5, 6, -100]])
BATCH = {"input_ids": torch.ones_like(LABELS), "labels": LABELS}
CAUSAL, MASKED = HeadLoss(LabelCount(shift=1)), HeadLoss()


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The group of one replica."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def called(weights: LossWeights, microbatch: int, given: dict[str, Any]) -> HeadCall:
    """The call of a head of one mean."""
    weighing = weights.weighing(microbatch)
    return HeadCall(labels=given["labels"], count=None if weighing is None else weighing.count(0, given))


def scales(weights: LossWeights, microbatch: int) -> Any:
    weighing = weights.weighing(microbatch)
    assert weighing is not None
    return weighing.scales


def shares(
    group: Any, head: HeadLoss | None, hook: Callable[[Any], float] | None = None, *, own_loss: bool = True
) -> list[float]:
    microbatches = split(BATCH, 2)
    weights = LossWeights(microbatches, head, hook, group)
    assert weights.total_rows == 4
    calls = [HeadCall() if head is None else called(weights, number, microbatches[number].data) for number in range(2)]
    return [weights.share(number, own_loss=own_loss, head=call) for number, call in enumerate(calls)]


def test_a_causal_loss_counts_by_the_labels_that_are_predicted(alone: Any) -> None:
    assert shares(alone, CAUSAL) == [2 / 5, 3 / 5]


def test_a_masked_loss_counts_by_all_labels(alone: Any) -> None:
    assert shares(alone, MASKED) == [4 / 8, 4 / 8]


def test_a_hook_decides_before_the_head(alone: Any) -> None:
    assert shares(alone, CAUSAL, lambda batch: len(batch["labels"]) + float(batch["labels"][0, 2])) == [9 / 18, 9 / 18]
    assert shares(alone, None, lambda batch: float(batch["labels"][0, 0] == 5), own_loss=False) == [1.0, 0.0]


def test_labels_of_the_steps_own_and_those_that_it_has_changed_are_counted_anew(alone: Any) -> None:
    microbatches = split({name: value.clone() for name, value in BATCH.items()}, 2)
    weights = LossWeights(microbatches, MASKED, None, alone)
    made = {"labels": torch.tensor([[1, 2], [3, -100]])}
    assert weights.share(0, own_loss=True, head=called(weights, 0, made)) == 3 / 8
    batch = microbatches[1].data
    assert weights.share(1, own_loss=True, head=called(weights, 1, batch)) == 4 / 8
    batch["labels"][0, 1] = -100
    assert weights.share(1, own_loss=True, head=called(weights, 1, batch)) == 3 / 8


def test_labels_count_as_they_were_when_the_head_was_called(alone: Any) -> None:
    microbatches = split({name: value.clone() for name, value in BATCH.items()}, 2)
    weights = LossWeights(microbatches, MASKED, None, alone)
    call = called(weights, 0, microbatches[0].data)
    call.labels[call.labels == -100] = 0  # for a metric that knows no labels to be ignored
    assert weights.share(0, own_loss=True, head=call) == 4 / 8


def test_a_batch_is_counted_once_and_before_the_schedule(alone: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    # On a device each count waits for all that was started there.
    for head, own_loss in ((MASKED, True), (HEAD_LOSSES["BertForPreTraining"], True), (MASKED, False), (None, False)):
        batch = {"labels": LABELS.clamp(min=0), "next_sentence_label": torch.tensor([1, 0, 1, 1])}
        microbatches = split(batch, 2)
        weights = LossWeights(microbatches, head, None, alone)
        with monkeypatch.context() as patch:
            patch.setattr(Tensor, "__bool__", lambda _: pytest.fail("waits"))
            patch.setattr(Tensor, "__int__", lambda _: pytest.fail("waits"))
            for number, microbatch in enumerate(microbatches):
                call, weighing = HeadCall(), weights.weighing(number)
                assert weighing is not None
                if head is MASKED:
                    call = called(weights, number, microbatch.data)
                elif head is not None:
                    call.counts = weighing.count(0, microbatch.data), weighing.count(1, microbatch.data)
                assert weights.share(number, own_loss=own_loss, head=call) == 1 / 2


@pytest.mark.parametrize("make", [Tensor.clone, Tensor.detach], ids=["made", "changed"])
def test_labels_that_a_step_ignores_itself_are_seen(alone: Any, make: Callable[[Tensor], Tensor]) -> None:
    microbatches = split({"labels": LABELS.clamp(min=0)}, 2)
    weights = LossWeights(microbatches, None, None, alone)
    labels = make(microbatches[0].data["labels"])
    labels[0, 1] = -100
    with pytest.raises(ValueError, match="labels hold -100"):
        weights.share(0, own_loss=False, head=HeadCall(labels=labels))


@pytest.mark.parametrize(("head", "own_loss"), [(CAUSAL, False), (None, True)])
def test_a_loss_of_unknown_weight_is_refused_where_labels_are_ignored(
    alone: Any, head: HeadLoss | None, own_loss: bool
) -> None:
    with pytest.raises(ValueError, match=r"labels hold -100.*microbatch_weight\(self, batch\)"):
        shares(alone, head, own_loss=own_loss)


@pytest.mark.parametrize("batch", [{"labels": torch.rand(3, 2)}, torch.rand(3, 2), {"input_ids": torch.ones(3, 2)}])
def test_other_losses_count_by_rows(alone: Any, batch: Tensor | dict[str, Tensor]) -> None:
    weights = LossWeights(split(batch, 2), None, None, alone)
    assert [weights.share(number, own_loss=False, head=HeadCall()) for number in range(2)] == [1 / 3, 2 / 3]


def test_each_term_of_a_head_is_weighed_by_its_own_count(alone: Any) -> None:
    batch = {"labels": LABELS, "next_sentence_label": torch.tensor([1, 0, -100, 1])}
    weights = LossWeights(split(batch, 2), HEAD_LOSSES["BertForPreTraining"], None, alone)
    # Half of the rows: a term counts for twice its share of the labels.
    assert scales(weights, 0) == (2 * 4 / 8, 2 * 2 / 3)
    assert scales(weights, 1) == (2 * 4 / 8, 2 * 1 / 3)
    counts = ((4, 2), (4, 1))
    assert [weights.share(n, own_loss=True, head=HeadCall(counts=counts[n])) for n in range(2)] == [1 / 2, 1 / 2]


def test_a_term_without_any_label_counts_nothing_and_one_without_labels_in_the_batch_has_no_weight(alone: Any) -> None:
    head = HEAD_LOSSES["BertForPreTraining"]
    assert scales(LossWeights(split({"labels": LABELS}, 2), head, None, alone), 0) == (2 * 4 / 8, None)
    nowhere = {"labels": LABELS, "next_sentence_label": torch.full((4,), -100)}
    assert scales(LossWeights(split(nowhere, 2), head, None, alone), 0) == (2 * 4 / 8, 0.0)


def test_terms_computed_from_other_labels_than_the_batchs_are_refused(alone: Any) -> None:
    batch = {"labels": LABELS, "next_sentence_label": torch.tensor([1, 0, -100, 1])}
    weights = LossWeights(split(batch, 2), HEAD_LOSSES["BertForPreTraining"], None, alone)
    assert weights.share(0, own_loss=True, head=HeadCall(counts=(4, 2))) == 1 / 2
    assert weights.share(0, own_loss=True, head=HeadCall(counts=(4, None))) == 1 / 2
    with pytest.raises(ValueError, match=r"labels of which 3 count where those in the batch say 4"):
        weights.share(0, own_loss=True, head=HeadCall(counts=(3, 2)))


def test_an_own_loss_of_a_head_with_several_terms_is_refused_where_labels_are_ignored(alone: Any) -> None:
    weights = LossWeights(split(BATCH, 2), HEAD_LOSSES["BertForPreTraining"], None, alone)
    with pytest.raises(ValueError, match="labels hold -100"):
        weights.share(0, own_loss=False, head=HeadCall())
