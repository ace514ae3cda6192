"""What a run under Slurm asks and tells it.

Every mistake that would let ranks wait for others that never come is refused at the start, by each task by itself.
"""

import os
import subprocess

from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

_SHELLS = ("bash", "interactive")
"""Names of jobs that Lightning takes for a shell, in which it starts the processes itself."""

_PORTS = range(15000, 32000)
"""Below those that the system gives away."""


def check_tasks(environment: ClusterEnvironment, devices: int, nodes: int) -> None:
    """Refuses a job whose tasks are not those that the Trainer waits for.

    Args:
        environment: Whom the Trainer asks for ranks.
        devices: Processes of a node.
        nodes: The Trainer's number of nodes.

    Raises:
        ValueError: The numbers differ, or the tasks are not those of one srun.
    """
    if not isinstance(environment, SLURMEnvironment):
        _check_shell(environment)
        return
    tasks = int(os.environ["SLURM_NTASKS"])
    started = int(os.environ.get("SLURM_STEP_NUM_TASKS", tasks if "SLURM_STEP_ID" in os.environ else 1))
    if started < tasks:
        raise ValueError(
            f"This process is {'alone' if started == 1 else f'one of {started}'}, and the Slurm job {_job()} is for"
            f" {tasks} tasks: the run would wait for {tasks - started} ranks that nobody starts. Start it with srun, as"
            " in: srun python script.py"
        )
    environment.validate_settings(devices, nodes)
    if tasks != devices * nodes:
        raise ValueError(
            f"The Slurm job {_job()} is for {tasks} task{'s' * (tasks > 1)}, and the Trainer waits for"
            f" {devices * nodes} processes (devices={devices} x num_nodes={nodes}). Give sbatch or srun --nodes={nodes}"
            f" --ntasks-per-node={devices}, or the Trainer the numbers of the job. A job named 'interactive' is taken"
            " for a shell, in which one process starts those of its node."
        )


def _check_shell(environment: ClusterEnvironment) -> None:
    """Refuses a task of several that takes itself for a shell: each would start all ranks."""
    tasks = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1"))
    name = SLURMEnvironment.job_name()
    # Of srun --pty the first task has the terminal; the others of a shell end at once.
    has_terminal = "SLURM_PTY_PORT" in os.environ and os.environ.get("SLURM_PROCID") == "0"
    if tasks > 1 and not has_terminal and name in _SHELLS and not environment.creates_processes_externally:
        raise ValueError(
            f"This process is task {os.environ.get('SLURM_PROCID')} of {tasks} of an srun, but its job is named"
            f" {name!r}, which Lightning takes for a shell: each task would start all ranks by itself. Name the step,"
            " as in: srun --job-name=train ..., or run the script once, without srun, on the devices of one node."
        )


def choose_port() -> None:
    """Sets ``MASTER_PORT`` to one of this job's step; two steps of a job, and two jobs of a node, have their own."""
    if "SLURM_JOB_ID" in os.environ:
        number = int(os.environ["SLURM_JOB_ID"]) + 4099 * int(os.environ.get("SLURM_STEP_ID", "0"))
        os.environ.setdefault("MASTER_PORT", str(_PORTS[number % len(_PORTS)]))


def is_run_again() -> bool:
    """Whether this run has been started before: its job was requeued, or torchrun has started its processes anew."""
    return any(int(os.environ.get(name) or 0) > 0 for name in ("SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"))


def is_running() -> bool:
    """Whether the controller still has this job running: neither cancelled, nor over its time, nor requeued already."""
    return "JobState=RUNNING" in _scontrol("show", "job", _job()).split()


def requeue() -> None:
    """Has this job run again.

    Raises:
        RuntimeError: Slurm refuses.
    """
    _scontrol("requeue", _job())


def _job() -> str:
    """The job's id; that of its array and its number in it, if it is of an array."""
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    return f"{array}_{task}" if array and task else os.environ["SLURM_JOB_ID"]


def _scontrol(*arguments: str) -> str:
    try:
        ended = subprocess.run(["scontrol", *arguments], capture_output=True, text=True, timeout=60, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RuntimeError(f"scontrol {' '.join(arguments)} failed: {error}") from error
    if ended.returncode:
        raise RuntimeError(f"scontrol {' '.join(arguments)} failed: {ended.stderr.strip() or ended.stdout.strip()}")
    return ended.stdout
