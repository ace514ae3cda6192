"""The tiny recipes train: in this process on a single device, and as pipelines from the command line."""

import csv
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from hydra.errors import CompactHydraException
from lightning.pytorch.callbacks import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lightning_chimera.train import _check_launch, _checkpoint, run

TINY = ["gpt2_tiny", "bert_tiny"]
TWO_STEPS = ["trainer.max_steps=2", "trainer.val_check_interval=1", "trainer.log_every_n_steps=1"]
QUICK = [*TWO_STEPS, "trainer.limit_val_batches=2", "data.sequence_length=32", "data.batch_size=4"]
SINGLE = ["strategy@trainer.strategy=single", "trainer.devices=1", "callbacks=[checkpoint,progress_bar]"]
NO_DROPOUT = {
    "gpt2_tiny": [f"+model.config.{name}=0.0" for name in ("resid_pdrop", "embd_pdrop", "attn_pdrop")],
    "bert_tiny": [f"+model.config.{name}=0.0" for name in ("hidden_dropout_prob", "attention_probs_dropout_prob")],
}
# What makes a large recipe run on two cores: fewer and narrower layers, and less of everything else.
SHRUNK = {
    name: [*QUICK, "trainer=cpu", "trainer.accumulate_grad_batches=2", "data.tokenizer.vocab_size=2048", *model]
    for name, model in {
        "gpt2_1b": ["model.config.n_layer=4", "model.config.n_embd=40"],
        "bert_48": ["model.config.num_hidden_layers=4", "model.config.hidden_size=64"],
    }.items()
}


def logged(folder: Path, name: str) -> list[float]:
    """The values of one metric in the order of the steps."""
    with (folder / "logs" / "metrics.csv").open() as file:
        return [float(row[name]) for row in csv.DictReader(file) if row.get(name)]


def logged_to_tensorboard(folder: Path, name: str) -> list[float]:
    """The same from the one file of events that a run may write."""
    (events,) = (folder / "tensorboard").glob("events.*")
    accumulator = EventAccumulator(str(events)).Reload()
    return [event.value for event in accumulator.Scalars(name)]


MODULE = (sys.executable, "-m", "lightning_chimera.train")
CONSOLE = (str(Path(sys.executable).with_name("lightning-chimera-train")),)
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "-m", "lightning_chimera.train")


def command_line(
    tmp_path: Path,
    *arguments: str,
    program: Sequence[str] = MODULE,
    folder: str | None = "hydra.run.dir={}/run",
    limit: float = 110.0,
) -> subprocess.CompletedProcess[str]:
    """Runs the command away from the repository; LOCAL_RANK and the like of this process stay here."""
    tmp_path.mkdir(exist_ok=True)
    folders = [f"paths.cache_dir='{tmp_path}/cache'", *([] if folder is None else [folder.format(tmp_path)])]
    ranks = ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in ranks}
    return subprocess.run(
        [*program, *arguments, *folders], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=limit
    )


@pytest.mark.parametrize("recipe", TINY)
def test_recipe_trains_on_a_single_device(recipe, compose_run, tmp_path, capsys):
    last = run(compose_run(recipe, *QUICK, *SINGLE))
    assert len(logged(tmp_path, "train/loss")) == 2
    losses = logged(tmp_path, "val/loss")
    assert losses[-1] == pytest.approx(last)
    # An untrained model knows nothing: the loss is that of a guess among 2048 tokens.
    assert all(7.0 < loss < 8.3 for loss in losses)
    printed = capsys.readouterr().out
    assert f"validation loss  {losses[0]:.3f} -> {losses[1]:.3f}\n" in printed
    assert f"run folder       {tmp_path}\n" in printed


def test_a_checkpoint_resumes_and_holds_plain_values_only(compose_run, tmp_path):
    run(compose_run("gpt2_tiny", *QUICK, *SINGLE))
    (checkpoint,) = (tmp_path / "checkpoints").glob("*.ckpt")
    assert "hyper_parameters" in torch.load(checkpoint, weights_only=True)
    run(compose_run("gpt2_tiny", *QUICK, *SINGLE, "trainer.max_steps=4", f"ckpt_path='{checkpoint}'"))
    assert len(logged(tmp_path, "train/loss")) == 4 - int(checkpoint.name[len("step=")])


@pytest.mark.parametrize("recipe", TINY)
def test_debug_goes_through_the_motions(recipe, compose_run, tmp_path):
    assert run(compose_run(recipe, "debug=two_steps", "data.sequence_length=32", *SINGLE)) is not None
    assert not list(tmp_path.glob("checkpoints/*"))


@pytest.mark.contract("Loggers and profilers", "several loggers at once, such as CSV and TensorBoard, by config")
@pytest.mark.contract(
    "Launch",
    "a Hydra application: all ranks write to one folder, by `python -m` or a console script, with `hydra.job.chdir` and"
    " with spaces in paths",
    reported="Lightning#2727, Lightning#5629, Lightning#18175",
)
@pytest.mark.parametrize(
    ("recipe", "program", "own"), [("gpt2_tiny", MODULE, []), ("bert_tiny", CONSOLE, ["hydra.job.chdir=true"])]
)
def test_recipe_trains_as_a_pipeline_as_it_does_on_a_single_device(recipe, program, own, compose_run, tmp_path):
    run(compose_run(recipe, *QUICK, *SINGLE, *NO_DROPOUT[recipe]))
    options = [*QUICK, *NO_DROPOUT[recipe], "logger=[csv,tensorboard]", *own]
    work = tmp_path / "a pipeline"
    result = command_line(work, "--config-name", recipe, *options, program=program, folder=None)
    assert result.returncode == 0, result.stderr
    (folder,) = (work / "runs" / recipe).iterdir()  # named after the time, which is another one for each rank
    for name in ("train/loss", "val/loss"):
        assert logged(folder, name) == pytest.approx(logged(tmp_path, name), rel=1e-5)
        assert logged_to_tensorboard(folder, name) == pytest.approx(logged(tmp_path, name), rel=1e-5)
    assert result.stdout.count("validation loss ") == 1, "one rank reports"
    assert list((folder / "checkpoints").glob("*.ckpt"))
    assert {path.name for path in work.iterdir()} == {"cache", "runs"}, "all ranks use one folder"


@pytest.mark.parametrize("recipe", SHRUNK)
def test_a_large_recipe_trains_when_it_is_shrunk(recipe, compose_run, tmp_path):
    run(compose_run(recipe, *SHRUNK[recipe], *SINGLE))
    assert len(logged(tmp_path, "train/loss")) == 2


@pytest.mark.long
@pytest.mark.parametrize("recipe", SHRUNK)
def test_a_large_recipe_trains_as_a_pipeline_when_it_is_shrunk(recipe, tmp_path):
    result = command_line(tmp_path, "--config-name", recipe, *SHRUNK[recipe], "trainer.devices=4")
    assert result.returncode == 0, result.stderr
    assert "4 stages, 2 pipes" in result.stdout
    assert len(logged(tmp_path / "run", "train/loss")) == 2


@pytest.mark.contract("Launch", "`torchrun ... -m lightning_chimera.train launch=torchrun` on one machine")
@pytest.mark.long
def test_torchrun_trains_a_recipe_as_a_single_device_does(compose_run, tmp_path):
    run(compose_run("gpt2_tiny", *QUICK, *SINGLE, *NO_DROPOUT["gpt2_tiny"]))
    options = ["--config-name", "gpt2_tiny", *QUICK, *NO_DROPOUT["gpt2_tiny"], "launch=torchrun"]
    standalone = (*TORCHRUN[:3], "--standalone", *TORCHRUN[3:])
    for _ in range(2):
        result = command_line(tmp_path / "two", *options, program=standalone, folder=None)
        assert result.returncode == 0, result.stderr
        assert result.stdout.count("validation loss ") == 1, "one rank reports"
    folders = list((tmp_path / "two" / "runs" / "gpt2_tiny").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert logged(folder, "val/loss") == pytest.approx(logged(tmp_path, "val/loss"), rel=1e-5)
        assert {path.name for path in folder.glob("*.log")} == {"rank-0.log", "rank-1.log"}


@pytest.mark.contract("Launch", "ranks of torchrun or srun that would not agree on the run's folder", "refused")
@pytest.mark.parametrize(
    ("launch", "variables", "message"),
    [
        ("local", {"TORCHELASTIC_RUN_ID": "7"}, "torchrun has started this process .* Add launch=torchrun"),
        ("torchrun", {"TORCHELASTIC_RUN_ID": "none"}, "Start it with --rdzv-id=NAME, or .* --standalone"),
        ("slurm", {"SLURM_JOB_ID": "7"}, "from the job's --ntasks-per-node, which was not given"),
        ("local", {"SLURM_STEP_NUM_TASKS": "2"}, "srun has started this process .* Add launch=slurm"),
    ],
)
def test_ranks_that_would_not_agree_on_a_folder_are_told_so(compose_run, monkeypatch, launch, variables, message):
    given = {"LOCAL_WORLD_SIZE": "1", "GROUP_WORLD_SIZE": "1", "RANK": "0", **variables}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    compose_run("gpt2_tiny", f"launch={launch}")
    with pytest.raises(CompactHydraException, match=message):
        _check_launch("cpu")
    if launch != "slurm":
        compose_run("gpt2_tiny", f"launch={launch}", "hydra.run.dir=somewhere")
        _check_launch("cpu")


@pytest.mark.parametrize(
    ("tasks", "accelerator", "is_refused"), [("2", "gpu", True), ("1", "gpu", False), ("2", "cpu", False)]
)
def test_tasks_that_see_a_gpu_each_are_told_so(compose_run, monkeypatch, tasks, accelerator, is_refused):
    for name, value in {"NTASKS_PER_NODE": tasks, "NNODES": "1", "JOB_ID": "7", "GPUS_PER_TASK": "1"}.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    compose_run("gpt2_tiny", "launch=slurm")
    with pytest.raises(CompactHydraException, match="--gpus-per-node") if is_refused else nullcontext():
        _check_launch(accelerator)


@pytest.mark.contract("Launch", "a recipe with `ckpt_path=FILE`, whose job is requeued, goes on from where it has got")
@pytest.mark.parametrize("counter", ["SLURM_RESTART_COUNT", "TORCHELASTIC_RESTART_COUNT"])
def test_a_job_that_runs_again_goes_on_from_what_it_has_saved_itself(compose_run, monkeypatch, tmp_path, counter):
    config = compose_run("gpt2_tiny", "ckpt_path=given.ckpt", f"paths.output_dir={tmp_path}")
    saved = tmp_path / "checkpoints" / "hpc_ckpt_1.ckpt"
    for count, has_saved, expected in [("0", True, "given"), ("1", False, "given"), ("1", True, "saved")]:
        monkeypatch.setenv(counter, count)
        saved.parent.mkdir(exist_ok=True)
        saved.touch() if has_saved else saved.unlink(missing_ok=True)
        assert _checkpoint(config) == {"given": "given.ckpt", "saved": str(saved)}[expected]
    config.ckpt_path = None
    assert _checkpoint(config) is None


def test_an_unknown_option_ends_with_the_known_ones(tmp_path):
    result = command_line(tmp_path, "--config-name", "gpt2_tiny", "model=gpt3")
    assert result.returncode == 1
    assert "Could not find 'model/gpt3'" in result.stderr
    assert "gpt2_tiny" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_schedule_ends_with_a_message_and_no_traceback(tmp_path):
    result = command_line(tmp_path, "--config-name", "gpt2_tiny", "trainer.strategy.schedule=chimaera")
    assert result.returncode == 1
    assert "chimaera" in result.stderr
    assert "1f1b" in result.stderr, "the known names are listed"
    assert "Traceback" not in result.stderr


def test_an_odd_number_of_devices_ends_with_a_message_and_no_traceback(tmp_path):
    result = command_line(tmp_path, "--config-name", "gpt2_tiny", "trainer.devices=3")
    assert result.returncode == 1
    assert "even" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_mistake_in_the_data_ends_with_its_message(compose_run, tmp_path):
    result = command_line(tmp_path, "--config-name", "gpt2_tiny", *SINGLE, "data.batch_size=100000")
    assert result.returncode == 1
    assert "but 100000 are needed. Use more text, or lower sequence_length or batch_size." in result.stderr
    assert "HYDRA_FULL_ERROR=1" in result.stderr
    assert "Traceback" not in result.stderr


APP = """
import os

import hydra
import torch.distributed as dist
from hydra.core.hydra_config import HydraConfig

from lightning_chimera.modules import CausalLanguageModel


class Raises(CausalLanguageModel):
    def training_step(self, batch, batch_idx):
        if self.trainer.max_steps == 1:
            raise ValueError("the fault")
        return super().training_step(batch, batch_idx)


@hydra.main(version_base="1.3", config_path="conf", config_name="mine")
def main(config):
    from lightning_chimera.train import run

    try:
        run(config)
    finally:
        print(HydraConfig.get().mode.name, dist.is_initialized(), os.environ.get("LOCAL_RANK"), flush=True)


if __name__ == "__main__":
    main()
"""
MINE = """
hydra:
  searchpath: [pkg://lightning_chimera.conf, pkg://lightning_chimera.recipes]
  mode: {mode}
  sweeper:
    params:
      trainer.max_steps: 1,2
defaults: [gpt2_tiny, _self_]
model:
  _target_: app.Raises
"""


def own_project(folder: Path, mode: str) -> tuple[str, str]:
    """Writes an application with a sweep in its config; its step raises on all ranks if max_steps is 1."""
    (folder / "conf").mkdir()
    (folder / "app.py").write_text(APP)
    (folder / "conf" / "mine.yaml").write_text(MINE.format(mode=mode))
    return sys.executable, str(folder / "app.py")


@pytest.mark.contract("Launch", "a Hydra application whose step fails: its traceback, and where in the run, once")
def test_an_error_in_the_first_step_is_shown_once_with_its_traceback_and_place(tmp_path: Path) -> None:
    options = [*QUICK, "trainer.max_steps=1"]
    done = command_line(tmp_path, *options, program=own_project(tmp_path, "RUN"))
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the fault") == 1, done.stderr
    assert done.stderr.count("Traceback (most recent call last)") == 1, done.stderr
    assert 'raise ValueError("the fault")' in done.stderr
    assert re.search(r"^chimera: rank [01] of 2 failed at: step 0, train in training_step, stage", done.stderr, re.M)


@pytest.mark.parametrize("validates", [True, False])
def test_an_error_of_a_callback_at_the_start_of_training_is_no_mistake_in_the_config(compose_run, validates) -> None:
    options = [*QUICK, *SINGLE, *([] if validates else ["trainer.limit_val_batches=0"])]
    with pytest.raises(ValueError, match="the fault"):
        run(compose_run("gpt2_tiny", *options, f"+callbacks.fails._target_={__name__}.Fails"))


class Fails(Callback):
    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        raise ValueError("the fault")


@pytest.mark.contract("Launch", "a Hydra sweep that the config declares; a job that fails, and the next one trains")
def test_a_sweep_of_the_config_goes_on_behind_a_job_that_fails(tmp_path: Path) -> None:
    options = [one for one in QUICK if not one.startswith("trainer.max_steps")]
    program, folder = own_project(tmp_path, "MULTIRUN"), "hydra.sweep.dir={}/sweep"
    done = command_line(tmp_path, *options, program=program, folder=folder)
    assert done.returncode == 1
    assert done.stderr.count("ValueError: the fault") == 1, done.stderr
    assert len(logged(tmp_path / "sweep" / "1", "train/loss")) == 2, done.stderr
    assert done.stdout.count("global rank") == 2, "a plan for each"
    lines = done.stdout.splitlines()
    assert lines.count("MULTIRUN False None") == 2, "each job is left as it was found"
    assert "RUN True 1" in lines, "the other rank runs one job"
    assert "MULTIRUN True 1" not in lines, "and no sweep of its own"


SWEEP = ["optimizer.lr=0.0,0.01", "scheduler.num_warmup_steps=0"]


@pytest.mark.contract("Launch", "a Hydra sweep whose jobs run one after the other, each with processes of its own")
@pytest.mark.long
def test_the_jobs_of_a_sweep_each_train_as_a_pipeline(tmp_path: Path) -> None:
    done = command_line(
        tmp_path, "-m", "--config-name", "gpt2_tiny", *QUICK, *SWEEP, f"hydra.sweep.dir={tmp_path}/sweep"
    )
    assert done.returncode == 0, done.stderr
    still, moved = (logged(tmp_path / "sweep" / job, "val/loss") for job in ("0", "1"))
    assert still[0] == still[1]
    assert moved[0] != moved[1]
    assert done.stdout.count("global rank") >= 2  # a plan for each


@pytest.mark.contract(
    "Launch", "the jobs of a sweep train as runs of their own, by `popen` and `spawn`, with `hydra.job.chdir`"
)
@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["popen", "spawn"])
def test_a_job_of_a_sweep_trains_as_a_run_of_its_own(compose_run, tmp_path: Path, method: str) -> None:
    own = [*QUICK, "data.num_workers=0", *NO_DROPOUT["gpt2_tiny"], "scheduler.num_warmup_steps=0"]
    started = [f"+trainer.strategy.start_method={method}", "hydra.job.chdir=true", f"hydra.sweep.dir={tmp_path}/sweep"]
    rates = "optimizer.lr=0.01,0.02"
    done = command_line(tmp_path, "-m", "--config-name", "gpt2_tiny", *own, *started, rates, limit=300.0)
    assert done.returncode == 0, done.stderr
    for job, rate in (("0", "0.01"), ("1", "0.02")):
        alone = [f"optimizer.lr={rate}", f"hydra.runtime.output_dir={tmp_path}/{job}"]
        run(compose_run("gpt2_tiny", *own, *SINGLE, *alone))
        expected = pytest.approx(logged(tmp_path / job, "val/loss"), rel=1e-5)
        assert logged(tmp_path / "sweep" / job, "val/loss") == expected
        assert list((tmp_path / "sweep" / job / "checkpoints").glob("*.ckpt"))
