"""Real runs, started as people start them; how they end when something is wrong."""

import os
import re
import subprocess
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_chimera.children import Children

from . import script
from .faults import Victim
from .fidelity import Cell, make_trainer
from .launches import PYTHON, TORCHRUN, forget_rank, launch
from .test_checkpoints import PLAIN
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

pytestmark = pytest.mark.timeout(240)

PREFIXES = {"popen": PYTHON, "torchrun": TORCHRUN, "spawn": PYTHON}


def train_plainly() -> tuple[float, dict[str, Tensor]]:
    """What the script does, by one process."""
    torch.manual_seed(0)
    module = LanguageModule(exact=False)
    trainer = make_trainer(PLAIN, max_epochs=1)
    trainer.fit(module, make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return float(trainer.callback_metrics["train_loss"]), dict(module.state_dict())


@pytest.mark.contract("Launch", "popen, spawn and torchrun")
@pytest.mark.parametrize("method", ["popen", "torchrun", "spawn"])
def test_a_script_trains_however_it_is_started(world: World, tmp_path: Path, method: str) -> None:
    options = {"start_method": "spawn"} if method == "spawn" else {}
    ended = launch(tmp_path, *PREFIXES[method], folder=str(tmp_path), devices=2, **options)
    assert ended.code == 0, ended.screen
    assert ended.screen.count("chimera: 2 stages, 2 pipes, 2 microbatches") == 1  # the plan is printed once
    ((loss, state),) = world.run(train_plainly, size=1)
    found = [torch.load(path) for path in tmp_path.glob("*.pt")]
    # The parent of spawned processes gets the trained weights; else each process has them.
    assert sorted(told["rank"] for told in found) == ([0] if method == "spawn" else [0, 1])
    assert len({told["pid"] for told in found}) == len(found)
    for told in found:
        assert told["loss"] == pytest.approx(loss, rel=1e-4)
        torch.testing.assert_close(told["state"], state, rtol=1e-4, atol=1e-4)


@pytest.mark.contract("Launch", "an error on one rank ends all of them soon, with that error on the screen")
@pytest.mark.parametrize(
    ("module", "strategy"),
    [("RaisesAfterTheModel", "chimera_1f1b"), ("RaisesBeforeTheModel", "chimera")],
)
def test_an_error_on_one_rank_ends_all_and_is_on_the_screen(tmp_path: Path, module: str, strategy: str) -> None:
    ended = launch(tmp_path, module=module, strategy=strategy, devices=2, limit=60.0)
    assert ended.code not in (0, None), ended.screen
    where = "after" if module == "RaisesAfterTheModel" else "before"
    raised = re.search(rf"ValueError: raised {where} the model at ([\d.]+) s", ended.screen)
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


def start_alone(options: dict[str, Any]) -> None:
    """Runs the script in this process, as if nobody had launched it."""
    for name in ("LOCAL_RANK", "NODE_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        del os.environ[name]

    def start(*_: Any, **__: Any) -> None:
        raise AssertionError("a process was started")

    subprocess.Popen = BaseProcess.start = start
    script.run(**options)


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
