"""Runs a function on every rank of a small world: forked processes that are joined by gloo."""

import gc
import multiprocessing
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

TIMEOUT = timedelta(seconds=30)
"""Bound on every wait of a rank for another."""


class RankFailed(RuntimeError):
    """A rank raised, died, or was still running at the limit; the others were ended."""


def run(function: Callable[..., Any], *args: Any, size: int, limit: float) -> list[Any]:
    """Calls ``function(*args)`` on each rank, in a process group of the gloo backend.

    Ranks are forked, so they start within a fraction of a second with all that is imported here. So nothing here may
    have started threads: no computation with torch, no process group.

    Args:
        function: What each rank calls.
        *args: Its arguments.
        size: Number of ranks.
        limit: Seconds after which all ranks are ended.

    Returns:
        What each rank returned.

    Raises:
        RankFailed: A rank raised, died, or was still running at the limit.
    """
    context = multiprocessing.get_context("fork")
    receivers, processes = [], []
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        try:
            for rank in range(size):
                receiver, sender = context.Pipe(duplex=False)
                receivers.append(receiver)
                process = context.Process(target=_be_rank, args=(rank, size, f"{folder}/store", sender, function, args))
                processes.append(process)
                process.start()
                sender.close()  # before the next rank starts: a sender that nobody else has ends with its process
            return _collect(receivers, time.monotonic() + limit)
        finally:
            for process in processes:
                if process.pid is not None:
                    process.kill()  # most have ended
                    process.join()


def _collect(receivers: Sequence[Connection], deadline: float) -> list[Any]:
    """The results of all ranks, in their order."""
    results: dict[int, Any] = {}
    while len(results) < len(receivers):
        missing = [receiver for rank, receiver in enumerate(receivers) if rank not in results]
        ready = wait(missing, max(0.0, deadline - time.monotonic()))
        if not ready:
            late = [rank for rank in range(len(receivers)) if rank not in results]
            raise RankFailed(f"Ranks {late} of {len(receivers)} were still running at the limit.")
        for rank, receiver in enumerate(receivers):
            if receiver not in ready:
                continue
            try:
                error, results[rank] = receiver.recv()
            except EOFError:
                raise RankFailed(f"Rank {rank} of {len(receivers)} has died.") from None
            if error:
                raise RankFailed(f"Rank {rank} of {len(receivers)} failed first.\n{error}")
    return [results[rank] for rank in range(len(receivers))]


def _be_rank(
    rank: int, size: int, store: str, sender: Connection, function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """The life of a rank."""
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that no collection walks through what was imported
    try:
        dist.init_process_group("gloo", init_method=Path(store).as_uri(), rank=rank, world_size=size, timeout=TIMEOUT)
        answer = "", function(*args)
        dist.barrier()  # nobody leaves while another still needs its connections
    except Exception:
        answer = traceback.format_exc(), None
    sender.send(answer)
    sender.close()
