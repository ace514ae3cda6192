"""A batch as Lightning gives it to a step."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch.utils._pytree import TreeSpec

from lightning_chimera.runtime.microbatches import count_rows


@dataclass(frozen=True)
class Batch:
    """One call of a step by Lightning.

    Attributes:
        data: The batch.
        args: The other positional arguments of the step.
        kwargs: Its keyword arguments.
        context: Entered around each forward (autocast).
        key: What the random draws of this batch depend on.
        loaders: How the batches of several loaders are put together in it, if it is of several.
    """

    data: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    context: Callable[[], AbstractContextManager[Any]]
    key: tuple[int, ...]
    loaders: TreeSpec | None = None

    @property
    def parts(self) -> list[Any]:
        """The batch of each loader."""
        return [self.data] if self.loaders is None else self.loaders.flatten_up_to(self.data)

    @property
    def all_rows(self) -> int:
        """The rows of all loaders' batches together."""
        return sum(count_rows(part) or 0 for part in self.parts) or 1
