"""What ranks hand to each other after a step: one message where all is as before, and two where anything is new."""

import math
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import lightning as L
import pytest
import torch
import torch.distributed as dist
import torchmetrics
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_chimera.outcome import Outcome
from lightning_chimera.reporting import LogCall, Report
from lightning_chimera.runtime.exchange import Broadcast, Gather
from lightning_chimera.runtime.packing import Constant

from .fidelity import Cell, Experiment, check, train_plainly, usual, usual_rows
from .users import LanguageModule, Row
from .world import World


@contextmanager
def counting() -> Iterator[Counter[str]]:
    """Counts messages and what is pickled."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return function(*args, **kwargs)

        return wrapper

    with pytest.MonkeyPatch.context() as patch:
        for name in ("all_gather", "broadcast", "all_gather_object", "broadcast_object_list"):
            patch.setattr(dist, name, counted(name, getattr(dist, name)))
        for name in ("dumps", "loads"):
            patch.setattr(pickle, name, counted(name, getattr(pickle, name)))
        yield counts


def numbers(step: int, rank: int) -> dict[str, Any]:
    """A tree whose numbers differ from step to step, and need all their bits."""
    start = 10 * step + rank
    return {
        "double": [0.1 + start, math.inf, math.nan, -0.0],
        "integer": ((1 << 62) + start, -start),
        "flag": bool(start % 2),
        "tensors": [torch.tensor(start / 3, dtype=dtype) for dtype in (torch.float64, torch.bfloat16, torch.int64)],
        "rows": torch.arange(6, dtype=torch.float16).reshape(2, 3).t() + start,
        "name": "fixed",
        "nothing": None,
        "constant": Constant([1, 2.5, "x"]),
    }


CHANGES: dict[str, Callable[[dict[str, Any], int], Any]] = {
    "a new entry": lambda tree, _step: {**tree, "more": 1},
    "another order": lambda tree, _step: dict(reversed(tree.items())),
    "another shape": lambda tree, step: {**tree, "rows": torch.zeros(step, 2)},
    "another type": lambda tree, _step: {**tree, "flag": 1},
    "another string": lambda tree, step: {**tree, "name": f"step {step}"},
    "another constant": lambda tree, step: {**tree, "constant": Constant([step])},
    "a large integer": lambda tree, step: {**tree, "integer": (1 << 70) + step},
    "an object": lambda tree, step: {**tree, "object": OrderedDict(a=torch.ones(2) * step, b={step})},
    "nothing at all": lambda _tree, _step: None,
}


def give_trees() -> list[tuple[str, Any, Counter[str], Any, Counter[str]]]:
    """Gathers and broadcasts trees that now and then change on the last rank only."""
    rank, size = int(os.environ["LOCAL_RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", rank=rank)
    gather, broadcast = Gather(dist.group.WORLD), Broadcast(dist.group.WORLD, size - 1, is_source=rank == size - 1)
    seen = []
    for step, (name, change) in enumerate(list(CHANGES.items()) * 2):
        for kind in (name, "as before", "usual"):
            tree = numbers(step, rank)
            tree = change(tree, step) if kind == name and rank == size - 1 else tree
            with counting() as gathering:
                gathered = gather(tree)
            with counting() as broadcasting:
                shared = broadcast(tree if rank == size - 1 else None)
            seen.append((kind, gathered, gathering, shared, broadcasting))
    return seen


def plain(tree: Any) -> Any:
    """A tree to be compared: with the bits of its tensors, and numbers by type and text."""
    if isinstance(tree, torch.Tensor):
        return tree.dtype, tree.shape, tree.contiguous().reshape(-1).view(torch.uint8).tolist()
    if isinstance(tree, dict):
        return type(tree), [(key, plain(value)) for key, value in tree.items()]
    if isinstance(tree, Constant):
        return plain(tree.value)
    return (type(tree), list(map(plain, tree))) if isinstance(tree, list | tuple) else (type(tree), repr(tree))


def test_trees_arrive_in_one_message_without_pickling_where_no_layout_has_changed(world: World) -> None:
    size = 3
    ranks = world.run(give_trees, size=size)
    for seen in ranks:
        for number, (kind, gathered, gathering, shared, broadcasting) in enumerate(seen):
            change = CHANGES.get(kind)
            wanted = [numbers(number // 3, rank) for rank in range(size)]
            wanted[-1] = change(wanted[-1], number // 3) if change is not None else wanted[-1]
            assert plain(gathered) == plain(wanted)
            assert plain(shared) == plain(wanted[-1])
            if kind == "usual":
                assert (gathering, broadcasting) == ({"all_gather": 1}, {"broadcast": 1})
            else:  # the layout of the last rank has changed, which all see
                assert (gathering["all_gather"], broadcasting["broadcast"]) == (2, 2)


class Changing(LanguageModule):
    """Logs a value, uses a parameter, and returns something, in some of the steps only."""

    def __init__(self) -> None:
        super().__init__("gpt2", lr=0.5)
        self.scale = nn.Parameter(torch.ones(()))
        self.mean = torchmetrics.MeanMetric()

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        loss = output.loss * self.scale if batch_idx in (4, 5) else output.loss
        self.log("train_loss", loss)
        self.log_dict({f"value_{number}": loss * number for number in range(3)}, on_step=True, on_epoch=True)
        self.mean(loss)
        self.log("mean", self.mean)
        if batch_idx in (3, 4):
            self.log("sometimes", loss)
        return {"loss": loss, "seen": batch["input_ids"], "kind": "odd" if batch_idx == 7 else "usual"}


class Counts(Callback):
    """Counts what each batch has sent and pickled, and notes what was logged and returned."""

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.manager = counting()
        self.counts, self.seen = self.manager.__enter__(), vars(module).setdefault("notes", [])

    def on_train_batch_end(
        self, trainer: L.Trainer, module: L.LightningModule, outputs: Any, batch: Row, batch_idx: int
    ) -> None:
        logged = {name: float(value) for name, value in trainer.callback_metrics.items()}
        returned = torch.equal(outputs["seen"], batch["input_ids"]), outputs["kind"]
        self.seen.append((dict(self.counts), logged, returned))
        self.counts.clear()

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self.manager.__exit__(None, None, None)


def changing(cell: Cell) -> Experiment:
    return usual(cell, Changing(), usual_rows(cell, padded=False), callbacks=[Counts()])


def test_a_usual_step_pickles_nothing_and_what_changes_in_one_is_as_in_a_plain_training(world: World) -> None:
    cell = Cell("chimera", 2, microbatches=2, padded=False)
    _, ranks = check(world, cell, changing)
    reference = train_plainly(world, cell.reference, changing).notes
    for seen in ranks:
        for number, ((counts, logged, returned), (_, in_plain, _)) in enumerate(
            zip(seen.notes, reference, strict=True)
        ):
            assert logged.keys() == in_plain.keys()
            torch.testing.assert_close(logged, in_plain, rtol=1e-6, atol=0.0)
            assert returned == (True, "odd" if number == 7 else "usual")
            if number in (1, 2, 9):
                assert not counts.keys() & {"dumps", "loads", "all_gather_object", "broadcast_object_list"}
            elif number in (3, 4, 5, 6, 7, 8):  # a key, a parameter, both gone again, and another string twice
                assert counts["dumps"]


class Elsewhere(torch.Tensor):
    """A tensor that says it is on a device."""

    is_cpu = False  # type: ignore[assignment]


def share_from_a_device() -> list[list[str]]:
    """Shares tensors between ranks whose device is one without numbers; returns where they are read."""
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("gloo", rank=rank)
    device = torch.device("meta")
    gather, everyone = Gather(dist.group.WORLD, device), Gather(dist.group.WORLD)
    broadcast = Broadcast(dist.group.WORLD, 1, is_source=rank == 1, device=device)
    seen = []
    for value in (1.0, 2.0):  # a new layout, and the same once more
        there = torch.full((3,), value).as_subclass(Elsewhere)
        report = Report(1.0, 1, [LogCall("loss", there.sum(), torch.float32, None, {})])
        tree = {"here": torch.full((3,), value), "there": there}
        outcome = Outcome((0, 0), (there.sum(), torch.float32), report, tree, {}, counts=True).as_tree()
        for read in (*gather(outcome), *everyone(outcome), broadcast(outcome)):
            if read is outcome:
                continue  # of the source
            found = Outcome.of_tree(read)
            assert (found.loss[0], found.report.calls[0].value) == (3 * value, 3 * value)
            assert found.extras["here"].tolist() == [value] * 3
            seen.append([found.extras[name].device.type for name in ("here", "there")])
    return seen


def test_tensors_are_read_on_the_kind_of_device_on_which_they_were(world: World) -> None:
    gathered, on_the_cpu, shared = [["cpu", "meta"]] * 2, [["cpu", "cpu"]] * 2, [["cpu", "meta"]]
    assert world.run(share_from_a_device, size=2) == [(gathered + on_the_cpu + shared) * 2, (gathered + on_the_cpu) * 2]
