"""Blocks may run compiled, each by itself: the same training, under the same names."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import nn

from lightning_chimera import ChimeraStrategy
from lightning_chimera.partition import compilation

from .fidelity import Cell, Experiment, Trained, check, same_changes, train, train_plainly, usual
from .users import LanguageModule
from .world import RankFailed, World


def compiled(backend: bool | str, **options: Any) -> tuple[tuple[str, Any], ...]:
    return (("compile_blocks", backend), *options.items())


class NotesCompiled(Callback):
    """Notes which blocks of the module run compiled."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        module.notes = [block._compiled_call_impl is not None for block in module.model.transformer.h]


MODULES: list[LanguageModule] = []


def notes_compiled(cell: Cell) -> Experiment:
    MODULES.append(LanguageModule(cell.model, exact=cell.precision == "64-true"))
    return usual(cell, MODULES[0], callbacks=[NotesCompiled()])


def train_and_look(cell: Cell) -> tuple[Trained, list[bool], int]:
    """What a training did, the blocks that run compiled after it, and the graphs that were compiled in it."""
    seen = train(cell, notes_compiled)
    after = [block._compiled_call_impl is not None for block in MODULES[0].model.transformer.h]
    return seen, after, torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.contract("The module", "blocks compiled by torch.compile, by `compile_blocks`")
def test_the_blocks_of_a_rank_are_compiled_for_the_time_of_a_run_and_train_alike(world: World) -> None:
    cell = Cell("1f1b", 2, strategy=compiled("eager", recompute="blocks"))
    ranks = world.run(train_and_look, cell, size=2)
    plain = train_plainly(world, cell.reference)
    for seen, after, graphs in ranks:
        same_changes(seen, plain)
        assert after == [False] * 4
        assert graphs > 0
    assert [seen.notes for seen, _, _ in ranks] == [[False, False, True, True], [True, True, False, False]]


@pytest.mark.long
@pytest.mark.parametrize(
    "cell",
    [
        Cell("chimera", 2, strategy=compiled("aot_eager")),
        Cell("chimera", 2, model="bert", strategy=compiled(True)),
        Cell("1f1b", 2, strategy=compiled(True, recompute="stages")),
        Cell("chimera", 2, strategy=compiled(True, recompute="blocks")),
        Cell("chimera_halving", 2, strategy=compiled(True)),
    ],
    ids=str,
)
def test_blocks_compiled_by_any_backend_train_alike(world: World, cell: Cell) -> None:
    check(world, cell)


class CompilesItself(LanguageModule):
    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.model.transformer.h[1].compile(backend="eager")


@pytest.mark.contract("The module", "compiled blocks with a schedule that splits backwards", "refused")
@pytest.mark.parametrize(
    ("module", "strategy"), [(LanguageModule, compiled("eager")), (CompilesItself, ())], ids=["ours", "the user's"]
)
def test_compiled_blocks_are_refused_where_backwards_are_split_in_them(
    world: World, module: type[LanguageModule], strategy: tuple[tuple[str, Any], ...]
) -> None:
    cell = Cell("zb_h1", 2, strategy=strategy)
    with pytest.raises(RankFailed, match=r"compiled already, with the schedule 'zb_h1'.*or use a schedule with whole"):
        world.run(train, cell, module, size=2)


def test_a_backend_that_torch_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match=r"compile_blocks='inductr': give True .* or the name of a backend.*inductor"):
        ChimeraStrategy(compile_blocks="inductr")


def test_a_missing_compiler_is_found_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compilation.shutil, "which", lambda _name: None)
    compilation.check_compiler("eager", torch.device("cpu"))
    compilation.check_compiler("inductor", torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"compile_blocks=True.*needs a compiler of C\+\+ on the CPU"):
        compilation.check_compiler("inductor", torch.device("cpu"))


def test_a_block_that_its_owner_has_compiled_stays_so() -> None:
    blocks = [nn.Linear(2, 2), nn.Linear(2, 2)]
    blocks[0].compile(backend="eager")
    own = blocks[0]._compiled_call_impl
    compilation.CompiledBlocks(blocks, "eager").release()
    assert [block._compiled_call_impl for block in blocks] == [own, None]
