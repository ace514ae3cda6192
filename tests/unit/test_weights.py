from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from lightning_chimera.partition.anatomy import TokenLoss
from lightning_chimera.runtime.microbatches import split
from lightning_chimera.runtime.weights import LossWeights

LABELS = torch.tensor([[5, 6, 7], [5, -100, -100], [-100, 6, 7], [5, 6, -100]])
BATCH = {"input_ids": torch.ones_like(LABELS), "labels": LABELS}
CAUSAL, MASKED = TokenLoss(shift=1), TokenLoss()


@pytest.fixture(scope="module")
def alone() -> Iterator[Any]:
    """The group of one replica."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def shares(
    group: Any, head: TokenLoss | None, hook: Callable[[Any], float] | None = None, *, own_loss: bool = True
) -> list[float]:
    microbatches = split(BATCH, 2)
    weights = LossWeights(microbatches, head, hook, group)
    assert weights.total_rows == 4
    labels = [microbatch.data["labels"] for microbatch in microbatches]
    return [weights.share(number, own_loss=own_loss, labels=labels[number]) for number in range(2)]


def test_a_causal_loss_counts_by_the_labels_that_are_predicted(alone: Any) -> None:
    assert shares(alone, CAUSAL) == [2 / 5, 3 / 5]


def test_a_masked_loss_counts_by_all_labels(alone: Any) -> None:
    assert shares(alone, MASKED) == [4 / 8, 4 / 8]


def test_a_hook_decides_before_the_head(alone: Any) -> None:
    assert shares(alone, CAUSAL, lambda batch: len(batch["labels"]) + float(batch["labels"][0, 2])) == [9 / 18, 9 / 18]
    assert shares(alone, None, lambda batch: float(batch["labels"][0, 0] == 5), own_loss=False) == [1.0, 0.0]


@pytest.mark.parametrize(("head", "own_loss"), [(CAUSAL, False), (None, True)])
def test_a_loss_of_unknown_weight_is_refused_where_labels_are_ignored(
    alone: Any, head: TokenLoss | None, own_loss: bool
) -> None:
    with pytest.raises(ValueError, match=r"labels hold -100.*microbatch_weight\(self, batch\)"):
        shares(alone, head, own_loss=own_loss)


@pytest.mark.parametrize("batch", [{"labels": torch.rand(3, 2)}, torch.rand(3, 2), {"input_ids": torch.ones(3, 2)}])
def test_other_losses_count_by_rows(alone: Any, batch: Tensor | dict[str, Tensor]) -> None:
    weights = LossWeights(split(batch, 2), None, None, alone)
    assert [weights.share(number, own_loss=False, labels=None) for number in range(2)] == [1 / 3, 2 / 3]
