"""What an error says: of this rank, of another that does not answer, or of one that is late."""

import os
import re
import sys
import traceback
from collections.abc import Iterator
from typing import Any

import torch.distributed as dist

_PEER_ERROR = re.compile(r"gloo|NCCL|Connection (closed|reset) by peer|the (sender|receiver) has gone")
_TIME_OUT = re.compile(r"Timed out waiting|wait timeout|nothing has come for|has read no message for")
"""What gloo, the store and the links through memory say; not a DataLoader, which "timed out"."""


def is_of_a_peer(error: BaseException) -> bool:
    """Whether an error says no more than that another rank does not answer."""
    return any(
        isinstance(part, dist.DistError) or (isinstance(part, RuntimeError) and _PEER_ERROR.search(str(part)))
        for part in chain_of(error)
    )


def has_timed_out(error: BaseException) -> bool:
    """Whether an error says that another rank has been waited for in vain."""
    return any(_TIME_OUT.search(str(part)) for part in chain_of(error))


def chain_of(error: BaseException | None) -> Iterator[BaseException]:
    """An error and what it came from."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def headline(error: BaseException) -> str:
    """Type and message of an error, as a traceback has them."""
    return traceback.format_exception_only(error)[0]


def silence(error: BaseException) -> None:
    """Has Python not print an error that another rank has printed."""
    before = sys.excepthook

    def hook(kind: Any, raised: BaseException, trace: Any) -> None:
        if not any(part is error for part in chain_of(raised)):
            before(kind, raised, trace)

    sys.excepthook = hook
    os.environ["HYDRA_FULL_ERROR"] = "1"  # has Hydra leave the printing of what a job raises to Python
