"""A step that gives the model other shapes on some ranks is refused, with both shapes and ranks."""

import os
import re
from dataclasses import replace
from typing import Any

import pytest

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2)


def rank() -> int:
    return int(os.environ["LOCAL_RANK"])


class CropsInStep(LanguageModule):
    """Gives the model shorter rows on the last rank than on the first, from the start or at validation only."""

    def __init__(self, *, trains: bool) -> None:
        super().__init__()
        self.trains = trains

    def crop(self, batch: Row) -> Row:
        return {name: value[:, : 16 - rank()] for name, value in batch.items()}

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return super().training_step(self.crop(batch) if self.trains else batch, batch_idx)

    def validation_step(self, batch: Row, batch_idx: int) -> Any:
        return super().validation_step(self.crop(batch), batch_idx)


def crops_in_step(shared_memory: bool, trains: bool) -> None:
    cell = replace(FEW, strategy=(("shared_memory", shared_memory), ("timeout", 10)))
    rows = make_loader(make_rows("gpt2", ROWS, padded=False))
    make_trainer(cell, max_epochs=1).fit(CropsInStep(trains=trains), rows, None if trains else rows)


@pytest.mark.contract(
    "Faults",
    "a step that gives the model input of other shapes on some ranks of a pipeline, as one that crops by the rank",
    "refused",
)
@pytest.mark.parametrize(("shared_memory", "trains"), [(False, True), (True, True), (False, False)])
def test_a_step_that_gives_the_model_other_shapes_on_a_rank_names_both(
    world: World, shared_memory: bool, trains: bool
) -> None:
    with pytest.raises(RankFailed) as failed:
        world.run(crops_in_step, shared_memory, trains, size=2, limit=60)
    assert re.search(
        r"Rank 0 has sent \(\d, 16, 32\) torch.float32, but rank 1 expects \(\d, 15, 32\) torch.float32"
        r"|Rank 1 has sent \(\d, 15, 32\) torch.float32, but rank 0 expects \(\d, 16, 32\) torch.float32",
        failed.value.error,
    ), failed.value
