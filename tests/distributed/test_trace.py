"""PipelineTrace logs and draws what a pipeline did."""

import json
import math
import time
import warnings
from pathlib import Path
from statistics import fmean
from types import SimpleNamespace
from typing import Any

import lightning as L
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from lightning_chimera import ChimeraStrategy
from lightning_chimera.callbacks import PipelineTrace, measured_sums
from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.flops import training_flops
from lightning_chimera.timeline import SyncSpan, Timeline

from .fidelity import Cell, make_trainer
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import World

CELLS = [
    Cell("chimera", 2),
    Cell("1f1b", 2, replicas=2),
    Cell("1f1b", 2, replicas=2, strategy=(("innermost", "replicas"),)),
]


class Slow(LanguageModule):
    """Global rank 0 comes late to the sums, which start behind the step as the number of labels is not known before."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**{**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] % 3 == 0, -100)}).loss

    def on_before_zero_grad(self, optimizer: Any) -> None:
        if self.trainer.global_rank == 0:
            time.sleep(0.2)


def traced(cell: Cell, folder: str) -> tuple[list[dict[str, float]], list[tuple[float, float]]]:
    """What was logged after each step, and the bubble and peak of each step's timeline."""
    logged, seen = [], []

    class Notes(L.Callback):
        def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
            logged.append({name: float(value) for name, value in trainer.callback_metrics.items() if "/" in name})
            assert isinstance(trainer.strategy, ChimeraStrategy)
            timeline = trainer.strategy.timeline()
            assert timeline is not None
            seen.append((timeline.bubble, float(max(timeline.peak_activations))))

    trace = PipelineTrace(folder, at_step=1, every_n_steps=2, peak_flops=1e9)
    trainer = make_trainer(cell, max_steps=4, callbacks=[trace, Notes()])
    trainer.fit(Slow(exact=False), make_loader(make_rows("gpt2", 4 * ROWS * cell.replicas)))
    return logged, seen


@pytest.mark.contract(
    "Callbacks", "`PipelineTrace` logs bubble, sync wait, peak activations and model FLOP utilization"
)
@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_the_figures_of_some_steps_are_logged_alike_on_every_rank(world: World, tmp_path: Path, cell: Cell) -> None:
    ranks = world.run(traced, cell, str(tmp_path), size=cell.size)
    bubbles = [[timeline[0] for timeline in seen] for _, seen in ranks]  # of each rank's own pipeline
    assert all(logged == ranks[0][0] for logged, _ in ranks)
    logged, seen = ranks[0]
    assert logged[0] == {}
    for step in (1, 3):
        figures = logged[step]
        assert set(figures) == {f"pipeline/{name}" for name in ("bubble", "sync_wait", "peak_activations", "mfu")}
        _, peak = seen[step]
        assert figures["pipeline/bubble"] == pytest.approx(fmean(own[step] for own in bubbles), abs=0.01)
        assert 0 < figures["pipeline/bubble"] < 1
        assert figures["pipeline/peak_activations"] == peak
        assert 0 < figures["pipeline/mfu"] < 1
    assert logged[2] == logged[1]  # those of the second step
    assert logged[3]["pipeline/sync_wait"] > 0.2 / cell.size / 2  # of one rank at least, on average


@pytest.mark.parametrize(("device", "warned"), [("cuda", 1), ("cpu", 0)])
def test_a_device_that_works_behind_the_host_is_warned_of(device: str, warned: int) -> None:
    trainer: Any = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device(device)))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        PipelineTrace(every_n_steps=0).on_train_start(trainer, LanguageModule())
    assert len([one for one in seen if "show when work was handed to the device" in str(one.message)]) == warned


def test_the_picture_and_the_trace_show_sums_measured_and_simulated(world: World, tmp_path: Path) -> None:
    world.run(traced, Cell("chimera", 2), str(tmp_path), size=2)
    assert (tmp_path / "timeline.png").stat().st_size > 10_000
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    sums = [event for event in events if event.get("cat") == "all-reduce"]
    assert {event["pid"] for event in sums} == {0, 1, 2, 3}  # two ranks, measured and simulated
    assert {event["tid"] for event in sums} == {1}


def test_a_sum_costs_what_it_takes_from_the_last_start_on() -> None:
    syncs = SyncSpan((1,), (0,), 1.0, 5.0), SyncSpan((1,), (1,), 3.0, 5.0), SyncSpan((0, 1), (0,), 6.0, 7.0)
    assert measured_sums(Timeline("two", 2, (), (), syncs), 2) == [0.5, 2.5]


@pytest.mark.parametrize("kind", ["gpt2", "bert"])
def test_the_operations_of_a_model_are_those_that_torch_counts(kind: str) -> None:
    module = LanguageModule(kind, attention="eager")
    batch = torch.utils.data.default_collate(make_rows(kind, 4, padded=False))
    with FlopCounterMode(display=False) as counter:
        module.model(**batch).loss.backward()
    counted = counter.get_total_flops()
    own = training_flops(module, find_anatomy(module), [torch.Size((4, 16, 32))])
    assert own == pytest.approx(counted, rel=0.02)


def test_recomputing_changes_no_operations_and_freezing_does() -> None:
    module = LanguageModule("gpt2")
    shapes = [torch.Size((2, 16, 32))]
    whole = training_flops(module, find_anatomy(module), shapes)
    module.model.transformer.h.requires_grad_(False)
    matrices = sum(p.numel() for p in module.model.transformer.h.parameters() if p.ndim >= 2)
    assert whole - training_flops(module, find_anatomy(module), shapes) == 2 * 2 * 16 * matrices


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"at_step": 0}, "steps are counted from 1"),
        ({"every_n_steps": -1}, "or 0 to log nothing"),
        ({"peak_flops": 0.0}, "such as 1e12"),
        ({"peak_flops": math.nan}, "such as 1e12"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineTrace(**arguments)
