"""What is drawn at random is the same in every layout, and the same twice."""

from contextlib import nullcontext
from typing import Any

import lightning as L
import pytest
import torch

from .fidelity import Cell, Experiment, same_changes, train, train_plainly, usual
from .users import ROWS, LanguageModule, Row, make_rows
from .world import World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


class Noting(LanguageModule):
    """Notes the loss of every microbatch."""

    def __init__(self, dropout: float) -> None:
        super().__init__(dropout=dropout)
        self.notes: tuple[list[float], ...] = ([],)  # not a list: those are made the same on every rank

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.notes[0].append(float(loss))
        return loss


def dropout(cell: Cell) -> Experiment:
    L.seed_everything(3, verbose=False)
    return usual(cell, Noting(0.2))


def dropout_on_equal_rows(cell: Cell) -> Experiment:
    L.seed_everything(3, verbose=False)
    rows = make_rows("gpt2", 1, padded=False) * (8 * ROWS)
    return usual(cell, Noting(0.2), rows, max_steps=1)


@pytest.mark.contract("Loop", "dropout draws the same masks whatever the stages and the schedule")
def test_dropout_is_the_same_for_every_layout(world: World) -> None:
    single = world.run(train, Cell("1f1b", 1), dropout, size=1)[0]
    for cell in (Cell("1f1b", 2), Cell("gpipe", 4), Cell("chimera", 2), Cell("chimera", 4)):
        seen = world.run(train, cell, dropout, size=cell.size)[0]
        same_changes(seen, single)


@pytest.mark.contract("Loop", "dropout differs between microbatches, replicas and batches", reported="MLM#206")
def test_dropout_differs_between_microbatches_replicas_and_batches(world: World) -> None:
    ranks = world.run(train, Cell("chimera", 2, replicas=2), dropout_on_equal_rows, size=4)
    losses = [loss for seen in ranks for loss in seen.notes[0]]
    assert len(losses) == len(set(losses)) == 2 * 2 * 4


@pytest.mark.contract("Loop", "`seed_everything` makes a run the same twice, to the bit", reported="MLM#206")
def test_a_seed_gives_the_same_run_twice(world: World) -> None:
    first, second = (world.run(train, Cell("chimera", 2, replicas=2), dropout, size=4) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert (one.losses, one.hashes) == (other.losses, other.hashes)


class NotesItsStart(LanguageModule):
    """Notes the whole model as it is when training starts."""

    def on_train_start(self) -> None:
        whole = getattr(self.trainer.strategy, "full_parameters", nullcontext)
        with whole():
            self.notes = {name: value.detach().clone() for name, value in self.named_parameters()}


def from_a_seed(cell: Cell) -> Experiment:
    L.seed_everything(7, verbose=False)
    return usual(cell, NotesItsStart())


@pytest.mark.contract("Models", "a model starts with the weights that one process gives it", reported="PT#139304")
def test_a_model_starts_as_in_one_process(world: World) -> None:
    plain = train_plainly(world, CHIMERA.reference, from_a_seed)
    for seen in world.run(train, CHIMERA, from_a_seed, size=4):
        torch.testing.assert_close(seen.notes, plain.notes, rtol=0.0, atol=0.0)
    blocks = [plain.notes[f"model.transformer.h.{number}.mlp.c_proj.weight"] for number in range(4)]
    assert len({float(block.double().sum()) for block in blocks}) == 4
