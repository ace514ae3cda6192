"""Where a rank is that waits for the others: if they do not come, the error says which call each of them is in.

It costs nothing until a wait has timed out. Only then do ranks tell each other, through the store.
"""

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import ParamSpec, TypeVar

from lightning_chimera.runtime.blackboard import current_run, exchange, name_ranks
from lightning_chimera.runtime.errors import has_timed_out, is_of_a_peer

P = ParamSpec("P")
R = TypeVar("R")

PATIENCE = timedelta(seconds=5)
"""How long a rank whose wait has timed out waits for the others to say where they are."""

_SHORT_PATIENCE = timedelta(seconds=2)
"""The same for one that was left, where another one may have timed out, or may be dead."""

_calls: list[str] = []
"""The calls that this rank is in; the outermost is the one that people know."""


class RanksApart(RuntimeError):
    """Ranks wait for each other in different calls."""


@contextmanager
def meeting(call: str) -> Iterator[None]:
    """Marks a call that every rank must make.

    Args:
        call: Its name, as people write it.

    Raises:
        RanksApart: A wait inside of it has timed out.
    """
    _calls.append(call)
    try:
        yield
    except RuntimeError as error:
        said = "" if len(_calls) > 1 else _where(call, error)
        if not said:
            raise
        raise RanksApart(said) from error
    finally:
        _calls.pop()


def met(call: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Marks a function as a call that every rank must make."""

    def mark(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def marked(*args: P.args, **kwargs: P.kwargs) -> R:
            with meeting(call):
                return function(*args, **kwargs)

        return marked

    return mark


def _where(call: str, error: BaseException) -> str:
    """Says where the ranks are, if this or another one's wait has timed out."""
    is_late = has_timed_out(error)
    if not is_late and not is_of_a_peer(error):  # of one whose own wait has timed out, say
        return ""
    own = json.dumps([call, is_late])
    said = exchange(f"meeting/{current_run()}", own, PATIENCE if is_late else _SHORT_PATIENCE)
    known = {rank: json.loads(one) for rank, one in enumerate(said) if one is not None}
    late = [rank for rank, (_, timed_out) in known.items() if timed_out]
    if not late:
        return ""
    places: dict[str, list[int]] = {}
    for rank in range(len(said)):
        places.setdefault(known[rank][0] if rank in known else "", []).append(rank)
    silent = places.pop("", [])
    lines = [f"  in {where}: {name_ranks(ranks)}" for where, ranks in places.items()]
    lines += [f"  elsewhere: {name_ranks(silent)}"] if silent else []
    return (
        "Ranks have waited for each other in vain, until the time-out. They were\n"
        + "\n".join(lines)
        + "\nAll ranks must make the same calls in the same order: take them out of `if trainer.is_global_zero:`,"
        " rank_zero_only and other branches that only some ranks enter. If all are in the same place, one of them is"
        " slower than ChimeraStrategy(timeout=...) allows."
    )
