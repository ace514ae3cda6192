"""What each microbatch's loss counts for, so that the sum over all of them is the whole batch's loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_chimera.partition.anatomy import TokenLoss
from lightning_chimera.runtime.microbatches import Microbatch


class _Totals(NamedTuple):
    """Over the batches of all replicas."""

    rows: float
    tokens: float
    hooked: float


class LossWeights:
    """The weights of one step's microbatches, over all replicas of the group.

    The head's table entry says over what HuggingFace's own loss is a mean; any other loss is taken as a mean over the
    rows; a module's own ``microbatch_weight`` decides before either.

    The totals are taken from the batch, before the first backward. Where the step makes its labels itself, they are not
    known then: the shares do not add up to 1, and the gradients are to be divided by their sum.

    Args:
        microbatches: This group's microbatches.
        head_loss: The table entry of the head, if it is known.
        hook: The module's ``microbatch_weight``, if it has one.
        peers: The ranks at this position in all replicas, on the CPU.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        head_loss: TokenLoss | None,
        hook: Callable[[Any], float] | None,
        peers: ProcessGroup,
    ) -> None:
        self._head_loss = head_loss
        self._labels = [_labels(microbatch.data, head_loss) for microbatch in microbatches]
        self._rows = [microbatch.rows for microbatch in microbatches]
        self._hooked = [float(hook(microbatch.data)) for microbatch in microbatches] if hook else None
        tokens = sum(head_loss.count(labels) for labels in self._labels if labels is not None) if head_loss else 0
        totals = torch.tensor([sum(self._rows), tokens, sum(self._hooked or [])], dtype=torch.float64)
        if dist.get_world_size(peers) > 1:
            dist.all_reduce(totals, group=peers)
        self._totals = _Totals(*totals.tolist())

    @property
    def total_rows(self) -> int:
        """Rows of the batches of all replicas."""
        return int(self._totals.rows)

    def share(self, microbatch: int, *, own_loss: bool, labels: Tensor | None) -> float:
        """What a microbatch's loss counts for; over all microbatches of all replicas the shares add up to 1.

        Args:
            microbatch: Its number in this group.
            own_loss: Whether the loss is the one that the HuggingFace head returned.
            labels: The labels that the head was given.

        Raises:
            ValueError: The batch holds labels to be ignored, and nothing says how the loss counts them.
        """
        if self._hooked is not None:
            return self._hooked[microbatch] / (self._totals.hooked or 1.0)
        if own_loss and labels is not None and self._head_loss is not None:
            return self._head_loss.count(labels) / (self._totals.tokens or self._totals.rows)
        self._refuse_ignored(self._labels[microbatch])
        return self._rows[microbatch] / self._totals.rows

    def _refuse_ignored(self, labels: Tensor | None) -> None:
        ignore_index = (self._head_loss or TokenLoss()).ignore_index
        if labels is not None and bool((labels == ignore_index).any()):
            raise ValueError(
                f"The batch's labels hold {ignore_index} (ignored), and the loss that the step returns is not the one"
                " that the HuggingFace model computed, so nothing says over what it is a mean. Define"
                " `microbatch_weight(self, batch)` in your LightningModule: it gets one microbatch and returns the"
                " number over which its loss is a mean (of tokens, of rows, ...)."
            )


def _labels(batch: Any, head_loss: TokenLoss | None) -> Tensor | None:
    """The labels of a batch, where it has them under the usual name."""
    labels = batch.get((head_loss or TokenLoss()).labels) if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None
