"""What a failure is to the rest of a run: errors of messages and of data, hooks that are told, and the run after it."""

import os
import re
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader

from lightning_chimera import strategy
from lightning_chimera.runtime.links import Links
from lightning_chimera.signals import Interrupted

from .faults import Broken
from .fidelity import Cell, make_trainer
from .launches import forget_rank
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

# ------------------------------------------------------------------------------------------------------- messages


def fail_to_send(shared_memory: bool) -> None:
    """Rank 1's fifth message can't be sent."""
    numbers = iter(range(1, 100))
    send = Links.send

    def send_four(self: Links, *args: Any) -> None:
        if next(numbers) == 5:
            raise BufferError("the fifth message")
        send(self, *args)

    if os.environ["LOCAL_RANK"] == "1":
        Links.send = send_four  # type: ignore[method-assign]
    trainer = make_trainer(Cell("1f1b", 3, strategy=(("shared_memory", shared_memory),)), max_epochs=1)
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS)))


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_message_that_cannot_be_sent_ends_all_ranks_with_that_error(world: World, shared_memory: bool) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(fail_to_send, shared_memory, size=3, grace=20.0)
    assert (caught.value.rank, caught.value.error) == (1, "BufferError: the fifth message")
    assert caught.value.exit_codes == [1, 1, 1]
    assert re.search(
        r"rank 1 of 3 failed at: step 0, train in training_step, stage 1, microbatch \d", str(caught.value)
    )


# ----------------------------------------------------------------------------------------------------------- data


def read_broken_rows(fault: str, workers: int, stages: int, replicas: int) -> None:
    trainer = make_trainer(Cell("1f1b", stages, replicas), max_epochs=2)
    trainer.fit(LanguageModule("gpt2"), DataLoader(Broken(fault, 11), ROWS, num_workers=workers))


DATA = {"IndexError": "IndexError", "ValueError": "ValueError", "SIGKILL": "RuntimeError: DataLoader worker"}


@pytest.mark.contract(
    "Faults",
    "a row that raises, IndexError included, or a loader's worker that dies: an error on all ranks, no short epoch",
    reported="Lightning#11841",
)
@pytest.mark.parametrize(
    ("fault", "workers", "layout"),
    [
        ("IndexError", 0, (2, 1)),
        ("IndexError", 1, (2, 2)),
        pytest.param("ValueError", 1, (2, 1), marks=pytest.mark.long),
        ("SIGKILL", 1, (2, 1)),
    ],
)
def test_a_row_that_cannot_be_read_ends_all_ranks_with_that_error(
    world: World, fault: str, workers: int, layout: tuple[int, int]
) -> None:
    size = layout[0] * layout[1]
    with pytest.raises(RankFailed) as caught:
        world.run(read_broken_rows, fault, workers, *layout, size=size, grace=20.0)
    assert caught.value.error.startswith(DATA[fault]), caught.value
    assert caught.value.exit_codes == [1] * size, caught.value
    text = "".join(caught.value.outputs) + str(caught.value)
    leader = 0 if layout == (2, 1) else caught.value.rank
    assert leader % 2 == 0  # of its group
    assert f"chimera: rank {leader} of {size} failed at: step " in text, text


# ---------------------------------------------------------------------------------------------------------- hooks


class Fails(Callback):
    """Raises or sends a signal on some ranks before the third batch, and counts what hooks are told."""

    def __init__(self, fault: str, ranks: list[int], folder: str) -> None:
        self.fault, self.ranks, self.folder = fault, ranks, folder

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 2 and trainer.global_rank in self.ranks:
            if self.fault == "exception":
                raise ArithmeticError("the fault")
            os.kill(os.getpid(), signal.Signals[self.fault])

    def on_exception(self, trainer: Any, module: Any, exception: BaseException) -> None:
        with Path(self.folder, str(os.getpid())).open("a") as file:
            file.write(f"{type(exception).__name__}\n")


def fail_and_go_on(fault: str, ranks: list[int], folder: str) -> tuple[list[str], int]:
    """Returns what the hook was told, and how many steps a second run in the same processes has made."""
    loader = make_loader(make_rows("gpt2", 4 * ROWS))
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, callbacks=[Fails(fault, ranks, folder)])
    with pytest.raises((ArithmeticError, Interrupted)):
        trainer.fit(LanguageModule("gpt2"), loader)
    again = make_trainer(Cell("1f1b"), max_epochs=1)
    again.fit(LanguageModule("gpt2"), loader)
    return Path(folder, str(os.getpid())).read_text().split(), again.global_step


@pytest.mark.contract("Launch", "a run that a signal or an error on all ranks has ended, and then another one")
@pytest.mark.parametrize(
    ("fault", "ranks", "told"),
    [("exception", [0, 1], "ArithmeticError"), ("SIGINT", [1], "Interrupted"), ("SIGTERM", [0, 1], "Interrupted")],
)
def test_hooks_are_told_once_of_what_ends_a_run_and_another_one_can_follow(
    world: World, tmp_path: Path, fault: str, ranks: list[int], told: str
) -> None:
    assert world.run(fail_and_go_on, fault, ranks, str(tmp_path), size=2) == [([told], 4)] * 2


class FailsInASecondStep(LanguageModule):
    """Raises in front of the model call, on all ranks, when receives of the step have been posted."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ArithmeticError("the fault")
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            raise ArithmeticError("the fault")
        return super().validation_step(batch, batch_idx)


def fail_in_a_step_and_go_on(step: str) -> tuple[int, int, bool]:
    """Returns how many messages were awaited by the step that failed, and what a second run has made."""
    trainer = make_trainer(Cell("1f1b", strategy=(("shared_memory", False),)), max_epochs=1)
    loader, module = make_loader(make_rows("gpt2", 4 * ROWS)), FailsInASecondStep("gpt2")
    run = trainer.fit if step == "training_step" else trainer.validate
    with pytest.raises(ArithmeticError):
        run(module, loader)
    engine = trainer.strategy.engine
    posted = len(engine.pipeline._links._posted)
    trainer.fit(LanguageModule("gpt2"), loader)
    groups = trainer.strategy.engine.groups
    trainer.validate(LanguageModule("gpt2"), loader)
    assert trainer.strategy.engine.groups is groups  # of a run that has ended well
    return posted, trainer.global_step, groups is engine.groups


@pytest.mark.contract("Launch", "a run that an error in a step of all ranks has ended, and then another one")
@pytest.mark.parametrize(("step", "steps"), [("training_step", 1 + 4), ("validation_step", 4)])
def test_what_a_step_that_broke_off_has_posted_meets_no_message_of_the_next_run(
    world: World, step: str, steps: int
) -> None:
    found = world.run(fail_in_a_step_and_go_on, step, size=2, limit=90)
    assert max(posted for posted, *_ in found) > 0 or step == "validation_step"
    assert [entry[1:] for entry in found] == [(steps, False)] * 2


def fail_as_launched(ranks: list[int], folder: str, start_method: str) -> None:
    cell = Cell("1f1b", strategy=(("start_method", start_method),))
    if start_method == "fork":
        forget_rank()
    trainer = make_trainer(cell, max_epochs=1, callbacks=[Fails("exception", ranks, folder)])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 4 * ROWS)))


@pytest.mark.parametrize("start_method", ["popen", "fork"])
def test_hooks_are_told_once_of_an_error_on_one_rank(world: World, tmp_path: Path, start_method: str) -> None:
    with pytest.raises(RankFailed):
        world.run(fail_as_launched, [1], str(tmp_path), start_method, size=2 if start_method == "popen" else 1)
    told = [path.read_text().split() for path in tmp_path.iterdir()]
    assert ["ArithmeticError"] in told
    assert all(len(one) == 1 for one in told), told  # a rank that only waits may leave without
    assert len(told) <= (2 if start_method == "popen" else 3)


class FailsInTeardown(Callback):
    def teardown(self, trainer: Any, module: Any, stage: str) -> None:
        if trainer.global_rank == 1:
            raise ArithmeticError("the fault")


def fail_in_teardown() -> None:
    trainer = make_trainer(Cell("1f1b"), max_epochs=1, callbacks=[FailsInTeardown()])
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", 2 * ROWS)))


def test_an_error_in_teardown_leaves_nobody_waiting(world: World) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(fail_in_teardown, size=2, grace=20.0)
    assert (caught.value.rank, caught.value.error) == (1, "ArithmeticError: the fault")
    assert caught.value.exit_codes == [0, 1]  # the run is over by then; a launcher takes the code of who has failed


# --------------------------------------------------------------------------------------------------------- set-up


def meet_nobody() -> None:
    """Rank 0 takes connections and never answers, as a process does that is stopped at the wrong moment."""
    if os.environ["LOCAL_RANK"] == "0":
        with socket.create_server(("127.0.0.1", int(os.environ["MASTER_PORT"]))):
            time.sleep(40.0)
    strategy.GRACE, strategy.BOUND = 1.0, 1.0
    torch.manual_seed(0)
    trainer = make_trainer(Cell("1f1b", strategy=(("timeout", 2),)), max_epochs=1)
    trainer.fit(LanguageModule("gpt2"), make_loader(make_rows("gpt2", ROWS)))


def test_ranks_that_do_not_meet_end_though_the_one_that_keeps_the_store_never_answers(world: World) -> None:
    with pytest.raises(RankFailed) as caught:
        world.run(meet_nobody, size=2, limit=30.0, grace=0.0)
    assert caught.value.exit_codes[1] == 1, caught.value
    assert "chimera: rank 1 of 2 has not met the others within 2 s (timeout), at 127.0.0.1" in caught.value.outputs[1]
