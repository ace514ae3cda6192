"""A module that clips by itself clips as one process does, or is told that it can't."""

from typing import Any

import pytest
from torch import nn

from .fidelity import CLIP, Cell, Make, check, label, train
from .users import LanguageModule
from .world import RankFailed, World

FEW = Cell("1f1b", 2, clip=False)
CHIMERA = Cell("chimera", 4, clip=False)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3, clip=False)


class ClipsByItsOwnNorm(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)


class ClipsByTheNormOfAll(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")


class ClipsByValue(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ScalesAll(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.25


class ClipsNothing(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1e6)


@pytest.mark.parametrize("cell", [FEW, CHIMERA, REPLICAS], ids=str)
def test_clipping_by_the_norm_of_one_ranks_parameters_is_an_error(world: World, cell: Cell) -> None:
    with pytest.raises(RankFailed, match=r"by different factors.*saw the norm of one rank.*Call self\.clip_gradients"):
        world.run(train, cell, ClipsByItsOwnNorm, size=cell.size)


@pytest.mark.parametrize(
    ("cell", "module"),
    [(FEW, ClipsByTheNormOfAll), (REPLICAS, ClipsByTheNormOfAll), (FEW, ClipsByValue), (FEW, ScalesAll)],
    ids=label,
)
def test_clipping_of_all_ranks_alike_is_right(world: World, cell: Cell, module: Make) -> None:
    check(world, cell, module)


@pytest.mark.parametrize(
    ("cell", "module"), [(FEW, ClipsNothing), (Cell("chimera", 2, clip=False), ClipsByItsOwnNorm)], ids=label
)
def test_a_norm_of_ones_own_may_be_used_where_it_changes_nothing_or_is_whole(
    world: World, cell: Cell, module: Make
) -> None:
    check(world, cell, module)  # both ranks of two Chimera stages hold the whole model
