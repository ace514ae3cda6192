"""The way of a batch from the user's loaders to a step: whose batch it is, whether it counts, and its random draws."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import cached_property
from typing import Any

from lightning.pytorch import LightningModule
from lightning.pytorch.trainer.states import RunningStage
from lightning.pytorch.utilities import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from lightning_utilities.core.rank_zero import rank_zero_warn
from torch.utils._pytree import TreeSpec, tree_structure, tree_unflatten

from lightning_chimera.batch import Batch
from lightning_chimera.engine import Engine
from lightning_chimera.runtime.agreement import check_in_group, describe
from lightning_chimera.runtime.batches import Ending, GroupLoader, hand_over
from lightning_chimera.runtime.randomness import keyed

_ENDINGS: dict[RunningStage | None, Ending] = {
    RunningStage.TRAINING: Ending.SHORTEST,
    RunningStage.PREDICTING: Ending.OWN,
}
_TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


class Handover:
    """The batches of one run.

    Args:
        module: The user's module.
        engine: The stages on this rank.
        deals: Whether the batches of a loader are dealt to the replicas.

    Attributes:
        counts: Whether the batch of now counts, or was lent only to keep step with other replicas.
    """

    def __init__(self, module: LightningModule, engine: Engine, *, deals: bool) -> None:
        self._module = module
        self._engine = engine
        self._deals = deals
        self._loader: GroupLoader | None = None
        self._structure: TreeSpec | None = None
        self.counts = True

    def wrap(self, loader: object) -> GroupLoader:
        """A user's loader, drawn from once per pipeline group."""
        ending = _ENDINGS.get(self._module.trainer.state.stage, Ending.LONGEST)
        return GroupLoader(
            loader, self._engine.topology, self._engine.groups, ending, rank_zero_warn, deals=self._deals
        )

    def transfer(self, batch: Any, dataloader_idx: int, move: Callable[[Any], Any]) -> Any:
        """Notes that a batch goes to a step, and moves it.

        Args:
            batch: What Lightning has drawn, of one loader or of several.
            dataloader_idx: The loader, where they are drawn from one after the other.
            move: Lightning's own transfer with the user's hooks.
        """
        batch = self._hand_over(batch, dataloader_idx)
        has_hooks = self._has_transfer_hooks
        key = (self._engine.seed, self._engine.topology.replica, *self._key, dataloader_idx)
        with keyed(*key) if has_hooks else nullcontext():
            moved = move(batch)
        if self._structure is not None and not _is_several(moved, self._structure):
            self._structure = None  # of one loader, or put together by a hook of the module
        if has_hooks:
            check_in_group(describe(moved), "behind the hooks that transfer a batch", self._engine.groups.pipeline)
        return moved

    def _hand_over(self, batch: Any, dataloader_idx: int) -> Any:
        """Notes whose batch it is, since steps need not take the number of its loader; leaves out what is surplus."""
        combined = self._combined
        self._loader = _group_loader(combined.flattened, dataloader_idx) if combined is not None else None
        self._structure, self.counts = None, True
        if combined is not None and combined._mode != "sequential":
            self._structure = tree_structure(combined.iterables)
            batches, self.counts = hand_over(self._structure.flatten_up_to(batch), combined.flattened, combined._mode)
            return tree_unflatten(batches, self._structure)
        if self._loader is not None:
            self._loader.hand_over()
            self.counts = not self._loader.is_surplus
        return batch

    def of_step(self, args: Sequence[Any], kwargs: dict[str, Any], context: Any) -> Batch:
        """The batch of now, as a step is called with it.

        Args:
            args: The positional arguments of the step.
            kwargs: Its keyword arguments.
            context: Entered around each forward.
        """
        data, *rest = args
        return Batch(data, tuple(rest), kwargs, context, self._key, self._structure)

    @property
    def _key(self) -> tuple[int, ...]:
        """What the random draws of a batch depend on: how far training is, and the batch of its loader."""
        trainer = self._module.trainer
        handed = self._loader.handed if self._loader is not None else 0
        return (trainer.global_step, trainer.fit_loop.total_batch_idx, handed)

    @property
    def _combined(self) -> CombinedLoader | None:
        """The loaders of the loop that runs."""
        return getattr(self._module.trainer._active_loop, "_combined_loader", None)

    @cached_property
    def _has_transfer_hooks(self) -> bool:
        """Whether code of the user's changes a batch on each rank by itself, after the leader has shared it."""
        owners = (self._module, self._module.trainer.datamodule)  # type: ignore[attr-defined]
        return any(owner is not None and is_overridden(hook, owner) for owner in owners for hook in _TRANSFER_HOOKS)


def _is_several(batch: Any, structure: TreeSpec) -> bool:
    """Whether a batch is one of several loaders' batches."""
    try:
        return len(structure.flatten_up_to(batch)) > 1
    except ValueError:
        return False


def _group_loader(loaders: Sequence[Any], dataloader_idx: int) -> GroupLoader | None:
    loader = loaders[dataloader_idx] if dataloader_idx < len(loaders) else None
    return loader if isinstance(loader, GroupLoader) else None
