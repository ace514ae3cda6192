"""What each microbatch's loss counts for, so that the sum over all of them is the whole batch's loss."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from lightning_chimera.partition.heads import IGNORED, HeadLoss, holds_ignored
from lightning_chimera.partition.stage import HeadCall
from lightning_chimera.runtime.microbatches import Microbatch, leaves

_HOOK = (
    "Define `microbatch_weight(self, batch)` in your LightningModule: it gets one microbatch and returns the number"
    " over which its loss is a mean (of tokens, of rows, ...)."
)


class LossWeights:
    """The weights of one step's microbatches, over all replicas of the group.

    The head's table entry says over what HuggingFace's own loss is a mean; any other loss is taken as a mean over the
    rows; a module's own ``microbatch_weight`` decides before either.

    The totals are taken from the batch, before the first backward. Where the step makes its labels itself, they are not
    known then: the shares do not add up to 1, and the gradients are to be divided by their sum.

    Args:
        microbatches: This group's microbatches.
        head: The table entry of the head, if it is known.
        hook: The module's ``microbatch_weight``, if it has one.
        peers: The ranks at this position in all replicas, on the CPU.
    """

    def __init__(
        self,
        microbatches: Sequence[Microbatch],
        head: HeadLoss | None,
        hook: Callable[[Any], float] | None,
        peers: ProcessGroup,
    ) -> None:
        batches = [microbatch.data for microbatch in microbatches]
        self._leaves = [list(leaves(batch)) for batch in batches]  # now, since a step may take things out of its batch
        self._has_terms = head is not None and bool(head.terms) and hook is None
        rows = [float(microbatch.rows) for microbatch in microbatches]
        hooked = [float(hook(batch)) for batch in batches] if hook else [0.0] * len(rows)
        counts = head.counts if head is not None else ()
        labels = [[float(_count(count, batch) or 0) for batch in batches] for count in counts]
        self._counts = [rows, hooked, *labels]
        totals = torch.tensor([sum(counts) for counts in self._counts], dtype=torch.float64)
        if dist.get_world_size(peers) > 1:
            dist.all_reduce(totals, group=peers)
        self._totals: list[float] = totals.tolist()
        self._has_hook = hook is not None

    @property
    def total_rows(self) -> int:
        """Rows of the batches of all replicas."""
        return int(self._totals[0])

    def scales(self, microbatch: int) -> tuple[float, ...] | None:
        """What each term of a head with several counts for, relative to the rows; ``None`` for another head.

        Raises:
            ValueError: The batch does not hold the labels of all terms.
        """
        if not self._has_terms:
            return None
        if not all(self._totals[2:]):
            raise ValueError(
                "The model's head adds several means, which are weighed by the labels in the batch, and the batch does"
                f" not hold labels for all of them under the names of the head's arguments. {_HOOK}"
            )
        rows, _, *terms = (
            counts[microbatch] / (total or 1.0) for counts, total in zip(self._counts, self._totals, strict=True)
        )
        return tuple(term / rows for term in terms)

    def share(self, microbatch: int, *, own_loss: bool, head: HeadCall) -> float:
        """What a microbatch's loss counts for; over all microbatches of all replicas the shares add up to 1.

        Args:
            microbatch: Its number in this group.
            own_loss: Whether the loss is the one that the HuggingFace head returned.
            head: The head's call.

        Raises:
            ValueError: The batch holds labels to be ignored, and nothing says how the loss counts them.
        """
        if self._has_hook:
            return self._counts[1][microbatch] / (self._totals[1] or 1.0)
        if own_loss and head.count is not None:
            return head.count / (self._totals[2] or self._totals[0])
        if not self._has_terms and (head.ignores or any(map(holds_ignored, self._leaves[microbatch]))):
            raise ValueError(
                f"The labels hold {IGNORED} (ignored), and the loss that the step returns is not the one that the"
                f" HuggingFace model computed, so nothing says over what it is a mean. {_HOOK}"
            )
        return self._counts[0][microbatch] / self._totals[0]


def _count(count: Callable[[Mapping[str, Any]], int | None], batch: Any) -> int | None:
    return count(batch) if isinstance(batch, Mapping) else None
