"""Processes that train side by side and take turns: one step of one candidate at a time."""

import ctypes
import logging
import multiprocessing
import os
import signal
import socket
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection, wait
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.utils import logging as transformers_logging

from benchmarks.memory import SavedForBackward, state_bytes
from benchmarks.ranks import RankFailed

LIMIT = 120.0
"""Seconds that a turn, or getting ready, may take."""

_DIE_WITH_PARENT = 1
"""PR_SET_PDEATHSIG of Linux."""


@dataclass
class Seen:
    """What a process tells of a step.

    Attributes:
        seconds: How long it took.
        cpu: The seconds that it kept cores busy.
        loss: Its loss, on the processes that have one.
        states: Bytes of parameters, gradients and moments after it.
        activations: Bytes that autograd kept for backwards at most, once they have been measured.
    """

    seconds: float = 0.0
    cpu: float = 0.0
    loss: float | None = None
    states: int = 0
    activations: int = 0


class Turn:
    """Has a process wait for its turn before each step.

    Args:
        connection: To the parent, which says when it is this process's turn.
    """

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._seen = Seen()
        self._meter: SavedForBackward | None = None
        self._within = ExitStack()
        self._step = 0
        self._start = self._cpu_start = 0.0

    def begin(self, module: nn.Module) -> None:
        """Tells of the last step, waits, and starts the next."""
        self._seen.seconds = time.perf_counter() - self._start
        self._seen.cpu = time.process_time() - self._cpu_start
        self._connection.send(("", asdict(self._seen)))
        self._connection.recv()
        self._start, self._cpu_start = time.perf_counter(), time.process_time()
        if self._step == 1:
            self._meter = SavedForBackward(parameter for parameter in module.parameters() if not parameter.is_meta)
            self._within.enter_context(self._meter)

    def end(self, loss: float | None, module: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """Notes what came of a step."""
        self._within.close()
        self._seen.loss = loss
        if self._step == 1:
            assert self._meter is not None
            self._seen.activations = self._meter.peak
            self._seen.states = state_bytes(module.parameters(), optimizer)
        self._step += 1


class Candidate(NamedTuple):
    """One way to train.

    Attributes:
        name: What it is called.
        runtime: Whose it is.
        train: Called in each of its processes with the work, its turn and its rank; trains for ever.
        size: Its processes.
        threads: Threads of each.
        is_joined: Whether its processes train one model.
    """

    name: str
    runtime: str
    train: Callable[[Any, Turn, int], None]
    size: int = 2
    threads: int = 1
    is_joined: bool = True

    @property
    def label(self) -> str:
        """Its name with its runtime."""
        return f"{self.runtime} {self.name}"


class Processes:
    """The processes of a candidate.

    Args:
        candidate: The candidate.
        work: What it does.
    """

    def __init__(self, candidate: Candidate, work: Any) -> None:
        self.candidate = candidate
        self._connections: list[Connection] = []
        self._processes = []
        context, port = multiprocessing.get_context("fork"), _free_port()
        for rank in range(candidate.size):
            here, there = context.Pipe()
            process = context.Process(target=_be_process, args=(candidate, work, rank, port, there), daemon=True)
            self._connections.append(here)
            self._processes.append(process)
            process.start()
            there.close()

    def get_ready(self) -> None:
        """Waits until all processes wait for their first turn."""
        self._receive()

    def step(self) -> tuple[float, list[Seen]]:
        """Has the processes make a step; gives the time that it took, and what each tells."""
        start = time.perf_counter()
        for connection in self._connections:
            connection.send(None)
        seen = self._receive()
        return time.perf_counter() - start, seen

    def _receive(self) -> list[Seen]:
        found: dict[int, Seen] = {}
        deadline = time.monotonic() + LIMIT
        while len(found) < len(self._connections):
            missing = [connection for rank, connection in enumerate(self._connections) if rank not in found]
            ready = wait(missing, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise RankFailed(f"{self.candidate.label} was still at work after {LIMIT} s.")
            for rank, connection in enumerate(self._connections):
                if connection in ready:
                    found[rank] = self._told(rank, connection)
        return [found[rank] for rank in range(len(found))]

    def _told(self, rank: int, connection: Connection) -> Seen:
        try:
            error, seen = connection.recv()
        except EOFError:
            raise RankFailed(f"Rank {rank} of {self.candidate.label} has died.") from None
        if error:
            raise RankFailed(f"Rank {rank} of {self.candidate.label} failed.\n{error}")
        return Seen(**seen)

    def end(self) -> None:
        """Ends the processes."""
        for process in self._processes:
            process.kill()
            process.join()


def _free_port() -> int:
    with socket.socket() as candidate:
        candidate.bind(("127.0.0.1", 0))
        return int(candidate.getsockname()[1])


def _be_process(candidate: Candidate, work: Any, rank: int, port: int, connection: Connection) -> None:
    """The life of a process; it is ended from outside, or with its parent."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGKILL)
    torch.set_num_threads(candidate.threads)
    warnings.filterwarnings("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    transformers_logging.set_verbosity_error()
    os.environ["OMP_NUM_THREADS"] = str(candidate.threads)
    if candidate.is_joined and candidate.size > 1:
        os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(candidate.size)}
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    try:
        candidate.train(work, Turn(connection), rank)
        message = "It has made all steps, and was asked for more."
    except Exception:
        message = traceback.format_exc()
    connection.send((message, None))
    time.sleep(LIMIT)
