"""Runs a function on every rank of a small world, each rank in a process of its own.

Starting Python and importing torch takes seconds. So one server does it once for all tests of a session and forks the
ranks of each case. It runs no autograd and makes no process group itself, so its children start clean: they find the
environment of a run that somebody else has launched.
"""

import atexit
import faulthandler
import gc
import importlib
import json
import os
import pickle
import random
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

GRACE = 5.0
"""Seconds for the other ranks to end by themselves after the first has failed."""

_PRELOAD = (
    "torch",
    "lightning",
    "torchmetrics",
    "pytest",
    "transformers.models.gpt2.modeling_gpt2",
    "transformers.models.bert.modeling_bert",
    "lightning_chimera.strategy",
)
_STACKS = signal.SIGUSR2


class RankFailed(Exception):
    """A rank raised, or left with an exit code; the message carries the traceback of the first one that did.

    Attributes:
        rank: The rank that failed first.
        error: Its error as one line, such as ``ValueError: no``.
        outputs: What each rank printed.
        exit_codes: Those of all ranks; minus the signal of those that were killed.
        stopped: The ranks that a signal held when all others had ended; they had to be killed.
    """

    def __init__(self, rank: int, error: str, outputs: list[str], message: str, ended: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.rank, self.error, self.outputs = rank, error, outputs
        self.exit_codes: list[int] = ended["exit_codes"]
        self.stopped: list[int] = ended["stopped"]


class RanksHung(Exception):
    """Ranks were still running at the limit; the message says which and where."""


@dataclass(frozen=True)
class _Case:
    """What the server is told; the rest lies in the folder."""

    function: str
    size: int
    limit: float
    folder: str
    grace: float
    env: Mapping[str, str] = field(default_factory=dict)


class World:
    """Client of one server process."""

    def __init__(self) -> None:
        self._server: subprocess.Popen[str] | None = None

    def run(
        self,
        function: Callable[..., Any],
        *args: Any,
        size: int,
        limit: float = 60.0,
        grace: float = GRACE,
        env: Mapping[str, str] = {},
    ) -> list[Any]:
        """Calls ``function(*args)`` on each rank and returns what each returned.

        Args:
            function: A function of a module, so that the server finds it by name.
            *args: Picklable.
            size: Number of ranks.
            limit: Seconds after which all are killed.
            grace: Seconds for the other ranks to end by themselves after the first has failed.
            env: Further variables of the ranks' environment.

        Raises:
            RankFailed: A rank raised.
            RanksHung: A rank was still running at the limit.
        """
        folder = Path(tempfile.mkdtemp(prefix="world-"))
        try:
            (folder / "args").write_bytes(pickle.dumps(args))
            case = _Case(f"{function.__module__}:{function.__qualname__}", size, limit, str(folder), grace, dict(env))
            return _judge(case, self._ask(case))
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _ask(self, case: _Case) -> dict[str, Any]:
        server = self._started()
        assert server.stdin is not None
        assert server.stdout is not None
        try:
            server.stdin.write(json.dumps(vars(case)) + "\n")
            server.stdin.flush()
            answer = server.stdout.readline()
        except BaseException:  # a time-out of the test: the answer would be taken for that of the next case
            self.close()
            raise
        if not answer:
            self.close()
            raise RuntimeError("The world's server has died; see its output above.")
        return dict(json.loads(answer))

    def _started(self) -> subprocess.Popen[str]:
        if self._server is None:
            tests = Path(__file__).parents[1]
            self._server = subprocess.Popen(
                [sys.executable, "-m", "distributed.world"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (tests, tests.parent)))},
            )
        return self._server

    def close(self) -> None:
        """Ends the server, and with it the ranks of a case that still runs."""
        server, self._server = self._server, None
        if server is not None:
            assert server.stdin is not None
            assert server.stdout is not None
            server.stdin.close()
            server.wait(timeout=30)
            server.stdout.close()


def _judge(case: _Case, ended: dict[str, Any]) -> list[Any]:
    """The results of a case, or the exception that it deserves."""
    folder, ranks = Path(case.folder), range(case.size)
    results = [folder / f"{rank}.result" for rank in ranks]
    if not any(ended["exit_codes"]) and all(path.exists() for path in results):
        return [pickle.loads(path.read_bytes()) for path in results]
    outputs = [(folder / f"{rank}.output").read_text(errors="replace") for rank in ranks]
    printed = "".join(f"\n--- rank {rank} printed ---\n{text}" for rank, text in enumerate(outputs) if text.strip())
    if ended["hung"]:
        where = "".join(
            f"\n--- rank {rank} was at ---\n{(folder / f'{rank}.stacks').read_text()}" for rank in ended["hung"]
        )
        raise RanksHung(f"Ranks {ended['hung']} of {case.size} still ran after {case.limit} s.{where}{printed}")
    errors = [json.loads(path.read_text()) for path in folder.glob("*.error")]
    if errors:
        first = min(errors, key=lambda error: float(error["when"]))
        message = f"Rank {first['rank']} of {case.size} failed first.\n{first['traceback']}{printed}"
        raise RankFailed(first["rank"], first["error"], outputs, message, ended)
    rank, code = next((rank, code) for rank, code in enumerate(ended["exit_codes"]) if code)
    message = f"Rank {rank} of {case.size} left with exit code {code}.{printed}"
    raise RankFailed(rank, f"exit code {code}", outputs, message, ended)


# -------------------------------------------------------------------------------------------------------------- server


def serve() -> None:
    """Reads cases from standard input, one a line, until it is closed; answers each with a line."""
    with os.fdopen(os.dup(1), "w") as answers:
        os.dup2(2, 1)
        for name in _PRELOAD:
            importlib.import_module(name)
        sys.modules["torch"].set_num_threads(1)
        gc.collect()
        gc.freeze()  # so that collections in the children leave the shared pages alone
        while line := _read_line():
            answers.write(json.dumps(_run(_Case(**json.loads(line)))) + "\n")
            answers.flush()


def _read_line() -> bytes:
    """A line of standard input, not read ahead: while a case runs, its end is watched by ``select``."""
    line = b""
    while byte := os.read(0, 1):
        line += byte
        if byte == b"\n":
            break
    return line


def _run(case: _Case) -> dict[str, Any]:
    """Forks the ranks of a case and waits for their end."""
    env = {
        "LOCAL_RANK": "",
        "NODE_RANK": "0",
        "WORLD_SIZE": str(case.size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        **case.env,
    }
    children = {}
    for rank in range(case.size):
        pid = os.fork()
        if not pid:
            _be_rank(case, rank, env | {"LOCAL_RANK": str(rank)})
        children[os.pidfd_open(pid)] = (rank, pid)
    codes, late, stopped = [0] * case.size, [], []
    running = dict(children)
    deadline, failed = time.monotonic() + case.limit, False
    while running:
        ready, _, _ = select.select([0, *running], [], [], max(0.0, deadline - time.monotonic()))
        if 0 in ready:  # the client has gone
            _kill([pid for _, pid in running.values()])
            sys.exit(1)
        if not ready:
            late = [rank for rank, _ in running.values()]
            _dump_stacks(case, running)
            _kill([pid for _, pid in running.values()])
            ready = list(running)
        for handle in ready:
            rank, pid = running.pop(handle)
            codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            os.close(handle)
            if codes[rank] and not failed:
                failed, deadline = True, min(deadline, time.monotonic() + case.grace)
        if running and failed and all(_is_stopped(pid) for _, pid in running.values()):
            stopped = [rank for rank, _ in running.values()]
            _kill([pid for _, pid in running.values()])
    _kill([pid for _, pid in children.values()])  # what the ranks may have left behind, such as workers of a loader
    hung = late if not any(codes[rank] for rank in range(case.size) if rank not in late) else []
    return {"exit_codes": codes, "hung": hung, "stopped": stopped}


def _free_port() -> int:
    """A port that nobody listens on, below those that the system gives away, so that nobody will before it is used."""
    while True:
        port = random.randrange(20000, 32000)
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port


def _dump_stacks(case: _Case, running: Mapping[int, tuple[int, int]]) -> None:
    for _, pid in running.values():
        os.kill(pid, _STACKS)
    patience = time.monotonic() + 2.0
    for rank, _ in running.values():
        path = Path(case.folder, f"{rank}.stacks")
        while "most recent call first" not in path.read_text() and time.monotonic() < patience:
            time.sleep(0.02)
    time.sleep(0.1)


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def _kill(pids: list[int]) -> None:
    """Kills the process group that each rank leads."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue


def _be_rank(case: _Case, rank: int, env: Mapping[str, str]) -> None:
    """The life of a rank; it never returns."""
    code = 1
    try:
        os.setpgid(0, 0)
        folder = Path(case.folder)
        output = os.open(folder / f"{rank}.output", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        faulthandler.register(_STACKS, (folder / f"{rank}.stacks").open("w"), all_threads=True)
        os.environ.update(env)
        _seed(rank)
        module, _, name = case.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        result = pickle.dumps(function(*pickle.loads((folder / "args").read_bytes())))
        (folder / f"{rank}.result").write_bytes(result)
        code = 0
    except BaseException as error:
        _note_error(Path(case.folder), rank, error)
    finally:
        _leave(code)


def _seed(rank: int) -> None:
    """Each rank has random numbers of its own, as separate processes may have, but the same in every run."""
    import numpy as np
    import torch

    torch.manual_seed(rank)
    np.random.seed(rank)
    random.seed(rank)


def _note_error(folder: Path, rank: int, error: BaseException) -> None:
    lines = traceback.format_exception(error)
    said = traceback.format_exception_only(error)[0].strip()  # without its notes
    note = {"rank": rank, "when": time.time(), "error": said, "traceback": "".join(lines)}
    (folder / f"{rank}.error.part").write_text(json.dumps(note))
    (folder / f"{rank}.error.part").rename(folder / f"{rank}.error")


def _leave(code: int) -> None:
    try:
        atexit._run_exitfuncs()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve()
    os._exit(0)  # unloading all that was imported takes seconds
