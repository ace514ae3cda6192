"""The batch scripts that come with the package, submitted to a real cluster."""

import os
import random
import re
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from distributed.world import World
from torch import Tensor

from .cluster import Cluster
from .reference import run_recipe

pytestmark = pytest.mark.timeout(420)

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "recipes" / "slurm"
ONE_EACH = ["--nodes=2", "--ntasks-per-node=1"]

# A tiny model whose weights after some steps of SGD show every error in a gradient, in a sum of them and in the data.
TINY = [
    "--config-name=gpt2_tiny",
    "optimizer=sgd",
    "scheduler=none",
    "callbacks=none",
    "+callbacks.last._target_=lightning.pytorch.callbacks.ModelCheckpoint",
    "+callbacks.last.dirpath=${paths.output_dir}/checkpoints",
    "+callbacks.last.filename=last",
    "+trainer.enable_progress_bar=false",
    "+trainer.enable_model_summary=false",
    "+trainer.num_sanity_val_steps=0",
    "trainer.precision=64-true",
    "trainer.max_steps=3",
    "trainer.val_check_interval=3",
    "trainer.limit_val_batches=1",
    "data.sequence_length=16",
    "data.batch_size=8",
    "data.tokenizer.vocab_size=300",
    "model.config.n_embd=32",
    *(f"+model.config.{name}=0.0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")),
]


def environment(work: Path) -> dict[str, str]:
    """What the jobs find: this interpreter as ``python``, and this tree."""
    binaries = work / "bin"
    binaries.mkdir(exist_ok=True)
    for name, module in (("python", ""), ("torchrun", "-m torch.distributed.run")):
        script = binaries / name
        script.write_text(f'#!/bin/sh\nexec {sys.executable} {module} "$@"\n')
        script.chmod(0o755)
    paths = [str(ROOT), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {"PATH": f"{binaries}:{os.environ['PATH']}", "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def overrides(work: Path, *own: str) -> list[str]:
    return [*TINY, f"paths.runs_dir={work}/runs", f"paths.cache_dir={work}/cache", *own]


def weights(folder: Path) -> dict[str, Tensor]:
    state: dict[str, Tensor] = torch.load(folder / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return state


def train_plainly(world: World, work: Path, *own: str) -> None:
    """Trains in one process, which need not import everything first."""
    single = ["strategy@trainer.strategy=single", "trainer.devices=1", f"hydra.run.dir={work}/plain"]
    world.run(run_recipe, overrides(work, *single, *own), size=1, limit=150.0)


LAYOUTS = {
    "one pipeline of 4": (4, 1, "stages"),
    "two replicas of 2": (2, 2, "stages"),
    "two replicas of a stage share a node": pytest.param(2, 2, "replicas", marks=pytest.mark.long),
}


@pytest.mark.parametrize(("stages", "replicas", "innermost"), LAYOUTS.values(), ids=LAYOUTS)
def test_a_job_over_two_nodes_trains_as_one_process(
    cluster: Cluster, world: World, tmp_path: Path, stages: int, replicas: int, innermost: str
) -> None:
    layout = [f"trainer.strategy.num_stages={stages}", f"trainer.strategy.innermost={innermost}"]
    job = cluster.submit(
        SCRIPTS / "train.sbatch",
        *overrides(tmp_path, *layout),
        env=environment(tmp_path),
    )
    train_plainly(world, tmp_path, f"data.batch_size={8 * replicas}")
    expected = weights(tmp_path / "plain")
    assert cluster.wait_to_end(job, 240.0) == "COMPLETED", cluster.output(job)
    folder = tmp_path / "runs" / "gpt2_tiny" / job
    found = weights(folder)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)
    plan = re.findall(r"^0:\s+(\d+(?:, \d+)*)\s+(node\d(?:, node\d)*)\s+\d ", cluster.output(job), re.MULTILINE)
    names = ["node1", "node1", "node2", "node2"]
    neighbours = innermost == "replicas"
    groups = [
        range(stage * replicas, (stage + 1) * replicas) if neighbours else range(stage, 4, stages)
        for stage in range(stages)
    ]
    assert plan == [
        (", ".join(map(str, ranks)), ", ".join(dict.fromkeys(names[rank] for rank in ranks))) for ranks in groups
    ]
    logs = sorted(path.name for path in folder.glob("*.log"))
    assert logs == [f"rank-{rank}.log" for rank in range(4)]


# ---------------------------------------------------------------------------------------------------------- requeues

STEPS = 300
LONGER = [f"trainer.max_steps={STEPS}", f"trainer.val_check_interval={STEPS}", "data.num_workers=1"]


def restored(printed: str) -> list[int]:
    """The steps at which a job has been saved, each of which it has resumed from in the same folder."""
    saved = re.findall(r"Saved step (\d+) to (\S+)", printed)
    resumed = re.findall(r"Restored all states from the checkpoint at (\S+)", printed)
    assert [path for _, path in saved] == resumed, printed
    return [int(step) for step, _ in saved]


@pytest.mark.contract(
    "Launch",
    "a Slurm job that gets SIGUSR1 saves the step, is requeued, and goes on from it in the same folder",
    reported="Lightning#21406, Lightning#20806, Lightning#20542",
)
def test_a_job_that_is_told_to_make_room_goes_on_where_it_was(cluster: Cluster, world: World, tmp_path: Path) -> None:
    job = cluster.submit(
        SCRIPTS / "train.sbatch", *overrides(tmp_path, *LONGER), options=ONE_EACH, env=environment(tmp_path)
    )
    cluster.wait_for_output(job, "simulated bubble")  # the plan: the ranks have met
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait_to_end(job, 300.0, restarts=1) == "COMPLETED", cluster.output(job)
    (step,) = restored(cluster.output(job))
    assert 0 < step < STEPS
    stopped = ["++callbacks.last.filename=stopped", f"+callbacks.last.every_n_train_steps={step}"]
    train_plainly(world, tmp_path, *LONGER, *stopped, f"trainer.max_steps={step}")
    train_plainly(world, tmp_path, *LONGER, "ckpt_path=auto")
    expected = weights(tmp_path / "plain")
    found = weights(tmp_path / "runs" / "gpt2_tiny" / job)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-7, atol=1e-9)


@pytest.mark.long
def test_a_job_that_begins_with_a_given_checkpoint_goes_on_from_its_own(
    cluster: Cluster, world: World, tmp_path: Path
) -> None:
    train_plainly(world, tmp_path)
    given = tmp_path / "plain" / "checkpoints" / "last.ckpt"
    job = cluster.submit(
        SCRIPTS / "train.sbatch",
        *overrides(tmp_path, *LONGER, f"ckpt_path={given}"),
        options=ONE_EACH,
        env=environment(tmp_path),
    )
    cluster.wait_for_output(job, "Restored all states")
    cluster.run("scancel", "--signal=USR1", job)
    assert cluster.wait_to_end(job, 300.0, restarts=1) == "COMPLETED", cluster.output(job)
    ((step, path),) = re.findall(r"Saved step (\d+) to (\S+)", cluster.output(job))
    assert 3 <= int(step) < STEPS
    resumed = re.findall(r"Restored all states from the checkpoint at (\S+)", cluster.output(job))
    assert resumed == [str(given), path], cluster.output(job)


@pytest.mark.long
def test_a_job_that_is_requeued_from_outside_goes_on_where_it_was_told_to_end(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        SCRIPTS / "train.sbatch", *overrides(tmp_path, *LONGER), options=ONE_EACH, env=environment(tmp_path)
    )
    cluster.wait_for_output(job, "simulated bubble")
    cluster.run("scontrol", "requeue", job)
    assert cluster.wait_to_end(job, 300.0, restarts=1) == "COMPLETED", cluster.output(job)
    assert len(restored(cluster.output(job))) == 1
    assert "The job is not requeued, since Slurm has ended it by itself" in cluster.output(job)


@pytest.mark.long
def test_a_job_that_is_cancelled_stays_so(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        SCRIPTS / "train.sbatch", *overrides(tmp_path, *LONGER), options=ONE_EACH, env=environment(tmp_path)
    )
    cluster.wait_for_output(job, "simulated bubble")
    cluster.run("scancel", job)
    assert cluster.wait_to_end(job, 60.0) == "CANCELLED"
    time.sleep(15.0)
    assert cluster.state(job) == "CANCELLED"


@pytest.mark.long
def test_a_job_goes_on_without_a_node_that_has_died(cluster: Cluster, tmp_path: Path) -> None:
    """From the last checkpoint of its callback, on a spare node."""
    often = ["+callbacks.last.every_n_train_steps=10", "trainer.max_steps=1000", "trainer.val_check_interval=1000"]
    job = cluster.submit(
        SCRIPTS / "train.sbatch", *overrides(tmp_path, *often), options=ONE_EACH, env=environment(tmp_path)
    )
    saved = tmp_path / "runs" / "gpt2_tiny" / job / "checkpoints" / "last.ckpt"
    cluster.wait_for(saved.exists, 120.0, "there is a checkpoint", job)
    cluster.kill_node("node2")
    cluster.wait_for(lambda: cluster.job(job).get("Restarts") == "1", 120.0, "the job is requeued", job)
    assert cluster.wait_to_end(job, 300.0, restarts=1) == "COMPLETED", cluster.output(job)
    assert f"Restored all states from the checkpoint at {saved}" in cluster.output(job)
    assert "node2" not in cluster.job(job)["NodeList"]
    assert torch.load(saved, weights_only=True)["global_step"] == 1000


@pytest.mark.long
def test_a_task_of_an_array_is_requeued_alone(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.submit(
        SCRIPTS / "array.sbatch",
        *overrides(tmp_path, *LONGER),
        options=["--array=0-1", "--nodes=1"],
        env=environment(tmp_path),
    )
    tasks = [f"{job}_0", f"{job}_1"]
    cluster.wait_for_output(tasks[1], "simulated bubble")
    cluster.run("scancel", "--signal=USR1", tasks[1])
    assert cluster.wait_to_end(tasks[1], 300.0, restarts=1) == "COMPLETED", cluster.output(tasks[1])
    assert cluster.wait_to_end(tasks[0], 300.0) == "COMPLETED", cluster.output(tasks[0])
    assert [len(restored(cluster.output(task))) for task in tasks] == [0, 1]
    folder = tmp_path / "runs" / "gpt2_tiny" / job
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]
    rates = [torch.load(folder / task / "checkpoints" / "last.ckpt")["optimizer_states"] for task in ("0", "1")]
    assert [state[0]["param_groups"][0]["lr"] for state in rates] == [1.0e-3, 5.0e-4]


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_job_is_requeued_at_random_instants_and_never_hangs(cluster: Cluster, tmp_path: Path) -> None:
    """Fast steps, loader workers on. The number of times is REQUEUES, 50 by default."""
    times = int(os.environ.get("REQUEUES", "50"))
    endless = ["trainer.max_steps=1000000", "trainer.val_check_interval=1000000", "data.num_workers=1"]
    job = cluster.submit(
        SCRIPTS / "train.sbatch",
        *overrides(tmp_path, *endless),
        options=["--nodes=1", "--ntasks-per-node=2", "--time=120"],
        env=environment(tmp_path),
    )
    instants = random.Random(0)
    for number in range(times):
        cluster.wait_for(lambda: cluster.output(job).count("simulated bubble") > number, 120.0, "it runs", job)  # noqa: B023
        time.sleep(instants.uniform(0.0, 3.0))
        cluster.run("scancel", "--signal=USR1", job)
        cluster.wait_for(
            lambda: cluster.output(job).count("Saved step") > number,  # noqa: B023
            60.0,
            f"it has saved for the {number + 1}th time",
            job,
        )
        cluster.wait_for(
            lambda: cluster.job(job).get("Restarts") == str(number + 1),  # noqa: B023
            60.0,
            f"it is requeued for the {number + 1}th time",
            job,
        )
    cluster.wait_for(lambda: cluster.output(job).count("Restored all states") == times, 120.0, "it resumes", job)
    cluster.run("scancel", job)
    steps = restored(cluster.output(job))
    assert len(steps) == times
    assert steps == sorted(steps)


# ---------------------------------------------------------------------------------------------------------- mistakes


@pytest.mark.contract("Launch", "tasks of a Slurm job that are not the Trainer's devices", "refused", "Lightning#20391")
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["trainer.devices=4"], r"devices=4.*--ntasks-per-node=1"),
        pytest.param(["trainer.num_nodes=4"], r"num_nodes=4.*--nodes=2", marks=pytest.mark.long),
    ],
)
def test_tasks_that_are_not_the_devices_are_refused_at_once(
    cluster: Cluster, tmp_path: Path, given: list[str], message: str
) -> None:
    job = cluster.submit(
        SCRIPTS / "train.sbatch", *overrides(tmp_path, *given), options=ONE_EACH, env=environment(tmp_path)
    )
    assert cluster.wait_to_end(job, 120.0) == "FAILED"
    assert re.search(message, cluster.output(job)), cluster.output(job)


@pytest.mark.long
def test_a_task_that_takes_itself_for_a_shell_is_refused_at_once(cluster: Cluster, tmp_path: Path) -> None:
    command = ["python", "-m", "lightning_chimera.train", *overrides(tmp_path)]
    tasks = ["srun", "--job-name=bash", "--nodes=2", "--ntasks-per-node=1"]
    printed = cluster.run(*tasks, *command, check=False, limit=120.0, env=environment(tmp_path))
    assert re.search(r"is task \d of 2 of an srun, but its job is named 'bash'", printed), printed


# ----------------------------------------------------------------------------------------------------------- others


@pytest.mark.long
def test_torchrun_trains_over_two_nodes_as_one_process(cluster: Cluster, world: World, tmp_path: Path) -> None:
    job = cluster.submit(SCRIPTS / "torchrun.sbatch", *overrides(tmp_path), env=environment(tmp_path))
    train_plainly(world, tmp_path)
    expected = weights(tmp_path / "plain")
    assert cluster.wait_to_end(job, 240.0) == "COMPLETED", cluster.output(job)
    found = weights(tmp_path / "runs" / "gpt2_tiny" / job)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-9, atol=1e-11)


@pytest.mark.long
@pytest.mark.skipif(find_spec("submitit") is None, reason="NO SWEEP OVER SLURM: the extra `slurm` is not installed")
def test_hydra_sweeps_over_jobs_of_two_nodes(cluster: Cluster, tmp_path: Path) -> None:
    jobs = ["launch=submitit", "hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=1"]
    sweep = [*jobs, "hydra.launcher.timeout_min=5", f"hydra.sweep.dir={tmp_path}/sweep", "optimizer.lr=0.1,0.01"]
    command = ["python", "-m", "lightning_chimera.train", "-m", *overrides(tmp_path, *sweep)]
    printed = cluster.run(*command, limit=300.0, env=environment(tmp_path))
    first, second = (weights(tmp_path / "sweep" / number) for number in ("0", "1"))
    assert first.keys() == second.keys()
    assert any(not torch.equal(first[name], second[name]) for name in first), printed
