"""How a job over two nodes ends when one of its ranks fails, is killed or stops, or loses a worker of its loader."""

import json
import re
import subprocess
import time
import uuid
from pathlib import Path
from typing import NamedTuple

import pytest
from distributed.faults import SAYS_OF_ROW, checkpoints
from distributed.launches import SCRIPT, processes_of
from distributed.test_faults import BOUND, SAYS, SLACK, STALL_TIMEOUT, WHERE, accused

from .cluster import Cluster
from .test_recipes import environment

pytestmark = [pytest.mark.long, pytest.mark.timeout(420)]

RANKS = 4
VICTIM = 2
"""The first rank of the second node."""


class Ended(NamedTuple):
    """How a job step ended."""

    code: int
    screen: str
    at: float


def srun(cluster: Cluster, work: Path, **options: object) -> Ended:
    """Runs the script as the recipes do, two ranks on each of two nodes, and checks that no process of it is left."""
    mark = uuid.uuid4().hex
    given = json.dumps({"folder": str(work), "num_nodes": 2, "stall_timeout": STALL_TIMEOUT, **options})
    tasks = ["srun", "--job-name=chimera", "--nodes=2", "--ntasks-per-node=2", "--kill-on-bad-exit=1", "--label"]
    with (work / "screen.txt").open("w") as screen:
        step = cluster.popen(
            *tasks,
            *("python", str(SCRIPT), given),
            env={**environment(work), "RUN_MARK": mark},
            stdout=screen,
            stderr=subprocess.STDOUT,
        )
        try:
            code = step.wait(180.0)
        finally:
            step.kill()
    ended = Ended(code, (work / "screen.txt").read_text(errors="replace"), time.monotonic())
    cluster.wait_for(lambda: not processes_of(mark), SLACK, "no process of the job is left")
    return ended


@pytest.mark.parametrize("fault", ["exception", "SIGKILL", "SIGSTOP", "SIGTERM", "SIGINT", "out of memory"])
def test_a_fault_on_one_node_ends_the_job_and_is_on_the_screen_once(
    cluster: Cluster, tmp_path: Path, fault: str
) -> None:
    ended = srun(cluster, tmp_path, victim=(VICTIM, fault, "forward"))
    assert ended.code != 0, ended.screen
    stall = STALL_TIMEOUT if fault == "SIGSTOP" else 0.0
    assert ended.at - float((tmp_path / "when").read_text()) < stall + BOUND + SLACK, ended.screen
    if fault in SAYS:
        said = rf"{VICTIM}: \[rank{VICTIM}\]: chimera: rank {VICTIM} of {RANKS} failed at: {WHERE['forward']}"
        assert ended.screen.count(SAYS[fault]) == 1, ended.screen
    elif fault in ("SIGKILL", "SIGSTOP"):
        said = rf"chimera: rank {VICTIM} of {RANKS} has {'vanished' if fault == 'SIGKILL' else 'stalled'}"
    else:
        said = f"{fault} ends the run after step 3"
    assert len(re.findall(said, ended.screen)) == 1, ended.screen
    assert accused(ended.screen) <= {VICTIM}, ended.screen
    assert checkpoints(tmp_path)[:2] == [1, 2]


@pytest.mark.parametrize("fault", SAYS_OF_ROW)
def test_a_worker_of_the_loader_that_dies_or_raises_ends_the_job(cluster: Cluster, tmp_path: Path, fault: str) -> None:
    ended = srun(cluster, tmp_path, broken=fault)
    assert ended.code != 0, ended.screen
    assert ended.screen.count(SAYS_OF_ROW[fault]) == 1, ended.screen
    assert len(re.findall(rf"0: \[rank0\]: chimera: rank 0 of {RANKS} failed at: step \d", ended.screen)) == 1, (
        ended.screen
    )
    steps = checkpoints(tmp_path)
    assert steps == list(range(1, len(steps) + 1)), steps
