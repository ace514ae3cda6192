"""Signals in the middle of steps: all ranks end alike after the same batch, and what they have saved loads."""

import ctypes
import multiprocessing
import os
import random
import signal
import threading
import time
import warnings
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset

from lightning_chimera import launch, workers
from lightning_chimera.signals import Interrupted

from .fidelity import Cell, make_trainer
from .launches import forget_rank
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World


class Sends(Callback):
    """Sends this process a signal in some hook of some batch, as if it came from outside."""

    def __init__(self, kind: signal.Signals, hook: str, batch: int) -> None:
        self._kind, self._batch = kind, batch
        setattr(self, hook, self._send)

    def _send(self, *arguments: Any, **_: Any) -> None:
        if self._batch in arguments:
            os.kill(os.getpid(), self._kind)


def handlers() -> list[Any]:
    return [signal.getsignal(kind) for kind in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)]


def train(
    folder: str, kind: signal.Signals, ranks: list[int], hook: str, accumulate: int, method: str, save: bool
) -> tuple[str, Any, int, bool]:
    """Returns how the run ended, with which exit code, after how many steps, and whether the handlers are back."""
    torch.manual_seed(0)
    before = handlers()
    module = LanguageModule("gpt2")
    trainer = make_trainer(
        Cell("1f1b", accumulate=accumulate, clip=False, strategy=(("save_on_signal", save),)),
        max_epochs=1,
        default_root_dir=folder,
        accumulate_grad_batches=accumulate,
        limit_val_batches=3,
    )
    if int(os.environ["LOCAL_RANK"]) in ranks:
        trainer.callbacks.append(Sends(kind, hook, 2))
    loader = make_loader(make_rows("gpt2", 8 * ROWS), ROWS)
    try:
        if method == "fit":
            trainer.fit(module, loader, make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
        else:
            getattr(trainer, method)(module, loader, verbose=False)
    except Interrupted as ended:
        return ended.kind.name, ended.code, trainer.global_step, handlers() == before
    return "finished", None, trainer.global_step, handlers() == before


SIGNALS = {"to one": [1], "to all": [0, 1]}


@pytest.mark.contract(
    "Launch",
    "SIGINT and SIGTERM to one rank or to all: all end alike after the same whole step, which `save_on_signal` saves",
    reported="Lightning#20825, Lightning#20542",
)
@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("ranks", SIGNALS.values(), ids=SIGNALS)
def test_a_signal_ends_all_ranks_after_the_same_whole_step(
    world: World, tmp_path: Path, kind: signal.Signals, ranks: list[int]
) -> None:
    ended = world.run(train, str(tmp_path), kind, ranks, "on_train_batch_start", 2, "fit", True, size=2)
    # It came before batch 2, the third one, and the step that this batch is a part of is whole after batch 3.
    assert ended == [(kind.name, 128 + kind, 2, True)] * 2
    saved = torch.load(tmp_path / "interrupted.ckpt", weights_only=True)
    assert saved["global_step"] == 2
    assert not list(tmp_path.rglob("*.part"))


def test_nothing_is_saved_unasked(world: World, tmp_path: Path) -> None:
    ended = world.run(train, str(tmp_path), signal.SIGTERM, [0], "on_train_batch_start", 1, "fit", False, size=2)
    assert ended == [("SIGTERM", 143, 3, True)] * 2
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize(
    ("method", "hook"), [("fit", "on_validation_batch_start"), ("validate", "on_validation_batch_start")]
)
def test_a_signal_ends_an_evaluation_on_all_ranks(world: World, tmp_path: Path, method: str, hook: str) -> None:
    ended = world.run(train, str(tmp_path), signal.SIGTERM, [1], hook, 1, method, True, size=2)
    steps = 8 if method == "fit" else 0
    assert ended == [("SIGTERM", 143, steps, True)] * 2
    assert (tmp_path / "interrupted.ckpt").exists() == (method == "fit")


class SendsInSetup(Callback):
    def setup(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            os.kill(os.getpid(), signal.SIGTERM)


def set_up() -> None:
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, callbacks=[SendsInSetup()])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", ROWS)))


def test_a_signal_while_a_run_is_set_up_ends_it_at_once(world: World) -> None:
    with pytest.raises(RankFailed) as failed:
        world.run(set_up, size=2)
    assert failed.value.exit_codes[1] == -signal.SIGTERM
    assert failed.value.exit_codes[0] not in (0, None)
    assert "rank 1 of 2 has vanished" in str(failed.value)


class InterruptsParent(Callback):
    """Interrupts the process that has started the ranks, and then takes longer than ranks that have failed may."""

    def __init__(self, times: int, seconds: float) -> None:
        self._times, self._seconds = times, seconds

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1 and trainer.global_rank == 0:
            for _ in range(self._times):
                os.kill(os.getppid(), signal.SIGINT)
                time.sleep(0.5)
            time.sleep(self._seconds)


def train_in_a_notebook(folder: str, times: int, seconds: float) -> int:
    """Returns the exit code of the process that has started the ranks and is interrupted alone."""
    forget_rank()
    launch.GRACE = launch.BOUND = 1.0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    cell = Cell("1f1b", 2, strategy=(("start_method", "fork"), ("save_on_signal", True)))
    callbacks = [InterruptsParent(times, seconds)]
    trainer = make_trainer(cell, max_epochs=-1, default_root_dir=folder, callbacks=callbacks)
    try:
        trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    except SystemExit as ended:
        return int(ended.code or 0)
    return 0


@pytest.mark.contract(
    "Launch", "SIGINT to the process alone that has spawned or forked the ranks: it waits for their step"
)
@pytest.mark.long
def test_an_interrupt_of_the_parent_ends_all_ranks_after_a_whole_step(world: World, tmp_path: Path) -> None:
    assert world.run(train_in_a_notebook, str(tmp_path), 1, 3.0, size=1) == [1]
    assert torch.load(tmp_path / "interrupted.ckpt", weights_only=True)["global_step"] > 1


def test_a_second_interrupt_of_the_parent_ends_all_ranks_at_once(world: World, tmp_path: Path) -> None:
    assert world.run(train_in_a_notebook, str(tmp_path), 2, 60.0, size=1, limit=40.0) == [1]
    assert not list(tmp_path.iterdir())


def interrupt_the_start() -> float:
    """Returns how long it took to end, where the interrupt comes before the second rank has been started."""
    start, started = BaseProcess.start, []

    def start_one(process: BaseProcess) -> None:
        if started:
            raise KeyboardInterrupt
        started.append(process)
        start(process)

    BaseProcess.start = start_one
    begin = time.monotonic()
    forget_rank()
    trainer = make_trainer(Cell("1f1b", 2, strategy=(("start_method", "fork"),)), max_epochs=1)
    with pytest.raises(SystemExit):
        trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS), ROWS))
    assert started
    for process in started:
        process.join()
    return time.monotonic() - begin


def test_an_interrupt_while_ranks_are_started_leaves_none(world: World) -> None:
    (seconds,) = world.run(interrupt_the_start, size=1, limit=40.0)
    assert seconds < 20.0


# ------------------------------------------------------------------------------------------- requeues at any instant


def train_until_told(
    folder: str, delay: float, kind: signal.Signals, context: str = "fork", at_start: bool = False, **options: Any
) -> tuple[str, Any, int, int]:
    """Trains with fast steps and a loader worker; all processes of a rank get a signal at some moment.

    Returns how it ended, with which code, after which step, and from which it had resumed.
    """
    torch.manual_seed(0)
    rank = int(os.environ["LOCAL_RANK"])
    trainer = make_trainer(Cell("1f1b"), max_epochs=-1, default_root_dir=folder, **options)
    begun: list[int] = []
    # Not after the run, which another rank's signal may end before: the process would die of it, as it should.
    later = threading.Timer(delay + 0.01 * rank, lambda: os.killpg(os.getpgid(0), kind))

    class SignalsLater(Callback):
        def on_train_start(self, trainer: Any, module: Any) -> None:
            begun.append(trainer.global_step)
            if at_start:
                self.on_train_batch_end()

        def on_train_batch_end(self, *_: Any) -> None:
            if len(begun) == 1:  # the loader's worker is there by now, and gets the signal as well
                begun.append(-1)
                later.start()

        def on_exception(self, *_: Any) -> None:
            later.cancel()

    trainer.callbacks.append(SignalsLater())
    loader = DataLoader(
        make_rows("gpt2", 8 * ROWS), ROWS, num_workers=1, persistent_workers=True, multiprocessing_context=context
    )
    try:
        trainer.fit(LanguageModule("gpt2"), loader)
    except Interrupted as ended:
        return ended.kind.name, ended.code, trainer.global_step, begun[0]
    return "finished", None, trainer.global_step, begun[0]


@pytest.mark.parametrize("instants", [2, pytest.param(50, marks=[pytest.mark.long, pytest.mark.timeout(900)])])
def test_a_job_is_requeued_at_any_instant_and_resumed_at_the_saved_step(
    world: World, tmp_path: Path, instants: int
) -> None:
    draw, step = random.Random(0), 0
    for _ in range(instants):
        delay, env = draw.uniform(0.0, 0.3), job(tmp_path)
        (first, *others) = world.run(as_task, str(tmp_path / "run"), delay, signal.SIGUSR1, size=2, env=env)
        assert others == [first]
        how, code, end, begin = first
        assert (how, code, begin) == ("SIGUSR1", 0, step)
        step = end
        (saved,) = (tmp_path / "run").glob("hpc_ckpt_*.ckpt")
        assert torch.load(saved, weights_only=True)["global_step"] == step
    assert (tmp_path / "asked").read_text().splitlines() == ["requeue 5_2"] * instants


def job(folder: Path) -> dict[str, str]:
    """What the tasks of a job find; the controller is a script that notes what it is asked."""
    (folder / "bin").mkdir(exist_ok=True)
    scontrol = folder / "bin" / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {folder}/asked\n')
    scontrol.chmod(0o755)
    return {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_ARRAY_JOB_ID": "5",
        "SLURM_ARRAY_TASK_ID": "2",
        "SLURM_STEP_ID": "0",
        "SLURM_NTASKS": "2",
        "SLURM_NTASKS_PER_NODE": "2",
        "SLURM_NNODES": "1",
        "SLURM_NODEID": "0",
        "SLURM_NODELIST": "127.0.0.1",
    }


def as_task(
    folder: str, delay: float, kind: signal.Signals, context: str = "fork", at_start: bool = False, given: bool = False
) -> tuple[str, Any, int, int]:
    """A rank of a world as a task of a job."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["LOCAL_RANK"]
    options = {"plugins": [SLURMEnvironment(requeue_signal=kind)]} if given else {}
    return train_until_told(folder, delay, kind, context, at_start, **options)


@pytest.mark.contract(
    "Launch",
    "a requeue by the signal of `SLURMEnvironment(requeue_signal=...)`, and with loader workers that are spawned",
)
@pytest.mark.parametrize(
    ("kind", "context", "at_start"),
    [
        (signal.SIGHUP, "fork", False),
        pytest.param(signal.SIGTERM, "fork", False, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, "spawn", True, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, "spawn", False, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, "forkserver", True, marks=pytest.mark.long),
        pytest.param(signal.SIGUSR1, "forkserver", False, marks=pytest.mark.long),
        pytest.param(signal.SIGTERM, "spawn", True, marks=pytest.mark.long),
    ],
)
def test_a_job_is_requeued_by_its_own_signal_and_whatever_starts_the_workers(
    world: World, tmp_path: Path, kind: signal.Signals, context: str, at_start: bool
) -> None:
    """A signal at the start finds a spawned worker that still imports what it needs."""
    arguments = (str(tmp_path / "run"), 1.0 if at_start else 0.05, kind, context, at_start, kind != signal.SIGUSR1)
    (first, *others) = world.run(as_task, *arguments, size=2, env=job(tmp_path))
    assert others == [first]
    how, code, end, begin = first
    is_running = kind != signal.SIGTERM  # which Slurm may have sent to a job that it ends: the script knows of none
    assert (how, code, begin) == (kind.name, 0 if is_running else 128 + kind, 0)
    (saved,) = (tmp_path / "run").glob("hpc_ckpt_*.ckpt")
    assert torch.load(saved, weights_only=True)["global_step"] == end > 0
    asked = (tmp_path / "asked").read_text().splitlines()
    assert asked == (["requeue 5_2"] if is_running else ["show job 5_2"])


def warn(folder: str, is_older: bool) -> list[str]:
    """Returns the warnings of a task that goes on from a checkpoint of its own choice, where a job was requeued."""
    os.environ["SLURM_PROCID"] = os.environ["SLURM_LOCALID"] = os.environ["LOCAL_RANK"]
    loader = make_loader(make_rows("gpt2", 2 * ROWS), ROWS)
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, default_root_dir=folder)
    trainer.fit(LanguageModule("gpt2"), loader)
    given, saved = Path(folder, "given.ckpt"), Path(folder, "hpc_ckpt_1.ckpt")
    for path in (given, saved) if is_older else (saved, given):
        trainer.save_checkpoint(path)
        time.sleep(0.05)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = make_trainer(Cell("1f1b"), max_epochs=2, default_root_dir=folder)
        trainer.fit(LanguageModule("gpt2"), loader, ckpt_path=given)
    return [str(warning.message) for warning in caught if "was saved when a job was requeued" in str(warning.message)]


@pytest.mark.parametrize("is_older", [True, pytest.param(False, marks=pytest.mark.long)])
def test_a_job_that_would_lose_what_it_saved_when_it_was_requeued_is_warned(
    world: World, tmp_path: Path, is_older: bool
) -> None:
    first, second = world.run(warn, str(tmp_path), is_older, size=2, env=job(tmp_path))
    assert second == []
    assert len(first) == is_older
    assert not first or f"{tmp_path}/hpc_ckpt_1.ckpt was saved" in first[0]


@pytest.mark.parametrize("kind", [signal.SIGTERM, signal.SIGINT])
def test_the_workers_of_a_loader_leave_a_signal_to_all_to_their_rank(
    world: World, tmp_path: Path, kind: signal.Signals
) -> None:
    (first, *others) = world.run(train_until_told, str(tmp_path), 0.05, kind, size=2)
    assert first[:2] == (kind.name, 128 + kind)
    assert others == [first]


# ---------------------------------------------------------------------------------------------- processes of the user's


class Forks(Callback):
    """Starts processes in a hook, and ends them."""

    def __init__(self) -> None:
        self.ended: list[Any] = []

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx != 1 or trainer.global_rank:
            return
        fork = multiprocessing.get_context("fork")
        process = fork.Process(target=block)
        process.start()
        time.sleep(0.2)
        process.terminate()
        process.join(5.0)
        self.ended.append(process.exitcode)
        process.kill()
        with fork.Pool(2) as pool:  # which ends its workers by SIGTERM, and waits for them
            self.ended.append(pool.apply(abs, (-1,)))


def block() -> None:
    """Blocks in C for ever, whatever signals come: no handler of Python runs."""
    lock = ctypes.create_string_buffer(64)
    for _ in range(2):
        ctypes.CDLL(None).pthread_mutex_lock(lock)


def train_with_processes() -> tuple[list[Any], int]:
    forks = Forks()
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, callbacks=[forks])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 3 * ROWS), ROWS))
    return forks.ended, trainer.global_step


@pytest.mark.contract("Launch", "processes that a hook starts and ends again: a run's handlers are not theirs")
def test_a_process_that_a_hook_forks_ends_when_it_is_terminated(world: World) -> None:
    assert world.run(train_with_processes, size=2) == [([-signal.SIGTERM, 1], 3), ([], 3)]


def read_in_c() -> tuple[int, Any]:
    """Returns what a read gets that a signal meets in a worker, and how a process ends that the worker has forked."""
    workers._ignore([signal.SIGUSR1, signal.SIGTERM])
    read, write = os.pipe()
    main = threading.get_ident()
    threading.Timer(0.2, signal.pthread_kill, [main, signal.SIGUSR1]).start()
    threading.Timer(0.5, os.write, [write, b"row"]).start()
    count = ctypes.CDLL(None).read(read, ctypes.create_string_buffer(8), 8)
    process = multiprocessing.get_context("fork").Process(target=block)
    process.start()
    time.sleep(0.2)
    process.terminate()
    process.join(5.0)
    code = process.exitcode
    process.kill()
    return count, code


def test_a_signal_neither_breaks_a_read_of_a_worker_nor_is_ignored_by_processes_that_it_forks(world: World) -> None:
    assert world.run(read_in_c, size=1) == [(3, -signal.SIGTERM)]


class Blocks(Dataset[Row]):
    """Rows, one of which blocks who reads it."""

    def __init__(self) -> None:
        self.rows = make_rows("gpt2", 4 * ROWS)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Row:
        if index == 2 * ROWS:
            block()
        return self.rows[index]


def train_with_a_worker_that_blocks(options: dict[str, Any]) -> None:
    trainer = make_trainer(Cell("1f1b"), max_epochs=1)
    trainer.fit(LanguageModule("gpt2"), DataLoader(Blocks(), ROWS, num_workers=1, timeout=3, **options))


@pytest.mark.contract("Faults", "a loader's worker that blocks in C code: its rank ends, and ends the worker")
@pytest.mark.parametrize(
    "options",
    [
        {},
        pytest.param({"persistent_workers": True}, marks=pytest.mark.long),
        pytest.param({"multiprocessing_context": "spawn"}, marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_worker_that_blocks_holds_up_no_end(world: World, options: dict[str, Any]) -> None:
    with pytest.raises(RankFailed) as failed:
        world.run(train_with_a_worker_that_blocks, options, size=2, limit=90.0, grace=20.0)
    assert failed.value.exit_codes == [1, 1], failed.value  # else the harness had to end one
    assert "DataLoader timed out after 3 seconds" in failed.value.error
    assert "is killed by signal" not in "".join(failed.value.outputs)
