"""What this process is doing now, for whoever has to say so when it fails or stalls."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from lightning_chimera.schedules import Action, Kind

_WORK = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "backward (input gradients)",
    Kind.WEIGHT: "backward (weight gradients)",
}


@dataclass
class Progress:
    """Notes of the thread that trains, read by the one that watches.

    Each is one attribute, so that a note costs nothing: ``action`` and ``awaited`` are set for every action.

    Attributes:
        action: The action that runs now.
        awaited: The position whose message is waited for now.
        doing: What is done outside of actions, such as ``"all-reduce of gradients"``.
        context: Says where in the run this is: its step, and training or validation.
        rank_at: The global rank at a position.
    """

    action: Action | None = None
    awaited: int | None = None
    doing: str = ""
    context: Callable[[], str] = str
    rank_at: Callable[[int], int] = int

    def begin(self, context: Callable[[], str], rank_at: Callable[[int], int]) -> None:
        """Forgets an earlier run."""
        self.action = self.awaited = None
        self.doing = ""
        self.context, self.rank_at = context, rank_at

    @contextmanager
    def at(self, doing: str) -> Iterator[None]:
        """Notes what is done; an error leaves the note as it is."""
        before, self.doing = self.doing, doing
        yield
        self.doing = before

    @property
    def awaited_rank(self) -> int | None:
        """The global rank whose message is waited for."""
        awaited = self.awaited
        return None if awaited is None else self.rank_at(awaited)

    def describe(self) -> str:
        """Where the run is, in words: step, and stage, microbatch and action or what else is done."""
        action, doing = self.action, self.doing
        words = [self.context()]
        if action is not None:
            pipe = f" of pipe {action.pipe}" if action.pipe else ""
            words.append(
                f"stage {action.stage}{pipe}, microbatch {action.microbatch}, {_WORK[action.kind]} (action {action})"
            )
        elif doing:
            words.append(doing)
        return ", ".join(word for word in words if word)


PROGRESS = Progress()
"""Of this process."""
