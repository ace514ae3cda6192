"""What each microbatch's loss counts for, so that the sum over all of them is the whole batch's loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from lightning_chimera.partition.heads import IGNORED, Given, HeadLoss, Scales, Weighing, hold_ignored
from lightning_chimera.partition.stage import HeadCall
from lightning_chimera.runtime.microbatches import Microbatch, leaves
from lightning_chimera.runtime.versions import version_of

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
        self._versions = [list(map(version_of, own)) for own in self._leaves]
        self._has_terms = head is not None and bool(head.terms) and hook is None
        rows = [float(microbatch.rows) for microbatch in microbatches]
        hooked = [float(hook(batch)) for batch in batches] if hook else [0.0] * len(rows)
        self._means = head.counts if head is not None else ()
        named = [batch if isinstance(batch, Mapping) else {} for batch in batches]
        self._counted = [[count(batch) for batch in named] for count in self._means]
        self._bases = [[_seen(count.basis(batch)) for batch in named] for count in self._means]
        # Once for the whole batch, and before the schedule: on a device each look waits for all that runs there.
        self._has_ignored = hook is None and hold_ignored(chain.from_iterable(self._leaves))
        self._counts = [rows, hooked]
        labels = [[float(count or 0) for count in counts] for counts in self._counted]
        totals = torch.tensor([sum(counts) for counts in (*self._counts, *labels)], dtype=torch.float64)
        if dist.get_world_size(peers) > 1:
            dist.all_reduce(totals, group=peers)
        self._totals: list[float] = totals.tolist()
        self._has_hook = hook is not None

    @property
    def total_rows(self) -> int:
        """Rows of the batches of all replicas."""
        return int(self._totals[0])

    def weighing(self, microbatch: int) -> Weighing | None:
        """How a microbatch's head is weighed; ``None`` where the module itself says what its loss counts for."""
        if self._has_hook:
            return None
        return Weighing(partial(self._count, microbatch), self._scales(microbatch))

    def _count(self, microbatch: int, place: int, given: Given) -> int | None:
        """Over how many things a mean is taken, which is known if the head is given what is in the batch as it was."""
        known, count = self._counted[place][microbatch], self._means[place]
        if known is not None and _seen(count.basis(given)) == self._bases[place][microbatch]:
            return known
        return count(given)

    def _scales(self, microbatch: int) -> Scales | None:
        if not self._has_terms:
            return None
        rows = self._counts[0][microbatch] / self._totals[0]
        return tuple(
            None if count is None else count / (total or 1.0) / rows
            for count, total in zip(self._labels(microbatch), self._totals[2:], strict=True)
        )

    def _labels(self, microbatch: int) -> list[int | None]:
        """Over how many things each mean of the head is taken by the labels in the batch."""
        return [counts[microbatch] for counts in self._counted]

    def share(self, microbatch: int, *, own_loss: bool, head: HeadCall) -> float:
        """What a microbatch's loss counts for; over all microbatches of all replicas the shares add up to 1.

        Args:
            microbatch: Its number in this group.
            own_loss: Whether the loss is the one that the HuggingFace head returned.
            head: The head's call.

        Raises:
            ValueError: The batch holds labels to be ignored, and nothing says how the loss counts them; or the step
                gave other labels than the batch's to a head that adds several means.
        """
        if self._has_hook:
            return self._counts[1][microbatch] / (self._totals[1] or 1.0)
        if own_loss and head.count is not None:
            return head.count / (self._totals[2] or self._totals[0])
        if any(count is not None for count in head.counts):
            self._check_terms(microbatch, head.counts)
        elif self._has_ignored or hold_ignored(self._unknown(microbatch, head.labels)):
            raise ValueError(
                f"The labels hold {IGNORED} (ignored), and the loss that the step returns is not the one that the"
                f" HuggingFace model computed, so nothing says over what it is a mean. {_HOOK}"
            )
        return self._counts[0][microbatch] / self._totals[0]

    def _unknown(self, microbatch: int, labels: Tensor | None) -> Iterator[Any]:
        """What a step has made or changed of its batch, as far as it can be seen."""
        own = self._leaves[microbatch]
        yield from (
            leaf for leaf, before in zip(own, self._versions[microbatch], strict=True) if version_of(leaf) != before
        )
        if all(labels is not leaf for leaf in own):
            yield labels

    def _check_terms(self, microbatch: int, given: tuple[int | None, ...]) -> None:
        """Refuses terms that were weighed by other labels than those that they were computed from."""
        for count, counted in zip(given, self._labels(microbatch), strict=True):
            if count is not None and count != counted:
                raise ValueError(
                    "The model's head adds several means, which are weighed by the labels in the batch, but the step"
                    f" gave it labels of which {count} count where those in the batch say {counted}. Make the labels in"
                    f" the data loader, or: {_HOOK}"
                )


def _seen(values: Iterable[Any]) -> tuple[tuple[int, int] | Any, ...]:
    """Which tensors they are, among those that are kept, and how often each was changed in place."""
    return tuple((id(value), version_of(value)) if isinstance(value, Tensor) else value for value in values)
