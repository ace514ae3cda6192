"""How a run ends when one rank fails, is killed or stops: all ranks end, and the screen says who, where and why."""

import multiprocessing
import os
import random
import re
import resource
import select
import signal
import time
from collections.abc import Iterator
from itertools import product
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback

from lightning_chimera.children import PARENT, look_after_parent
from lightning_chimera.runtime.watch import stop_watching

from .faults import FAULTS, LOCK, PLACES, SAYS_OF_ROW, STEP, checkpoints, suffer, train_until
from .fidelity import Cell, make_trainer
from .launches import PYTHON, TORCHRUN, launch
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

RANKS = 3
STALL_TIMEOUT = 5.0
BOUND = 10.0
"""Seconds in which all ranks end after a rank has failed, or was found to have stalled."""
SLACK = 10.0
"""What a busy machine may take longer."""

SAMPLE = [
    (1, "exception", "forward"),
    (0, "exception", "backward"),
    (2, "exception", "validation"),
    (2, "SIGKILL", "all-reduce"),
    (1, "SIGKILL", "checkpoint save"),
    (0, "SIGKILL", "forward"),
    (1, "SIGSTOP", "backward"),
    (0, "SIGSTOP", "all-reduce"),
    (2, "held lock", "forward"),
    (0, "held lock", "validation"),
    (2, "SIGINT", "forward"),
    (0, "out of memory", "checkpoint save"),
]
STALLS = ("SIGSTOP", "held lock")
STAGE = r"stage \d( of pipe \d)?, microbatch \d"
NUMBER = r"\d(\.\d)?"
WHERE = {
    "forward": rf"step 2, train in training_step, {STAGE}, forward \(action \dF{NUMBER}\)",
    "backward": rf"step 2, train in training_step, {STAGE}, backward \(action \dB{NUMBER}\)",
    "all-reduce": "step 2, train in backward, all-reduce of gradients",
    "validation": rf"step 2, validate in validation_step, {STAGE}, forward \(action \dF{NUMBER}\)",
    "checkpoint save": "step 2, train in on_save_checkpoint",
}
SAYS = {
    "exception": "ArithmeticError: the fault",
    "sys.exit": "SystemExit: 0",
    "out of memory": "OutOfMemoryError: CUDA out of memory",
}
"""The errors of the rank itself."""


@pytest.fixture(scope="module")
def table() -> Iterator[list[str]]:
    """Lines that are printed in the end."""
    lines: list[str] = []
    yield lines
    print("\n" + "\n".join(lines))  # noqa: T201


def accused(text: str) -> set[int]:
    """The ranks that are said to be the ones that others miss."""
    return set(map(int, re.findall(r"chimera: rank (\d) of \d has (?:vanished|stalled|left)", text)))


def judge(world: World, folder: Path, rank: int, fault: str, place: str) -> str:
    """Has a rank meet a fault, checks how the run ends, and gives a line of the table."""
    stall = STALL_TIMEOUT if fault in STALLS else 120.0
    with pytest.raises(RankFailed) as caught:
        world.run(suffer, rank, fault, place, str(folder), RANKS, stall, size=RANKS, limit=90.0, grace=BOUND + SLACK)
    failure = caught.value
    seconds = time.monotonic() - float((folder / "when").read_text())
    assert seconds < BOUND + SLACK + (STALL_TIMEOUT if fault in STALLS else 0.0), failure
    is_killed = fault == "SIGKILL" or fault in STALLS
    expected = [-9 if is_killed and other == rank else 1 for other in range(RANKS)]  # else the harness had to end one
    assert failure.exit_codes == expected, failure
    assert failure.stopped == [], failure
    text = "".join(failure.outputs) + str(failure)
    if fault in SAYS:
        assert re.search(rf"rank {rank} of {RANKS} failed at: {WHERE[place]}", text), text
        assert SAYS[fault] in text
    elif is_killed:
        what = "vanished" if fault == "SIGKILL" else "stalled"
        assert re.search(rf"chimera: rank {rank} of {RANKS} has {what}", text), text
        assert re.search(r"Rank \d (waits for it|was) at: step [23], .", text), text
        assert accused(text) == {rank}, text
    # A rank that could save went on without this one; every file that is there is whole.
    steps = checkpoints(folder)
    # SIGINT and SIGTERM end all ranks alike after a batch, of which nothing is to be told.
    assert steps[:STEP] in ([1, 2], [1] if place == "checkpoint save" else [1, 2]), steps
    return f"{fault:14} rank {rank}  {place:16} {seconds:5.1f} s  checkpoints of steps {steps}"


@pytest.mark.contract(
    "Faults",
    "a rank that raises, runs out of memory, is killed or stopped, anywhere in a run: all ranks end in bounded time,"
    " and the screen says which rank, at which step, stage, microbatch and action",
    reported="Lightning#2913, Lightning#2590, Lightning#19377, Lightning#20832",
)
@pytest.mark.parametrize(("rank", "fault", "place"), SAMPLE, ids=lambda value: str(value).replace(" ", "-"))
def test_a_fault_on_one_rank_ends_all_of_them(world: World, tmp_path: Path, rank: int, fault: str, place: str) -> None:
    judge(world, tmp_path, rank, fault, place)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize(("fault", "rank", "place"), list(product(FAULTS, range(RANKS), PLACES)))
def test_every_fault_on_every_rank_in_every_place_ends_all_ranks(
    world: World, tmp_path: Path, table: list[str], rank: int, fault: str, place: str
) -> None:
    table.append(judge(world, tmp_path, rank, fault, place))


def test_a_rank_that_leaves_by_itself_is_named_though_python_prints_nothing(world: World, tmp_path: Path) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(suffer, 1, "sys.exit", "forward", str(tmp_path), 2, 120.0, size=2, limit=90.0, grace=BOUND + SLACK)
    said = re.findall(rf"chimera: rank 1 of 2 failed at: {WHERE['forward']} \(SystemExit: 0\)", caught.value.outputs[1])
    assert len(said) == 1, caught.value


class RunsOutOfFiles(Callback):
    """Rank 1 can open no file for a while."""

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_rank == 1 and batch_idx == 1:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            free = os.open(os.devnull, os.O_RDONLY)
            os.close(free)
            resource.setrlimit(resource.RLIMIT_NOFILE, (free, hard))
            time.sleep(6.0)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def train_with_few_files() -> int:
    cell = Cell("1f1b", strategy=(("stall_timeout", 2.0),))
    trainer = make_trainer(cell, max_epochs=1, callbacks=[RunsOutOfFiles()])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    return trainer.global_step


def test_a_rank_that_can_open_no_file_for_a_while_goes_on_and_is_not_accused(world: World) -> None:
    assert world.run(train_with_few_files, size=2, limit=60.0) == [4, 4]


def go_on_alone() -> None:
    """Trains; then rank 1 comes to its end, and rank 0 validates."""
    trainer, module = make_trainer(Cell("1f1b"), max_epochs=1), LanguageModule("gpt2")
    loader = make_loader(make_rows("gpt2", 2 * ROWS), ROWS)
    trainer.fit(module, loader)
    if trainer.global_rank == 1:
        stop_watching()
        dist.destroy_process_group()
        time.sleep(20.0)  # as a rank does that waits for its children
    trainer.validate(module, loader)


@pytest.mark.long
def test_a_rank_that_has_come_to_its_end_is_named_by_one_that_goes_on(world: World) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(go_on_alone, size=2, limit=90.0, grace=30.0)
    assert "chimera: rank 1 of 2 has left before this call of the Trainer" in caught.value.outputs[0], caught.value


CHAOS = 200
"""Random faults in `make long`."""
STALLS_AFTER, WAITS_FOR = 3.0, 8.0
"""Their `stall_timeout`, and the `timeout` that bounds how long ranks wait for each other before they are watched."""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", range(CHAOS))
def test_a_kill_or_a_stop_at_any_time_hangs_nobody_and_loses_no_checkpoint(
    world: World, tmp_path: Path, table: list[str], number: int
) -> None:
    """From the set-up on, in steps, validations and saves."""
    draw = random.Random(number)
    rank, fault, seconds = draw.randrange(RANKS), draw.choice(["SIGKILL", "SIGSTOP"]), draw.uniform(0.2, 4.0)
    bound = WAITS_FOR + BOUND + SLACK
    arguments = (rank, fault, seconds, str(tmp_path), RANKS, STALLS_AFTER, WAITS_FOR)
    with pytest.raises(RankFailed) as caught:
        world.run(train_until, *arguments, size=RANKS, limit=120.0, grace=bound)
    took = time.monotonic() - float((tmp_path / "when").read_text())
    assert took < bound, caught.value
    codes = caught.value.exit_codes
    assert codes.pop(rank) == -signal.SIGKILL, caught.value
    assert codes == [1] * (RANKS - 1), caught.value  # else they had to be ended from outside
    steps = checkpoints(tmp_path)
    assert steps == list(range(1, len(steps) + 1)), steps
    text = "".join(caught.value.outputs)
    names = rf"chimera: rank {rank} of {RANKS} has (vanished|stalled)"
    said = re.findall(names, text)
    assert said or not steps, text
    told = said[0] if said else "was not watched yet"
    table.append(
        f"{number:3} {fault} rank {rank} after {seconds:.1f} s: {told}, {took:4.1f} s, {len(steps)} checkpoints"
    )


# ------------------------------------------------------------------------------------------------------------ real runs

PREFIXES = {"popen": PYTHON, "torchrun": TORCHRUN, "spawn": PYTHON}
ORPHANED = ("setup", "on_train_batch_end", "after")
"""When the process is killed that has started the ranks: a hook, or after the run."""
REAL = [
    ("popen", 1, "exception"),
    ("popen", 0, "SIGKILL"),
    *(
        pytest.param(method, rank, fault, marks=pytest.mark.long)
        for method, fault, rank in product(PREFIXES, [*FAULTS, *LOCK], (0, 1))
        if (method, rank, fault) not in (("popen", 1, "exception"), ("popen", 0, "SIGKILL"))
    ),
]


def orphaned_memory() -> list[str]:
    """Files of torch in shared memory whose process has ended."""
    names = [path.name for path in Path("/dev/shm").glob("torch_*")]
    return [name for name in names if not Path("/proc", name.split("_")[1]).exists()]


@pytest.mark.contract(
    "Faults", "no process, port or shared memory is left, whichever rank fails or is killed", reported="Lightning#9303"
)
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "rank", "fault"), REAL)
def test_a_fault_in_a_real_run_is_on_the_screen_once_and_leaves_nothing(
    tmp_path: Path, method: str, rank: int, fault: str
) -> None:
    options = {"start_method": "spawn"} if method == "spawn" else {}
    victim = (rank, fault, "forward")
    ended = launch(  # which checks that no process is left
        tmp_path, *PREFIXES[method], folder=str(tmp_path), victim=victim, stall_timeout=STALL_TIMEOUT, **options
    )
    assert ended.code not in (0, None), ended.screen
    stall = STALL_TIMEOUT if fault in STALLS else 0.0
    assert ended.at - float((tmp_path / "when").read_text()) < stall + BOUND + SLACK, ended.screen
    said = rf"chimera: rank {rank} of 2 has {'vanished' if fault == 'SIGKILL' else 'stalled'}"
    if fault in SAYS:
        said = rf"chimera: rank {rank} of 2 failed at: {WHERE['forward']}"
    if fault in ("SIGINT", "SIGTERM"):
        assert method != "popen" or ended.code == 128 + signal.Signals[fault], ended.screen
        assert method == "spawn" or ended.screen.count(f"{fault} ends the run after step 3.") == 1, ended.screen
    else:
        assert len(re.findall(said, ended.screen)) == 1, ended.screen
        assert accused(ended.screen) <= {rank}, ended.screen
    if fault in ("exception", "out of memory"):
        assert ended.screen.count(SAYS[fault]) == 1, ended.screen
    assert checkpoints(tmp_path)[:2] == [1, 2]
    assert orphaned_memory() == []


def outlive_the_parent(how: str) -> float:
    """Returns how long a rank has lived after the process that has started it was killed; bounded."""
    told, tell = os.pipe()
    starter = os.fork()
    if not starter:
        start_a_rank(how, tell)
    os.close(tell)
    assert os.read(told, 1) == b"r"
    os.kill(starter, signal.SIGKILL)
    killed = time.monotonic()
    os.waitpid(starter, 0)
    select.select([told], [], [], 20.0)  # which can be read from as soon as the rank has ended
    return time.monotonic() - killed


def start_a_rank(how: str, tell: int) -> None:
    """The life of the process that is killed."""
    if how in ("spawn", "forkserver"):
        context: Any = multiprocessing.get_context("fork" if how == "spawn" else how)
        context.Process(target=be_a_rank, args=(how, Connection(os.dup(tell), readable=False))).start()
    else:
        os.environ.update({PARENT: str(os.getpid())} if how == "popen" else {"TORCHELASTIC_RUN_ID": "none"})
        if not os.fork():
            be_a_rank(how, Connection(os.dup(tell), readable=False))
    os.close(tell)
    time.sleep(60.0)


def be_a_rank(how: str, tell: Connection) -> None:
    look_after_parent(multiprocessing.parent_process(), is_near=how != "forkserver")
    os.write(tell.fileno(), b"r")
    time.sleep(60.0)
    os._exit(0)


@pytest.mark.parametrize("how", [*PREFIXES, "forkserver"])
def test_a_rank_ends_soon_after_the_process_that_has_started_it_is_killed(world: World, how: str) -> None:
    (seconds,) = world.run(outlive_the_parent, how, size=1)
    assert seconds < 5.0


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("method", "when"), [pair for pair in product(PREFIXES, ORPHANED) if pair != ("spawn", "after")]
)
def test_no_rank_is_left_where_torchrun_or_the_process_that_has_spawned_it_is_killed(
    tmp_path: Path, method: str, when: str
) -> None:
    options = {"start_method": "spawn"} if method == "spawn" else {}
    # The hook goes on for a minute, so that the run can't end after a step.
    ended = launch(tmp_path, *PREFIXES[method], patience=BOUND + SLACK, orphaned=when, **options)
    assert ended.code == -signal.SIGKILL, ended.screen
    assert ended.screen.count("that has started the ranks has ended") == (method != "popen"), ended.screen
    assert orphaned_memory() == []


@pytest.mark.long
@pytest.mark.timeout(240)
@pytest.mark.parametrize(("method", "fault"), list(product(PREFIXES, SAYS_OF_ROW)))
def test_a_worker_of_the_loader_that_dies_or_raises_ends_all_ranks(tmp_path: Path, method: str, fault: str) -> None:
    options = {"start_method": "spawn"} if method == "spawn" else {}
    ended = launch(tmp_path, *PREFIXES[method], folder=str(tmp_path), broken=fault, **options)
    assert ended.code not in (0, None), ended.screen
    assert ended.screen.count(SAYS_OF_ROW[fault]) == 1, ended.screen
    assert len(re.findall(r"chimera: rank 0 of 2 failed at: step \d", ended.screen)) == 1, ended.screen
    steps = checkpoints(tmp_path)
    assert steps == list(range(1, len(steps) + 1)), steps
    assert orphaned_memory() == []
