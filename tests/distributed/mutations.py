"""Faults put into the product on purpose, to show that the checks would find them.

Each function is called on every rank before it trains.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lightning_chimera.partition.heads import IGNORED, LabelCount
from lightning_chimera.runtime import gradients
from lightning_chimera.runtime.gradients import GradientSync
from lightning_chimera.runtime.weights import LossWeights


def no_sync_of_copies() -> None:
    """The copies of a stage keep their own gradients."""
    GradientSync.start = lambda self, count=None: None
    GradientSync.reduce = lambda self: None


def gradients_averaged() -> None:
    """The copies' gradients are averaged instead of summed."""
    reduce = GradientSync.reduce

    def average(self: GradientSync) -> None:
        reduce(self)
        for parameter in self._ownership.held():
            if parameter.grad is not None:
                parameter.grad /= len(self._ownership.holders[parameter])

    GradientSync.reduce = average


def own_norm() -> None:
    """Each rank clips by the norm of what it holds."""

    def norm(parameters: Iterable[nn.Parameter], *_: Any, **__: Any) -> Tensor:
        return nn.utils.get_total_norm(parameter.grad for parameter in parameters if parameter.grad is not None)

    gradients.total_norm = norm


def copies_counted_in_norm() -> None:
    """The norm counts a parameter once for each rank that holds it, so a tied table twice."""

    def norm(parameters: Iterable[nn.Parameter], _ownership: Any, group: Any, *_: Any) -> Tensor:
        squares = torch.stack([parameter.grad.double().square().sum() for parameter in parameters]).sum()
        dist.all_reduce(squares, group=group)
        return squares.sqrt()

    gradients.total_norm = norm


def microbatch_dropped() -> None:
    """Microbatch 1 counts nothing."""
    share = LossWeights.share

    def without(self: LossWeights, microbatch: int, **kwargs: Any) -> float:
        return 0.0 if microbatch == 1 else share(self, microbatch, **kwargs)

    LossWeights.share = without


def weights_by_rows() -> None:
    """Microbatches count by their rows instead of by their tokens."""
    LabelCount.__call__ = lambda self, given: len(given[self.name]) if self.name in given else None


def labels_not_shifted() -> None:
    """A causal model's first labels, which predict nothing, count."""

    def count(self: LabelCount, given: Any) -> int | None:
        return int((given[self.name] != IGNORED).sum()) if self.name in given else None

    LabelCount.__call__ = count


def no_accumulation_scale() -> None:
    """Accumulated gradients are summed over the batches, not averaged."""
    from lightning_chimera.engine import Engine

    train = Engine.train
    Engine.train = lambda self, batch, *, accumulate, **kwargs: train(self, batch, accumulate=1, **kwargs)
