"""How a process of a run is known to the others."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lightning_chimera.runtime.members import Member


@contextmanager
def errors_to(file: int) -> Iterator[None]:
    """Has this process show its errors there."""
    before = os.dup(2)
    os.dup2(file, 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)
        os.close(file)


def screen(file: int) -> str:
    with errors_to(file):
        return Member.of_this_process(0).screen


def test_the_pipes_of_an_srun_lead_to_one_screen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pipes = [os.pipe()[1] for _ in range(4)]
    assert screen(pipes[0]) != screen(pipes[1])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_STEP_ID", "0")
    assert screen(pipes[2]) == screen(pipes[3])
    logs = [os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT) for name in ("0.log", "1.log")]  # srun --output=%t.log
    assert screen(logs[0]) != screen(logs[1])
