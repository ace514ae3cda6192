"""What each microbatch's loss counts for, so that the sum over all of them is the whole batch's loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_chimera.partition.anatomy import TokenLoss
from lightning_chimera.runtime.microbatches import Microbatch

_HOOK = (
    "Define `microbatch_weight(self, batch)` in your LightningModule: it gets one microbatch and returns the number"
    " over which its loss is a mean (of tokens, of rows, ...)."
)


class LossWeights:
    """The weights of one step's microbatches, over all replicas of the group.

    A head of HuggingFace says by its table entry over what its own loss is a mean; any other loss is taken as a mean
    over the rows; a module's own ``microbatch_weight`` decides before either.

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
        rows = [float(microbatch.rows) for microbatch in microbatches]
        tokens = [float(_expected_tokens(microbatch.data, head_loss)) for microbatch in microbatches]
        hooked = [float(hook(microbatch.data)) for microbatch in microbatches] if hook else [0.0] * len(rows)
        counts = torch.tensor([rows, tokens, hooked], dtype=torch.float64)
        totals = counts.sum(dim=1)
        if dist.get_world_size(peers) > 1:
            dist.all_reduce(totals, group=peers)
        self.total_rows = int(totals[0])
        self._tokens = tokens
        self._has_hook = hook is not None
        self._rows_share, self._tokens_share, self._hook_share = (
            counts / totals.clamp(min=torch.finfo(torch.float64).tiny)[:, None]
        ).tolist()

    def share(self, microbatch: int, *, own_loss: bool, labels: Tensor | None) -> float:
        """What a microbatch's loss counts for; over all microbatches of all replicas the shares add up to 1.

        Args:
            microbatch: Its number in this group.
            own_loss: Whether the loss is the one that the HuggingFace head returned.
            labels: The labels that the head was given.

        Raises:
            ValueError: The batch holds labels to be ignored and nothing says how the loss counts them, or the head was
                given other labels than the batch holds.
        """
        if self._has_hook:
            return float(self._hook_share[microbatch])
        if not own_loss or self._head_loss is None:
            self._refuse_ignored(self._labels[microbatch])
            return float(self._rows_share[microbatch])
        assert labels is not None
        counted = self._head_loss.count(labels)
        if counted != self._tokens[microbatch]:
            raise ValueError(
                f"The model's loss is a mean over {counted} labels of microbatch {microbatch}, but by the batch it"
                f" would be {int(self._tokens[microbatch])}: the step changes the labels before it calls the model, so"
                f" the parts of the batch can't be weighed. {_HOOK}"
            )
        return float(self._tokens_share[microbatch])

    def _refuse_ignored(self, labels: Tensor | None) -> None:
        ignore_index = self._head_loss.ignore_index if self._head_loss is not None else TokenLoss.ignore_index
        if labels is not None and bool((labels == ignore_index).any()):
            raise ValueError(
                f"The batch's labels hold {ignore_index} (ignored), and the loss that the step returns is not the one"
                f" that the HuggingFace model computed, so nothing says over what it is a mean. {_HOOK}"
            )


def _labels(batch: Any, head_loss: TokenLoss | None) -> Tensor | None:
    """The labels of a batch, where it has them under the usual name."""
    name = head_loss.labels if head_loss is not None else TokenLoss.labels
    labels = batch.get(name) if isinstance(batch, Mapping) else None
    return labels if isinstance(labels, Tensor) and not labels.is_floating_point() else None


def _expected_tokens(batch: Any, head_loss: TokenLoss | None) -> int:
    """Over how many labels the head's own loss will be a mean: those of the batch, else every input token."""
    if head_loss is None or not isinstance(batch, Mapping):
        return 0
    labels = _labels(batch, head_loss)
    if labels is not None:
        return head_loss.count(labels)
    ids = batch.get("input_ids")
    return ids[..., head_loss.shift :].numel() if isinstance(ids, Tensor) else 0
