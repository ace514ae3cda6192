"""The failure of a run on this rank: told to the others once, explained, and compared with theirs."""

from collections.abc import Sequence
from typing import Any

from torch.optim import Optimizer

from lightning_chimera.engine import Engine
from lightning_chimera.memory import explain, is_out_of_memory
from lightning_chimera.runtime.failures import all_fail_alike
from lightning_chimera.runtime.watch import end_watching, tell_failure
from lightning_chimera.signals import Interrupted


class Failure:
    """What has failed on this rank, in the runs of one process."""

    def __init__(self) -> None:
        self._is_alike: bool | None = None
        self._error: BaseException | None = None

    def begin(self) -> None:
        """Begins a run."""
        self._is_alike = None

    def tell(
        self, error: BaseException, engine: Engine | None, optimizers: Sequence[Optimizer], precision: str
    ) -> None:
        """Tells the other ranks, so that none waits for this one; says what helps where memory has run out.

        Args:
            error: What was raised; told once however often it is given.
            engine: The stages on this rank, if they have been made.
            optimizers: The optimizers.
            precision: The Trainer's precision.
        """
        if error is self._error:
            return
        self._error = error
        if isinstance(error, Interrupted):
            end_watching()  # all ranks end alike
            return
        if engine is not None and is_out_of_memory(error):
            explain(error, engine, optimizers, precision)
        tell_failure(error)

    def is_alike(self, error: BaseException, step: int) -> bool:
        """Whether all ranks have failed with this error at this step, so that they can still work together."""
        if self._is_alike is None:
            self._is_alike = all_fail_alike(f"{type(error).__qualname__} after step {step}")
        return self._is_alike

    def __getstate__(self) -> dict[str, Any]:
        """Leaves out the error, which belongs to this process: the spawn launcher pickles the strategy."""
        return {**vars(self), "_error": None}
