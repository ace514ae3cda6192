"""Real runs, started as people start them; how they end when something is wrong."""

import os
import re
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.trainer.connectors import accelerator_connector
from torch import Tensor

from lightning_chimera import children, commands, rendezvous
from lightning_chimera.children import Children

from . import script
from .faults import Victim
from .fidelity import Cell, make_trainer
from .launches import PYTHON, TORCHRUN, Ended, forget_rank, launch
from .test_checkpoints import PLAIN
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

pytestmark = pytest.mark.timeout(240)

PREFIXES = {"popen": PYTHON, "torchrun": TORCHRUN, "spawn": PYTHON, "forkserver": PYTHON}


def train_plainly() -> tuple[float, dict[str, Tensor]]:
    """What the script does, by one process."""
    torch.manual_seed(0)
    module = LanguageModule(exact=False)
    trainer = make_trainer(PLAIN, max_epochs=1)
    trainer.fit(module, make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return float(trainer.callback_metrics["train_loss"]), dict(module.state_dict())


@pytest.mark.contract("Launch", "popen, spawn, forkserver and torchrun")
@pytest.mark.parametrize(
    "method", [pytest.param(name, marks=pytest.mark.long if name == "forkserver" else ()) for name in PREFIXES]
)
def test_a_script_trains_however_it_is_started(world: World, tmp_path: Path, method: str) -> None:
    is_sent = method in ("spawn", "forkserver")
    options = {"start_method": method} if is_sent else {}
    ended = launch(tmp_path, *PREFIXES[method], folder=str(tmp_path), devices=2, **options)
    assert ended.code == 0, ended.screen
    assert ended.screen.count("chimera: 2 stages, 2 pipes, 2 microbatches") == 1  # the plan is printed once
    ((loss, state),) = world.run(train_plainly, size=1)
    found = [torch.load(path) for path in tmp_path.glob("*.pt")]
    # The parent of spawned processes gets the trained weights; else each process has them.
    assert sorted(told["rank"] for told in found) == ([0] if is_sent else [0, 1])
    assert len({told["pid"] for told in found}) == len(found)
    for told in found:
        assert told["loss"] == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(told["state"], state, rtol=1e-4, atol=1e-4)


@pytest.mark.contract("Launch", "an error on one rank ends all of them soon, with that error on the screen")
@pytest.mark.parametrize(
    ("module", "strategy"),
    [
        ("RaisesAfterTheModel", "chimera_1f1b"),
        ("RaisesBeforeTheModel", "chimera"),
        pytest.param("RaisesBeforeTheRanksMeet", "chimera", marks=pytest.mark.long),
    ],
)
def test_an_error_on_one_rank_ends_all_and_is_on_the_screen(tmp_path: Path, module: str, strategy: str) -> None:
    ended = launch(tmp_path, module=module, strategy=strategy, devices=2, limit=60.0)
    assert ended.code not in (0, None), ended.screen
    where = {"RaisesAfterTheModel": "after the model", "RaisesBeforeTheModel": "before the model"}
    said = where.get(module, "before the ranks meet")
    raised = re.search(rf"ValueError: raised {said} at ([\d.]+) s", ended.screen)
    assert raised is not None, ended.screen
    assert ended.at - float(raised[1]) < 20.0


def end_with_a_child(code: int) -> None:
    command = [
        sys.executable,
        "-S",
        "-c",
        f"import os; os._exit({code})" if code > 0 else "import os; os.kill(os.getpid(), 9)",
    ]
    Children(patience=20.0).start([(command, os.environ, None)])


@pytest.mark.parametrize(("code", "expected"), [(143, 143), (1, 1), (-9, 1)])
def test_a_script_ends_with_the_exit_code_of_a_rank_that_it_has_started(world: World, code: int, expected: int) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(end_with_a_child, code, size=1)
    assert caught.value.exit_codes == [expected]


def fail_in_a_notebook(fault: str, folder: str) -> None:
    forget_rank()
    torch.manual_seed(0)
    trainer = make_trainer(Cell("1f1b", 2, strategy=(("start_method", "fork"),)), max_epochs=1)
    trainer.fit(Victim(1, fault, "forward", folder), make_loader(make_rows("gpt2", 4 * ROWS, padded=False), ROWS))


@pytest.mark.parametrize("fault", ["exception", "sys.exit"])
def test_the_rank_that_fails_is_named_by_a_process_that_has_forked_it(world: World, tmp_path: Path, fault: str) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(fail_in_a_notebook, fault, str(tmp_path), size=1, limit=90.0)
    text = "".join(caught.value.outputs) + (str(caught.value) if fault == "exception" else "")
    assert "chimera: rank 1 of 2 failed at: step 2, train in training_step, stage " in text, text
    assert {"exception": "ArithmeticError: the fault", "sys.exit": "(SystemExit: 0)"}[fault] in text, text
    assert "the sender has gone" not in text, text


class Leaves(Callback):
    """Has every rank leave in the same way at the same place.

    Args:
        how: ``sys.exit``, or ``SIGINT`` as from somebody who knows the ranks.
        hook: The place.
    """

    def __init__(self, how: str, hook: str) -> None:
        self._how = how
        setattr(self, hook, self._leave)

    def _leave(self, *_: Any, **__: Any) -> None:
        if self._how == "sys.exit":
            sys.exit(0)
        os.kill(os.getpid(), signal.SIGINT)


def leave_a_notebook(how: str, hook: str) -> None:
    forget_rank()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cell = Cell("1f1b", 2, strategy=(("start_method", "fork"),))
    trainer = make_trainer(cell, max_epochs=1, callbacks=[Leaves(how, hook)])
    trainer.fit(LanguageModule(), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))


@pytest.mark.parametrize(
    ("how", "hook"), [("sys.exit", "on_train_batch_end"), pytest.param("SIGINT", "setup", marks=pytest.mark.long)]
)
def test_a_process_whose_forked_ranks_all_leave_does_not_wait_for_a_result(world: World, how: str, hook: str) -> None:
    with pytest.raises(RankFailed, match=r"process [01] terminated with exit code 1"):
        world.run(leave_a_notebook, how, hook, size=1, limit=40.0)


BAD = {
    "a misspelt schedule": (
        {"schedule": "chimaera"},
        r"no schedule 'chimaera'\. Known schedules: chimera, gpipe, 1f1b, .*\. Did you mean 'chimera'\?",
    ),
    "an odd number of stages": (
        {"devices": 3},
        r"even number of stages.*got 3\. Use 2 or 4 stages, or the schedule gpipe or 1f1b",
    ),
    "too few blocks": (
        {"devices": 4, "blocks": 2},
        r"2 blocks can't be cut into 4 stages.*at least one block.*Use at most 2 stages",
    ),
    "a group that does not fit": (
        {"devices": 3, "num_stages": 2},
        r"num_stages=2 does not divide the 3 processes.*multiple of 2 processes, or a num_stages that divides 3",
    ),
    "bad cuts": (
        {"cuts": [3, 1], "num_stages": 3, "devices": 3, "schedule": "1f1b"},
        r"cuts=\[3, 1\] do not cut 4 blocks into 3 stages.*2 ascending numbers between 1 and 3",
    ),
    "an unknown model": (
        {"module": "Unknown"},
        r"Unknown holds no HuggingFace model.*exactly one of: .*BertModel.*GPT2Model",
    ),
    "optimization by hand": (
        {"module": "Manual"},
        r"Manual sets automatic_optimization=False.*return the loss from training_step and remove manual_backward",
    ),
    "no microbatches": ({"num_microbatches": 0}, r"num_microbatches=0: it must be a whole number of at least 1"),
    "no patience": ({"timeout": 0}, r"timeout=0: it must be a positive number of seconds"),
    "a patience of words": ({"timeout": "5"}, r"timeout='5': it must be a positive number of seconds"),
    "endless patience": ({"timeout": float("inf")}, r"timeout=inf: it must be a positive number of seconds"),
    "half a block": ({"cuts": [1.5]}, r"cuts=\[1\.5\]: give a list of whole numbers"),
    "cuts of words": ({"cuts": ["a"]}, r"cuts=\['a'\]: give a list of whole numbers"),
    "one cut alone": ({"cuts": 2}, r"cuts=2: give a list of whole numbers"),
    "a misspelt backend": (
        {"process_group_backend": "glo"},
        r"process_group_backend='glo' is not available here\. This build of torch has: .*gloo",
    ),
    "a schedule for more ranks": (
        {"schedule": "for more ranks"},
        r"The schedule 'gpipe' is for 3 ranks, but this run needs one for 2\. Give num_stages",
    ),
    "a schedule for more microbatches": (
        {"schedule": "for more microbatches"},
        r"The schedule 'gpipe' is for 5 microbatches, but this run needs one for 4",
    ),
    "a builder of nothing": ({"schedule": "nothing"}, r"builder returned NoneType; it must return a Schedule"),
    "a value for 4 ranks": (
        {"schedule": "a value for 4 ranks"},
        r"The schedule 'gpipe' is for 4 ranks, and this run has 2 processes.*Use a multiple of 4",
    ),
    "a schedule without backward": (
        {"schedule": "a value without backward"},
        r"The schedule 'forward_only' has no backward, so nothing would be trained",
    ),
    "an unknown neighbour": (
        {"innermost": "stage"},
        r"innermost='stage': it must be one of stages, replicas",
    ),
    "an unknown start": ({"start_method": "thread"}, r"start_method='thread': it must be one of popen, spawn, fork"),
}


def start_alone(options: dict[str, Any], variables: dict[str, str] | None = None) -> None:
    """Runs the script in this process, as if nobody had launched it."""
    forget_rank()
    os.environ.update(variables or {})
    rendezvous._PATIENCE = 0.0
    start_nothing()
    script.run(**options)


def start_nothing() -> None:
    """Has this process fail where it would start another one."""

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    subprocess.Popen = BaseProcess.start = start


@pytest.mark.contract(
    "Launch", "sizes, cuts, schedules and modules that do not fit, before any process is started", "refused"
)
@pytest.mark.contract("Loop", "manual optimization", "refused", "Lightning#7957, Lightning#4485")
@pytest.mark.parametrize("method", ["popen", "spawn"])
@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_bad_input_is_refused_before_a_process_is_started(
    world: World, options: dict[str, Any], message: str, method: str
) -> None:
    with pytest.raises(RankFailed, match=f"(?s){message}") as info:
        world.run(start_alone, {"start_method": method, **options}, size=1)
    assert info.value.error.startswith(("ValueError", "lightning.fabric.utilities.exceptions.Misconfig")), info.value


def test_good_input_would_start_a_process(world: World) -> None:
    for method in ("popen", "spawn"):
        with pytest.raises(RankFailed, match="a process was started"):
            world.run(start_alone, {"start_method": method}, size=1)


SLURM_SHELL = {
    "SLURM_JOB_ID": "7",
    "SLURM_JOB_NAME": "interactive",
    "SLURM_NTASKS": "4",
    "SLURM_NTASKS_PER_NODE": "4",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_PROCID": "0",
    "SLURM_LOCALID": "0",
}


def test_a_shell_of_a_slurm_job_would_start_processes(world: World) -> None:
    with pytest.raises(RankFailed, match="a process was started"):
        world.run(start_alone, {}, SLURM_SHELL, size=1)
    with pytest.raises(RankFailed, match="This process is alone, and the Slurm job 7 is for 4 tasks"):
        world.run(start_alone, {"devices": 4}, {**SLURM_SHELL, "SLURM_JOB_NAME": "train"}, size=1)


NOWHERE = {
    "a machine without a number": ({"num_nodes": 2}, {}, "num_nodes=2, without NODE_RANK and MASTER_PORT"),
    "an unknown address": (
        {},
        {"MASTER_ADDR": "nowhere.invalid"},
        "='nowhere.invalid': .* knows no machine of that",
    ),
}


@pytest.mark.contract(
    "Launch", "machines that don't know where to meet, before any process is started and before they wait", "refused"
)
@pytest.mark.parametrize("method", ["popen", "spawn"])
@pytest.mark.parametrize(("options", "variables", "message"), NOWHERE.values(), ids=NOWHERE)
def test_ranks_that_cannot_meet_are_not_started(
    world: World, options: dict[str, Any], variables: dict[str, str], message: str, method: str
) -> None:
    with pytest.raises(RankFailed, match=message) as info:
        world.run(start_alone, {"start_method": method, **options}, variables, size=1)
    assert info.value.error.startswith("ValueError")


def start_from_a_pipe() -> None:
    main: Any = sys.modules["__main__"]
    main.__spec__, main.__file__ = None, "<stdin>"
    start_alone({})


@pytest.mark.contract("Launch", "`popen` in `python -c`, a pipe or a notebook, where there is no script", "refused")
def test_a_program_from_a_pipe_is_refused_before_a_process_is_started(world: World) -> None:
    with pytest.raises(RankFailed, match=r"there is no file of it.*start_method='fork'"):
        world.run(start_from_a_pipe, size=1)


def be_a_notebook() -> None:
    forget_rank()
    commands._IS_INTERACTIVE = accelerator_connector._IS_INTERACTIVE = True


def start_in_a_notebook() -> None:
    be_a_notebook()
    start_alone({})


def train_in_a_notebook() -> float:
    be_a_notebook()
    torch.manual_seed(0)
    trainer = make_trainer(Cell("chimera", 2, strategy=(("start_method", "fork"),)), max_epochs=1)
    trainer.fit(LanguageModule(exact=False), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.contract("Launch", '`start_method="fork"` in notebooks and interactive sessions')
def test_a_notebook_forks_or_is_told_to(world: World) -> None:
    with pytest.raises(RankFailed, match=r"start_method='fork'\), devices=2\)"):
        world.run(start_in_a_notebook, size=1)
    ((loss, _),) = world.run(train_plainly, size=1)
    assert world.run(train_in_a_notebook, size=1) == [pytest.approx(loss, rel=1e-4)]


def fit_what_cannot_be_sent(what: str, method: str) -> None:
    forget_rank()

    class Local(LanguageModule):
        pass

    module = Local(exact=False) if what == "class" else LanguageModule(exact=False)
    if what == "lambda":
        module.double = lambda x: 2 * x
    trainer = make_trainer(Cell("1f1b", 2, strategy=(("start_method", method),)), max_epochs=1)
    trainer.fit(module, make_loader(make_rows("gpt2", 4 * ROWS), ROWS))


@pytest.mark.contract(
    "Launch",
    '`start_method="spawn"` with a lambda or a class of a function, before any process is started',
    "refused",
    "Lightning#8130",
)
@pytest.mark.parametrize(
    ("what", "method", "name"), [("lambda", "spawn", "<lambda>"), ("class", "forkserver", "Local")]
)
def test_what_cannot_be_sent_to_another_process_is_named(world: World, what: str, method: str, name: str) -> None:
    where = rf"start_method='{method}' sends .* can't be sent: .*fit_what_cannot_be_sent.<locals>.{name}'\. .*'popen'"
    with pytest.raises(RankFailed, match=where):
        world.run(fit_what_cannot_be_sent, what, method, size=1, limit=30.0)


ELSEWHERE = """
import ctypes, importlib, os, pkgutil, signal, sys
import torch, lightning.pytorch, torchmetrics, matplotlib.pyplot, hydra, typer, rich.console
import transformers.models.gpt2.modeling_gpt2, transformers.models.bert.modeling_bert
import multiprocessing.popen_fork, multiprocessing.shared_memory

sys.platform = "darwin"
def library(name, *_):
    raise OSError(name)
ctypes.CDLL = library
del signal.SIGUSR1, os.memfd_create, os.sched_getaffinity, os.pidfd_open
import lightning_chimera
for module in pkgutil.walk_packages(lightning_chimera.__path__, "lightning_chimera."):
    if ".conf" not in module.name and ".recipes" not in module.name:
        importlib.import_module(module.name)
"""
"""Imports all of the package where much of Linux is missing."""


def train_elsewhere(ranks: int) -> float:
    """Trains as on a machine that does not run Linux."""
    forget_rank()
    start_nothing()
    sys.platform = "darwin"  # type: ignore[misc]
    children._LIBC = None
    torch.manual_seed(0)
    trainer = make_trainer(Cell("1f1b", ranks), max_epochs=1)
    trainer.fit(LanguageModule(exact=False), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return float(trainer.callback_metrics["train_loss"])


@pytest.mark.contract("Launch", "several processes on another system than Linux", "refused")
@pytest.mark.long
def test_elsewhere_than_on_linux_one_process_trains_and_several_are_refused(world: World) -> None:
    subprocess.run([sys.executable, "-c", ELSEWHERE], check=True, cwd=Path(__file__).parents[2], timeout=100.0)
    ((loss, _),) = world.run(train_plainly, size=1)
    assert world.run(train_elsewhere, 1, size=1) == [pytest.approx(loss, rel=1e-4)]
    with pytest.raises(RankFailed, match=r"A run of 2 processes needs Linux, .* and this is 'darwin'\."):
        world.run(train_elsewhere, 2, size=1)


def train_in_a_job(kind: str, method: str) -> tuple[int, int, float]:
    """Global rank, world size and loss of a rank that a job has started."""
    rank = os.environ["LOCAL_RANK"]
    if kind == "srun":
        for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE"):
            del os.environ[name]
        os.environ |= {"SLURM_PROCID": rank, "SLURM_LOCALID": rank}
    else:
        os.environ["RANK"] = rank
    start_nothing()
    torch.manual_seed(0)
    trainer = make_trainer(Cell("1f1b", 2, strategy=(("start_method", method),)), max_epochs=1)
    trainer.fit(LanguageModule(exact=False), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return trainer.global_rank, trainer.world_size, float(trainer.callback_metrics["train_loss"])


SLURM_TASK = {**SLURM_SHELL, "SLURM_JOB_NAME": "train", "SLURM_STEP_ID": "0"}
ONE_TASK = {"SLURM_NTASKS": "1", "SLURM_NTASKS_PER_NODE": "1", "SLURM_STEP_NUM_TASKS": "1"}
TWO_TASKS = {"SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_STEP_NUM_TASKS": "2"}
WORKER = {"TORCHELASTIC_RUN_ID": "7", "GROUP_RANK": "0", "LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "1"}


@pytest.mark.contract(
    "Launch",
    "torchrun in a task or in a shell of a Slurm job: the ranks are those of torchrun",
    reported="Lightning#18466, Lightning#13605, Lightning#11406",
)
@pytest.mark.contract("Launch", "`start_method` under torchrun, srun and LOCAL_RANK: they start the ranks, nobody else")
@pytest.mark.parametrize(
    ("kind", "variables", "method"),
    [
        ("srun", {**SLURM_TASK, **TWO_TASKS}, "fork"),
        ("torchrun", {**SLURM_TASK, **ONE_TASK, **WORKER}, "popen"),
        ("torchrun", {**SLURM_SHELL, **WORKER}, "spawn"),
        ("by hand", {}, "forkserver"),
    ],
    ids=["srun", "torchrun in a task", "torchrun in a shell", "LOCAL_RANK"],
)
def test_each_rank_of_a_job_is_there_once(world: World, kind: str, variables: dict[str, str], method: str) -> None:
    ranks = world.run(train_in_a_job, kind, method, size=2, env=variables)
    ((loss, _),) = world.run(train_plainly, size=1)
    assert ranks == [(rank, 2, pytest.approx(loss, rel=1e-4)) for rank in (0, 1)]


def fit_on_unequal_machines() -> None:
    os.environ["RANK"] = os.environ["LOCAL_RANK"]
    make_trainer(Cell("1f1b", 2), devices=3, num_nodes=2, max_epochs=1).fit(LanguageModule(), make_loader([]))


@pytest.mark.contract("Launch", "machines with unequal numbers of ranks", "refused", "Lightning#19898, Lightning#19961")
def test_machines_with_unequal_numbers_of_ranks_are_refused(world: World) -> None:
    variables = {**WORKER, "LOCAL_WORLD_SIZE": "3", "GROUP_WORLD_SIZE": "2", "WORLD_SIZE": "4"}
    with pytest.raises(RankFailed, match=r"devices=3.*num_nodes=2.* world size \(4\)"):
        world.run(fit_on_unequal_machines, size=1, env=variables)


@pytest.mark.long
def test_runs_that_start_at_the_same_moment_do_not_meet(world: World, tmp_path: Path) -> None:
    methods = ["popen", "popen", "spawn", "spawn"]

    def start(number: int) -> Ended:
        folder = tmp_path / str(number)
        folder.mkdir()
        return launch(folder, folder=str(folder), start_method=methods[number], schedule="1f1b", limit=200.0)

    with ThreadPoolExecutor() as pool:
        ended = list(pool.map(start, range(len(methods))))
    assert [one.code for one in ended] == [0] * len(methods), "\n".join(one.screen for one in ended)
    found = [[torch.load(path) for path in (tmp_path / str(number)).glob("*.pt")] for number in range(len(methods))]
    assert [len(told) for told in found] == [2, 2, 1, 1]
    assert len({told["port"] for told in (*found[0], *found[1])}) == 2
    ((loss, _),) = world.run(train_plainly, size=1)
    for told in (told for of_run in found for told in of_run):
        assert told["loss"] == pytest.approx(loss, rel=1e-4)


@pytest.mark.contract("Loop", "several optimizers", "refused")
@pytest.mark.long
def test_several_optimizers_end_a_run_with_what_to_do_instead(tmp_path: Path) -> None:
    ended = launch(tmp_path, module="TwoOptimizers", devices=2, limit=60.0)
    assert ended.code not in (0, None), ended.screen
    assert "A pipeline trains with one: give it several parameter groups instead" in ended.screen
    assert "automatic_optimization" not in ended.screen


@pytest.mark.long
@pytest.mark.parametrize("method", ["popen", "spawn"])
@pytest.mark.parametrize(("options", "message"), BAD.values(), ids=BAD)
def test_a_script_with_bad_input_ends_soon_with_the_message(
    tmp_path: Path, options: dict[str, Any], message: str, method: str
) -> None:
    ended = launch(tmp_path, limit=60.0, **{"start_method": method, **options})
    assert ended.code == 1, ended.screen
    assert ended.seconds < 30.0
    assert ended.screen.count("Traceback (most recent call last)") == 1
    assert re.search(message, ended.screen.strip().splitlines()[-1])
