"""What a training step gives for one microbatch, on its last stage, and how it travels to the other ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import LightningModule
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor

from lightning_chimera.notes import Addition
from lightning_chimera.reporting import Report, Value, as_number
from lightning_chimera.runtime.packing import Constant, Numbers


@dataclass
class Outcome:
    """What one microbatch gave on its last stage.

    Attributes:
        place: Replica and number of the microbatch.
        loss: Its loss, and the type that it had.
        report: What it logged.
        extras: What the step returned besides the loss, if it returned a dict.
        grown: What it appended to lists of the module.
        counts: Whether its loss can change anything, which it can't without a label.
    """

    place: tuple[int, int]
    loss: tuple[Value, torch.dtype]
    report: Report
    extras: dict[str, Any]
    grown: dict[str, list[Addition]]
    counts: bool

    def as_tree(self) -> Any:
        """The same as it travels between ranks."""
        value, dtype = self.loss
        report = Numbers(self.report.as_tree())
        return self.place, Numbers(value), Constant(dtype), report, self.extras, self.grown, self.counts

    @classmethod
    def of_tree(cls, tree: Any) -> "Outcome":
        """What another rank has sent."""
        place, value, dtype, report, *rest = tree
        return cls(place, (as_number(value), dtype), Report.of_tree(report), *rest)


def extras_of(result: Any) -> dict[str, Any]:
    """What a training step returned besides the loss in a dict of its own; a model's whole output is not shared."""
    return {key: value for key, value in result.items() if key != "loss"} if type(result) is dict else {}


def detach(tree: dict[str, Any]) -> dict[str, Any]:
    """A tree whose tensors have no graph."""
    return apply_to_collection(tree, Tensor, Tensor.detach) if tree else tree


def loss_of(result: Any, module: LightningModule) -> Tensor:
    """The loss that a training step returned.

    Raises:
        RuntimeError: There is none.
    """
    loss = result.get("loss") if isinstance(result, Mapping) else result
    if not isinstance(loss, Tensor):
        raise RuntimeError(
            f"{type(module).__name__}.training_step returned {type(result).__name__} without a loss. In a pipeline"
            " every step must return the loss, as a tensor or under the key 'loss'; skipping a batch by returning None"
            " is refused by Lightning on more than one process too."
        )
    return loss
