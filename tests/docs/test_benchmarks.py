"""Every benchmark that docs/performance.md shows works, takes the one form, and says so when a bar does not hold."""

import json
import os
import runpy
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.peers import SleepingStage
from benchmarks.ranks import RankFailed, run
from benchmarks.report import Bar, Report
from benchmarks.schedules import Pace
from lightning_chimera.schedules import Placement
from lightning_chimera.timeline import Span

ROOT = Path(__file__).parents[2]
builder = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_performance.py")))


@pytest.mark.parametrize("benchmark", sorted({measurement.benchmark for measurement in builder.MEASUREMENTS}))
def test_a_benchmark_runs_quickly_and_writes_rows_and_bars(benchmark: str, tmp_path: Path) -> None:
    path = tmp_path / "made" / "report.json"
    line = [sys.executable, "-m", f"benchmarks.{benchmark}", "--quick", "--json", str(path)]
    result = subprocess.run(line, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    written = json.loads(path.read_text())
    assert set(written) == {"about", "rows", "bars"}
    assert {"title", "machine", "cores", "python", "torch"} <= set(written["about"])
    assert written["rows"]
    assert all(set(row) == set(written["rows"][0]) for row in written["rows"])
    assert written["bars"]
    assert all(set(bar) == {"name", "value", "limit", "holds"} and bar["holds"] is True for bar in written["bars"])
    assert all(str(row[next(iter(row))]) in result.stdout for row in written["rows"])


def test_the_page_is_made_from_the_benchmarks_and_their_figures() -> None:
    assert builder.PAGE.read_text() == builder.page(), "run python docs/make_performance.py"
    assert {path.stem for path in builder.FIGURES.glob("*")} <= {other.name for other in builder.MEASUREMENTS}


@pytest.mark.parametrize(
    ("bars", "code"),
    [
        ([Bar("a", 1.0, 1.0)], 0),
        ([Bar("a", 1.0, 1.0), Bar("b", 1.1, 1.0)], 1),
        ([Bar("a", float("nan"), 1.0)], 1),
        ([], 1),
    ],
)
def test_the_exit_code_says_whether_all_bars_hold(bars: list[Bar], code: int, tmp_path: Path) -> None:
    report = Report("title", rows=[{"x": 1}], bars=bars)
    assert report.finish(tmp_path / "report.json") == code
    written = json.loads((tmp_path / "report.json").read_text())
    assert [bar["holds"] for bar in written["bars"]] == [bar.holds for bar in bars]


def test_a_section_shows_its_figures_and_the_bars_that_do_not_hold(tmp_path: Path) -> None:
    figures: dict[str, Any] = Report(
        "t", {"ranks": 4}, [{"x_ms": 1.23456}], [Bar("good", 1, 2), Bar("bad", 3, 2)]
    ).as_json()
    (tmp_path / "a.json").write_text(json.dumps(figures))
    measurement = builder.MEASUREMENTS[0]._replace(name=str(tmp_path / "a"))
    text = "\n".join(builder._section(measurement))
    assert "ranks 4." in text
    assert "| x ms |\n| --- |\n| 1.235 |" in text
    assert "1 of 2 bars hold." in text
    assert "| bad | 3 | 2 | no |" in text
    assert "good" not in text


def _hang() -> None:
    time.sleep(60)


def _die_on_rank_1() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    time.sleep(60)


def _raise_on_rank_1() -> None:
    if dist.get_rank() == 1:
        raise ValueError("no")
    time.sleep(60)


@pytest.mark.parametrize(
    ("function", "limit", "message"),
    [
        (_hang, 1.0, r"Ranks \[0, 1\] of 2 were still running"),
        (_die_on_rank_1, 30.0, "Rank 1 of 2 has died"),
        (_raise_on_rank_1, 30.0, "Rank 1 of 2 failed first.*ValueError: no"),
    ],
)
def test_a_world_that_fails_is_ended(function: Callable[[], None], limit: float, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(RankFailed, match=f"(?s){message}"):
        run(function, size=2, limit=limit)
    assert time.monotonic() - start < 25


def _parts_of_a_backward() -> list[tuple[str, float]]:
    """What a sleeping stage notes: a backward in parts, a whole one, and that of a first stage."""
    pace, spans = Pace(unit=0.01, boundary=64), list[Span]()
    stage = SleepingStage(0, Placement.down(2), pace, rank=0)
    stage.begin(spans)
    gradient, entered = torch.ones(1, 16), torch.zeros(1, 16, requires_grad=True)
    left = stage(entered)
    torch.autograd.grad(left, entered, gradient, retain_graph=True)
    torch.autograd.grad(left, stage.weight, gradient)
    torch.autograd.backward(stage(entered), gradient)
    torch.autograd.backward(stage(torch.zeros(1, 16)), gradient)
    return [(str(span.action), span.duration) for span in spans]


def test_a_sleeping_stage_of_torch_sleeps_for_each_part_of_a_backward_once() -> None:
    (noted,) = run(_parts_of_a_backward, size=1, limit=30)
    assert [action for action, _ in noted] == ["0F0", "0I0", "0W0", "0F1", "0B1", "0F2", "0B2"]
    for (_, duration), units in zip(noted, [1, 1, 1, 1, 2, 1, 2], strict=True):
        assert duration >= units * 0.01
