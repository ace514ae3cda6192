"""What ranks tell each other of a run: beats while it goes on, and the verdict on it if it can't."""

import json
from typing import NamedTuple

RUNS, IDLE, LEFT = "runs", "idle", "left"


class Verdict(NamedTuple):
    """Why a run can't go on.

    Attributes:
        run: The number of the run.
        kind: ``error``, ``vanished``, ``stalled``, or ``store`` if nothing can be asked any more.
        rank: The rank whose fault it is; -1 if it is not a rank's.
        by: The rank that has found it out.
        text: What the screen says.
    """

    run: int
    kind: str
    rank: int
    by: int
    text: str


class Beat(NamedTuple):
    """What a rank says every half second.

    Attributes:
        number: Counts the beats.
        run: The run of the Trainer that it is in, or was in last.
        state: Whether it is in this run, between runs, or at the end of its process.
        where: Where the run is.
        awaited: The rank whose message it waits for.
    """

    number: int = 0
    run: int = 0
    state: str = IDLE
    where: str = ""
    awaited: int | None = None

    def is_through(self, run: int) -> bool:
        """Whether the rank has ended a run in order."""
        return self.run > run or (self.run == run and self.state != RUNS)


def parse_verdict(text: bytes) -> Verdict | None:
    """The verdict as the store has it, if there is one."""
    return Verdict(*json.loads(text)) if text else None
