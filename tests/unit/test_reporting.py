import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torchmetrics import CatMetric, MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassPrecision, MulticlassRecall

from lightning_chimera.partition.stage import StageExit
from lightning_chimera.reporting import Updates, reduce

CASES = {
    "usual": ([0.25, 0.5, 0.25], [1.5, -2.25, 1e10]),
    "without weight": ([0.0, 0.0], [3.0, 5.0]),
    "a part without weight is not looked at": ([0.0, 0.75], [math.nan, 5.0]),
    "no number": ([0.5, 0.5], [math.nan, 5.0]),
    "the last is no number": ([0.5, 0.5], [5.0, math.nan]),
    "infinite": ([0.5, 0.5], [math.inf, -math.inf]),
    "one": ([0.3], [0.1]),
}


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_reduced_as_torch_reduces_tensors(name: str, reduce_fx: str) -> None:
    shares, values = CASES[name]
    of_tensors = reduce(reduce_fx, shares, [torch.tensor([value], dtype=torch.float64) for value in values])
    assert isinstance(of_tensors, torch.Tensor)
    torch.testing.assert_close(reduce(reduce_fx, shares, values), of_tensors.item(), rtol=1e-15, atol=0, equal_nan=True)


def leave(updates: Updates, work: Callable[[], Any]) -> None:
    """Does some work in a pass that leaves a stage."""
    with suppress(StageExit), updates.noting():
        work()
        raise StageExit(None)


def states(metrics: Iterable[Metric]) -> list[Any]:
    """What metrics hold, as numbers."""
    found = [getattr(metric, name) for metric in metrics for name in metric._defaults]
    return [[float(item) for item in state] if isinstance(state, list) else state.tolist() for state in found]


def test_what_a_pass_that_leaves_a_stage_does_to_metrics_is_undone() -> None:
    mean, cat = MeanMetric(), CatMetric()
    both = MetricCollection([MulticlassPrecision(3), MulticlassRecall(3)])  # which share their states from here on
    labels = torch.tensor([0, 1, 2, 1])
    mean.update(2.0)
    cat.update(3.0)
    both.update(labels, labels)
    shared = list(both.values(copy_state=False))
    metrics = [mean, cat, *shared]
    before = states(metrics)
    updates = Updates(metrics)
    for work in (
        lambda: (mean.update(7.0), cat.update(9.0), both.update(labels, 2 - labels)),
        lambda: (mean.reset(), cat.reset(), both.reset()),
        lambda: (cat.value.clear(), mean.mean_value.zero_()),
        lambda: setattr(mean, "calls", 1),
        lambda: None,
    ):
        leave(updates, work)
        assert states(metrics) == before
        assert "calls" not in vars(mean)
        assert [metric._update_count for metric in metrics] == [1] * 4
    both.update(labels, 2 - labels)
    assert states(shared[:1]) == states(shared[1:]) != before[2 : 2 + len(shared[0]._defaults)]


def test_states_are_copied_once_for_as_long_as_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[torch.Tensor] = []
    clone = torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda tensor: copied.append(tensor) or clone(tensor))
    mean = MeanMetric()
    updates = Updates([mean])
    for _ in range(3):
        leave(updates, lambda: None)
    assert len(copied) == 2  # the sum and the weight
    with updates.noting():
        mean.update(1.0)
    for _ in range(3):
        leave(updates, lambda: None)
    assert len(copied) == 4
    assert mean.compute() == 1.0


def test_metrics_that_steps_update_are_marked() -> None:
    used, unused = MeanMetric(), MeanMetric()
    with Updates([used, unused]).noting():
        used.update(1.0)
    assert [vars(metric).get("_chimera_in_steps", False) for metric in (used, unused)] == [True, False]
