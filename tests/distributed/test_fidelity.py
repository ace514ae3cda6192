import pytest

from .fidelity import Cell, check
from .world import World

@pytest.mark.parametrize("cell", [Cell(model=m, schedule=s, stages=d) for m in ("gpt2", "bert") for s in ("chimera", "gpipe", "1f1b") for d in (1,2)], ids=str)
def test_training_changes_every_parameter_as_one_process_does(world: World, cell: Cell) -> None:
    check(world, cell)
