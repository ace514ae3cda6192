"""Starts real runs of the script, as people do from a shell."""

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any, NamedTuple

PYTHON = (sys.executable,)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = Path(__file__).with_name("script.py")


class Ended(NamedTuple):
    """How a run ended.

    Attributes:
        code: Its exit code; ``None`` if it had to be killed.
        screen: What it printed.
        seconds: How long it took.
        at: When it ended, on the clock of ``time.monotonic``, which all processes of a machine share.
    """

    code: int | None
    screen: str
    seconds: float
    at: float


def launch(work: Path, *prefix: str, limit: float = 90.0, patience: float = 10.0, **options: Any) -> Ended:
    """Runs the script in a session of its own, and checks that no process of it is left.

    Args:
        work: Where the run works and its output is kept.
        *prefix: The command before the script, ``PYTHON`` or ``TORCHRUN``.
        limit: Seconds after which all of its processes are killed.
        patience: Seconds after the end of the first process in which all others have to end.
        **options: As in the script.
    """
    kept = {name: value for name, value in os.environ.items() if name not in ("LOCAL_RANK", "WORLD_SIZE", "RANK")}
    mark = uuid.uuid4().hex
    start = time.monotonic()
    with (work / "screen.txt").open("w") as screen:
        process = subprocess.Popen(
            [*(prefix or PYTHON), str(SCRIPT), json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=screen,
            stderr=subprocess.STDOUT,
            cwd=work,
            env=kept | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "RUN_MARK": mark},
            start_new_session=True,
        )
        code: int | None = None
        try:
            code = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            seconds = time.monotonic() - start
            left = _kill_what_is_left(process, mark, patience)
    text = (work / "screen.txt").read_text(errors="replace")
    assert code is None or not left, f"the run has left processes behind\n{text}"
    return Ended(code, text, seconds, start + seconds)


def forget_rank() -> None:
    """Makes a rank of a forked world a process that starts ranks itself."""
    for name in ("LOCAL_RANK", "RANK", "WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)


def _kill_what_is_left(process: subprocess.Popen[bytes], mark: str, patience: float) -> bool:
    """Kills the run's processes; whether there were any long after the end of the first one."""
    deadline = time.monotonic() + (patience if process.poll() is not None else 0.0)
    is_late = False
    while left := processes_of(mark):
        is_late = is_late or time.monotonic() > deadline
        for pid in left if is_late else ():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)
    process.wait()
    return is_late


def processes_of(mark: str) -> list[int]:
    """The processes that have inherited a variable; torchrun's workers are in sessions of their own."""
    found = []
    for environ in Path("/proc").glob("[0-9]*/environ"):
        try:
            if mark.encode() in environ.read_bytes():  # empty once a process has ended, though nobody waited for it
                found.append(int(environ.parent.name))
        except OSError:
            continue
    return found
