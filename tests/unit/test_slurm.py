"""Which jobs of Slurm are refused at the start."""

import os
import subprocess
from pathlib import Path

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment

from lightning_chimera.slurm import check_tasks, choose_port, is_run_again

TASK = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "2",
    "SLURM_NNODES": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_PROCID": "0",
}


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in [name for name in os.environ if name.startswith("SLURM_")]:
        monkeypatch.delenv(name)
    for name in ("LOCAL_RANK", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def job(monkeypatch, **changes: str | None) -> None:
    for name, value in {**TASK, **changes}.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)


def test_a_task_for_each_device_goes_on(monkeypatch) -> None:
    job(monkeypatch)
    check_tasks(SLURMEnvironment(), 2, 2)
    job(monkeypatch, SLURM_STEP_NUM_TASKS=None)
    check_tasks(SLURMEnvironment(), 2, 2)


@pytest.mark.parametrize(
    ("changes", "devices", "nodes", "message"),
    [
        ({}, 4, 2, r"devices=4.*--ntasks-per-node=2"),
        ({}, 2, 1, r"num_nodes=1.*--nodes=2"),
        (
            {"SLURM_NTASKS": "3", "SLURM_STEP_NUM_TASKS": "3"},
            2,
            2,
            r"job 7 is for 3 tasks, and .* waits for 4 processes \(devices=2 x num_nodes=2\)",
        ),
        (
            {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": None, "SLURM_NNODES": "1", "SLURM_STEP_NUM_TASKS": "1"},
            2,
            1,
            r"job 7 is for 1 task, and the Trainer waits for 2 processes.*--nodes=1 --ntasks-per-node=2.*'interactive'",
        ),
        (
            {"SLURM_STEP_ID": None, "SLURM_STEP_NUM_TASKS": None},
            2,
            2,
            r"This process is alone, and the Slurm job 7 is for 4 tasks: .* 3 ranks that nobody starts.*srun python",
        ),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 2, 2, r"This process is alone, and the Slurm job 7 is for 4 tasks"),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 2, 2, r"This process is one of 2, and .* wait for 2 ranks that nobody starts"),
    ],
    ids=[
        "other devices",
        "other nodes",
        "fewer tasks on one of the nodes",
        "one task of several devices",
        "no srun",
        "a shell that is a step of its own",
        "a smaller step",
    ],
)
@pytest.mark.contract("Launch", "tasks of a Slurm job that are not the Trainer's devices", "refused", "Lightning#20391")
def test_tasks_that_are_not_the_devices_are_refused(monkeypatch, changes, devices, nodes, message) -> None:
    job(monkeypatch, **changes)
    with pytest.raises(ValueError, match=message):
        check_tasks(SLURMEnvironment(), devices, nodes)


@pytest.mark.parametrize("name", ["bash", "interactive"])
def test_a_shell_starts_the_ranks_of_its_node_however_many_tasks_its_job_has(monkeypatch, name: str) -> None:
    job(monkeypatch, SLURM_JOB_NAME=name, SLURM_STEP_ID=None, SLURM_STEP_NUM_TASKS=None)  # of salloc
    assert not SLURMEnvironment.detect()
    check_tasks(LightningEnvironment(), 8, 1)
    job(monkeypatch, SLURM_JOB_NAME=name, SLURM_PTY_PORT="40000")  # of srun --pty
    check_tasks(LightningEnvironment(), 8, 1)


@pytest.mark.parametrize("changes", [{}, {"SLURM_PTY_PORT": "40000", "SLURM_PROCID": "1"}])
def test_a_task_that_takes_itself_for_a_shell_is_refused(monkeypatch, changes) -> None:
    job(monkeypatch, SLURM_JOB_NAME="bash", **changes)
    with pytest.raises(ValueError, match=r"is task \d of 4 of an srun, but its job is named 'bash'"):
        check_tasks(LightningEnvironment(), 2, 1)


def test_torchrun_starts_its_own_in_any_job(monkeypatch) -> None:
    for name in ("train", "bash"):
        job(monkeypatch, SLURM_JOB_NAME=name, SLURM_NTASKS="2", SLURM_STEP_NUM_TASKS="2", SLURM_NTASKS_PER_NODE="1")
        check_tasks(TorchElasticEnvironment(), 4, 2)


def test_every_step_of_a_job_has_a_port_of_its_own(monkeypatch) -> None:
    ports = set()
    for number in range(5):
        for step in range(3):
            job(monkeypatch, SLURM_JOB_ID=str(number), SLURM_STEP_ID=str(step), MASTER_PORT=None)
            choose_port()
            ports.add(os.environ["MASTER_PORT"])
    assert len(ports) == 15


SCRIPTS = sorted((Path(__file__).parents[2] / "recipes" / "slurm").glob("*.sbatch"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
@pytest.mark.parametrize("cpus", ["8", None])
def test_srun_is_told_the_cpus_that_sbatch_was_given_and_only_those(tmp_path, script, cpus) -> None:
    for name in ("srun", "scontrol"):
        (tmp_path / name).write_text('#!/bin/sh\necho "${SRUN_CPUS_PER_TASK-none}"\n')
        (tmp_path / name).chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "n[1-2]", "SLURM_ARRAY_TASK_ID": "0"}
    given = {} if cpus is None else {"SLURM_CPUS_PER_TASK": cpus}
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **job, **given}
    ended = subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True)
    assert ended.stdout.split() == [cpus or "none"]
    options = script.read_text()
    assert "#SBATCH --open-mode=append" in options
    assert "##SBATCH --cpus-per-task=" in options


def test_a_run_that_was_started_before_is_known_by_slurm_or_torchrun(monkeypatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RESTART_COUNT", raising=False)
    assert not is_run_again()
    for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"):
        for count, expected in (("0", False), ("", False), ("2", True)):
            monkeypatch.setenv(name, count)
            assert is_run_again() == expected
        monkeypatch.delenv(name)
