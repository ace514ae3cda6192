"""Every schedule changes every parameter as one process does."""

import json
from collections import Counter
from itertools import product
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from lightning_chimera import ChimeraStrategy
from lightning_chimera.callbacks import PipelineTrace
from lightning_chimera.schedules import SCHEDULES, Schedule, chimera_split, one_f_one_b, v_half, zb_v

from .fidelity import Cell, Make, check, make_trainer, same_changes, train
from .test_draws import dropout
from .test_parameters import Checkpointed, all_but_the_head_frozen, first_stage_frozen
from .test_rows import few_rows, lengths_change
from .users import LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

FIRST = ("chimera", "gpipe", "1f1b")
"""Those of the fidelity matrix."""
SPLIT = Cell("zb_h1", 2)
V = Cell("zb_v", 2)
INTERLEAVED = Cell("interleaved", 2)
HALVES = Cell("chimera_halving", 2, microbatches=2)
OUT_OF_ORDER = Cell("dualpipe_v", 2)
"""Messages are not taken in the order in which they are sent."""


def built(name: str, stages: int, microbatches: int) -> Schedule | None:
    """The schedule, if it is defined for these numbers."""
    try:
        return SCHEDULES[name].build(stages, microbatches)
    except ValueError:
        return None


CELLS = [
    Cell(name, stages, microbatches=microbatches, model="bert" if microbatches % 2 else "gpt2", blocks=8)
    for name, stages in product(SCHEDULES, (2, 4))
    for microbatches in (stages - 1, stages, stages + 1, 2 * stages, 4 * stages)
    if name not in FIRST and built(name, stages, microbatches) is not None
]
SAMPLE = [cell for cell in CELLS if cell.stages == 2 and cell.microbatches == 4]
OPTIONS = [
    Cell("chimera", 4, strategy=(("pipes", 4),)),
    Cell("chimera_split", 4, strategy=(("pipes", 4),)),
    Cell("interleaved", 2, blocks=6, strategy=(("chunks", 3),)),
    Cell("hanayo", 2, blocks=8, strategy=(("chunks", 4),)),
]


@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_schedule_changes_every_parameter_as_one_process_does(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell not in SAMPLE], ids=str)
def test_a_schedule_of_any_size_does_so(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.parametrize("cell", OPTIONS, ids=str)
def test_more_pipes_and_more_stages_on_a_rank_do_so(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.parametrize(
    "replicated", [Cell("zb_v", 2, 2), Cell("chimera_split", 2, 2), Cell("interleaved", 2, 2)], ids=str
)
def test_a_schedule_may_be_replicated(world: World, replicated: Cell) -> None:
    check(world, replicated)


# -------------------------------------------------------------------------------------------------------- the batches


@pytest.mark.parametrize("make", [few_rows, lengths_change])
@pytest.mark.parametrize("cell", [HALVES, OUT_OF_ORDER, V, INTERLEAVED], ids=str)
def test_batches_may_be_short_and_of_changing_lengths(world: World, make: Make, cell: Cell) -> None:
    check(world, cell, make)


class SplitsToLengths(LanguageModule):
    """Gives every row the length that it needs."""

    def microbatch_split(self, batch: Row, num_microbatches: int) -> list[Row]:
        lengths = [max(2, int(mask.sum())) for mask in batch["attention_mask"]]
        return [
            {key: value[row : row + 1, :length] for key, value in batch.items()} for row, length in enumerate(lengths)
        ]


def test_parts_of_different_lengths_run_backwards_that_are_not_halved(world: World) -> None:
    check(world, HALVES, SplitsToLengths)


def moves_the_stages(ranks: int, microbatches: int) -> Schedule:
    return (zb_v if microbatches >= 4 else one_f_one_b)(ranks, microbatches)


def test_a_builder_that_places_stages_elsewhere_for_few_rows_is_refused(world: World) -> None:
    cell = Cell("zb_v", 2, strategy=(("schedule", moves_the_stages),))
    with pytest.raises(RankFailed, match=r"places the stages otherwise for 3 microbatches .* Place them alike"):
        world.run(train, cell, few_rows, size=2)


# ------------------------------------------------------------------------------------------------- the split backward


class CheckpointedTheOldWay(LanguageModule):
    def __init__(self) -> None:
        super().__init__()
        self.model.gradient_checkpointing_enable({"use_reentrant": True})


class HandsOnViews(LanguageModule):
    """What leaves a block is a part of a larger tensor, and not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.model.transformer.h:
            block.register_forward_hook(lambda _block, _given, output: view_of(output))


def view_of(output: Any) -> Any:
    hidden = output[0] if isinstance(output, tuple) else output
    view = torch.stack([hidden, -hidden], dim=-1)[..., 0]
    return (view, *output[1:]) if isinstance(output, tuple) else view


@pytest.mark.parametrize(
    "make", [first_stage_frozen, all_but_the_head_frozen, Checkpointed, CheckpointedTheOldWay, HandsOnViews]
)
@pytest.mark.parametrize("cell", [SPLIT, V], ids=str)
def test_a_split_backward_gives_every_gradient(world: World, make: Make, cell: Cell) -> None:
    check(world, cell, make)


def test_a_split_backward_runs_under_autocast(world: World) -> None:
    whole, split = (Cell(name, 2, precision="bf16-mixed", clip=False) for name in ("1f1b", "zb_h1"))
    seen = {cell: world.run(train, cell, size=2)[0] for cell in (whole, split)}
    for name, before in seen[whole].before.items():
        expected, change = (seen[cell].after[name] - before for cell in (whole, split))
        assert float((change - expected).norm()) <= 2e-2 * float(expected.norm()) + 1e-6, name


# -------------------------------------------------------------------------------------------------------- recomputing


@pytest.mark.parametrize(
    "cell",
    [
        Cell("1f1b", 4, strategy=(("recompute", "stages"),)),
        Cell("chimera", 4, strategy=(("recompute", (0, 2)),)),
        Cell("zb_v", 2, strategy=(("recompute", "stages"),)),
        Cell("zb_h1", 2, strategy=(("recompute", "blocks"),)),
        Cell("chimera_halving", 2, microbatches=2, strategy=(("recompute", "stages"),)),
    ],
    ids=str,
)
def test_recomputing_draws_the_same_masks_once_more(world: World, cell: Cell) -> None:
    parts = cell.microbatches * (2 if cell.schedule == HALVES.schedule else 1)
    single = world.run(train, Cell("1f1b", 1, microbatches=parts), dropout, size=1)[0]
    seen = world.run(train, cell, dropout, size=cell.size)[0]
    same_changes(seen, single)


@pytest.mark.parametrize("cell", [SPLIT, V, INTERLEAVED, Cell("hanayo", 2), OUT_OF_ORDER], ids=str)
def test_dropout_is_the_same_for_every_schedule(world: World, cell: Cell) -> None:
    single = world.run(train, Cell("1f1b", 1), dropout, size=1)[0]
    same_changes(world.run(train, cell, dropout, size=cell.size)[0], single)


# ---------------------------------------------------------------------------------------------------------- evaluation


def validated(cell: Cell) -> list[float]:
    """What a validation and the predictions of a trainer say."""
    L.seed_everything(0, verbose=False)
    module = Predicts()
    trainer = make_trainer(cell)
    loader = make_loader(make_rows("gpt2", 2 * 8), 8)
    (metrics,) = trainer.validate(module, loader, verbose=False)
    rows = trainer.predict(module, loader)
    sums = [float(row) for batch in rows for row in batch] if rows and rows[0] is not None else []
    return [metrics["val_loss"], *sums]


class Predicts(LanguageModule):
    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).logits.sum((1, 2))


@pytest.mark.parametrize("cell", [V, INTERLEAVED, Cell("chimera_split_v", 2), Cell("interleaved", 2, 2)], ids=str)
def test_evaluation_takes_the_stages_where_they_are(world: World, cell: Cell) -> None:
    (plain,) = world.run(validated, cell.reference, size=1)
    for seen in world.run(validated, cell, size=cell.size):
        assert seen[0] == pytest.approx(plain[0], rel=1e-5)
        if cell.replicas == 1:
            assert seen[1:] == pytest.approx(plain[1:], rel=1e-4, abs=1e-3)


# ------------------------------------------------------------------------------------------------------------ a trace


def traced(cell: Cell, folder: str) -> None:
    callbacks = [PipelineTrace(folder, at_step=1)]
    loader = make_loader(make_rows("gpt2", 6))
    make_trainer(cell, max_steps=1, callbacks=callbacks).fit(LanguageModule(exact=False), loader)


@pytest.mark.parametrize("cell", [Cell("zb_v", 2, microbatches=8), Cell("chimera_halving", 2)], ids=str)
def test_a_trace_of_few_rows_is_beside_the_simulation_of_what_ran(world: World, tmp_path: Path, cell: Cell) -> None:
    world.run(traced, cell, str(tmp_path), size=2)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    counts = Counter(event["pid"] for event in events if event["ph"] == "X" and event["tid"] == 0)
    assert len(counts) == 4  # of two ranks, measured and simulated
    assert len(set(counts.values())) == 1


# ------------------------------------------------------------------------------------------------------ one's own


def test_a_schedule_may_be_read_from_a_file(world: World, tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(v_half(2, 4).to_text())
    check(world, Cell("v_half", 2, strategy=(("schedule", str(path)),)))


def test_a_schedule_may_be_a_value(world: World) -> None:
    check(world, Cell("chimera_split", 2, strategy=(("schedule", chimera_split(2, 4)),)))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"schedule": "1f1b", "pipes": 4}, r"pipes=4, but schedule='1f1b' takes no pipes. .* chimera"),
        ({"schedule": "chimera", "chunks": 2}, r"takes no chunks. .* interleaved, hanayo"),
        ({"recompute": "all"}, r"recompute='all': give 'blocks' .* 'stages'"),
        ({"recompute": ["0"]}, r"recompute=\['0'\]"),
    ],
)
def test_options_that_a_schedule_does_not_take_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ChimeraStrategy(**arguments)


def test_recomputing_a_stage_that_is_not_there_is_refused_before_any_process_starts() -> None:
    with pytest.raises(ValueError, match=r"recompute=\[4\]: there is no stage 4, they are 0 to 3"):
        L.Trainer(accelerator="cpu", devices=2, strategy=ChimeraStrategy(schedule="zb_v", recompute=[4]), logger=False)
