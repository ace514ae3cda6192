import dataclasses
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from lightning_chimera.schedules import chimera, chimera_halving, chimera_split, gpipe, interleaved, one_f_one_b, zb_v
from lightning_chimera.timeline import Costs, SyncPolicy, Timeline, simulate, synchronize, upward_stages
from lightning_chimera.timeline.plot import plot_timelines, save_figure


def cells(axes: Axes) -> list[tuple[float, float, float, str]]:
    """The left and right end, the middle line and the colour of each cell, as drawn."""
    found = []
    for bars in axes.collections:
        assert isinstance(bars, PolyCollection)
        for path, colour in zip(bars.get_paths(), bars.get_facecolor(), strict=True):
            box = path.get_extents()
            found.append((round(box.x0, 9), round(box.x1, 9), (box.y0 + box.y1) / 2, to_hex(colour)))
    return found


def test_each_action_is_a_cell_at_its_time_on_the_row_of_its_rank() -> None:
    timeline = simulate(chimera(4, 8), Costs(1, 1.5))
    (axes,) = plot_timelines([timeline]).axes
    drawn = sorted(cell[:3] for cell in cells(axes))
    assert drawn == sorted((span.start, span.end, span.rank) for span in timeline.spans)


def test_rank_0_is_on_top() -> None:
    (axes,) = plot_timelines([simulate(gpipe(3, 2))]).axes
    low, high = axes.get_ylim()
    assert low > high
    assert [label.get_text() for label in axes.get_yticklabels()] == ["rank 0", "rank 1", "rank 2"]


def test_kind_and_direction_have_a_colour_each() -> None:
    timeline = simulate(chimera(4, 4))
    (axes,) = plot_timelines([timeline]).axes
    colour_at = {(start, row): colour for start, _, row, colour in cells(axes)}
    colours = {(span.action.kind, span.action.pipe, colour_at[span.start, span.rank]) for span in timeline.spans}
    assert len(colours) == len({colour for *_, colour in colours}) == 4


@pytest.mark.parametrize(("stages", "microbatches"), [(4, 8), (8, 16)])
def test_every_cell_holds_the_number_of_its_microbatch_within_its_width(stages: int, microbatches: int) -> None:
    timelines = [simulate(build(stages, microbatches)) for build in (chimera, gpipe, one_f_one_b)]
    figure = plot_timelines(timelines)
    figure.draw_without_rendering()
    for axes, timeline in zip(figure.axes, timelines, strict=True):
        numbers = {(*text.get_position(), text.get_text()) for text in axes.texts}
        assert numbers == {((s.start + s.end) / 2, s.rank, str(s.action.microbatch)) for s in timeline.spans}
        shortest = min(span.duration for span in timeline.spans)
        for text in axes.texts:
            assert text.get_fontsize() >= 6
            box = text.get_window_extent().transformed(axes.transData.inverted())
            assert box.width < 0.95 * shortest


def test_numbers_that_do_not_fit_are_left_out() -> None:
    (axes,) = plot_timelines([simulate(gpipe(4, 400))]).axes
    assert len(axes.texts) == 0


def test_the_title_gives_name_makespan_and_bubble() -> None:
    figure = plot_timelines([simulate(gpipe(4, 8)), simulate(chimera(4, 8))])
    assert [axes.get_title("left") for axes in figure.axes] == [
        "gpipe: makespan 33, bubble 27.3%",
        "chimera: makespan 30, bubble 20.0%",
    ]


def test_panels_share_the_time_axis() -> None:
    figure = plot_timelines([simulate(chimera(4, 8)), simulate(gpipe(4, 8))], time_label="seconds")
    assert [axes.get_xlim() for axes in figure.axes] == [(0, 33), (0, 33)]
    assert [axes.get_xlabel() for axes in figure.axes] == ["", "seconds"]


def labels(figure: Figure) -> list[str]:
    (legend,) = figure.legends
    return [text.get_text() for text in legend.get_texts()]


def test_the_legend_names_what_is_drawn() -> None:
    assert labels(plot_timelines([simulate(one_f_one_b(2, 2))])) == ["forward", "backward", "bubble"]
    assert labels(plot_timelines([simulate(chimera(2, 2))])) == [
        "forward down",
        "backward down",
        "forward up",
        "backward up",
        "bubble",
    ]


def test_the_legend_names_the_parts_of_a_backward_and_all_reduces() -> None:
    schedule = chimera_split(2, 2)
    timeline = synchronize(schedule, simulate(schedule), SyncPolicy.EAGER)
    words = [f"{kind} {way}" for way in ("down", "up") for kind in ("forward", "input gradient", "weight gradient")]
    assert labels(plot_timelines([timeline])) == [*words, "bubble", "all-reduce"]


def test_the_whole_legend_is_in_the_picture_however_long_the_labels_are() -> None:
    timeline = simulate(zb_v(4, 4))
    named = dataclasses.replace(timeline, labels=("position 0 (global rank 0)",) * 4)
    figure = plot_timelines([named])
    box = figure.legends[0].get_window_extent()
    assert len(labels(figure)) == 7
    assert 0 < box.x0 < box.x1 < figure.bbox.x1


def test_the_shade_of_a_cell_is_the_way_of_its_pipe() -> None:
    assert upward_stages(simulate(chimera(8, 8, pipes=4))) == {(pipe, s) for pipe in (2, 3) for s in range(8)}
    assert upward_stages(simulate(zb_v(4, 4))) == {(0, stage) for stage in range(4, 8)}
    assert upward_stages(simulate(interleaved(4, 4))) == set()
    assert upward_stages(simulate(gpipe(1, 1))) == set()


def test_an_all_reduce_is_a_bar_on_the_row_of_each_of_its_ranks() -> None:
    schedule = chimera(4, 4)
    timeline = synchronize(schedule, simulate(schedule), SyncPolicy.LAZY, cost=3)
    (axes,) = plot_timelines([timeline]).axes
    bars = sorted((start, end, round(row)) for start, end, row, colour in cells(axes) if colour == "#2b2b2b")
    assert bars == sorted((sync.start, sync.end, rank) for sync in timeline.syncs for rank in sync.ranks)
    assert axes.get_title("left") == "chimera: makespan 16, bubble 25.0%, all-reduces end at 22"
    assert axes.get_xlim() == (0, 22)


def test_half_a_backward_is_named_by_its_half() -> None:
    (axes,) = plot_timelines([simulate(chimera_halving(2, 2))]).axes
    assert {text.get_text() for text in axes.texts} == {"0", "1", "0a", "0b", "1a", "1b"}


@pytest.mark.parametrize("timelines", [[], [Timeline("x", 2, ())]])
def test_nothing_cannot_be_drawn(timelines: list[Timeline]) -> None:
    with pytest.raises(ValueError, match="nothing to draw"):
        plot_timelines(timelines)


@pytest.mark.parametrize(("suffix", "start"), [(".png", b"\x89PNG"), (".svg", b"<?xml")])
def test_a_figure_is_written_by_its_suffix_and_is_always_the_same(tmp_path: Path, suffix: str, start: bytes) -> None:
    timelines = [simulate(chimera(2, 2))]
    first = save_figure(plot_timelines(timelines), str(tmp_path / "new" / f"first{suffix}"))
    second = save_figure(plot_timelines(timelines), tmp_path / f"second{suffix}")
    assert first == tmp_path / "new" / f"first{suffix}"
    assert first.read_bytes().startswith(start)
    assert first.read_bytes() == second.read_bytes()


@pytest.mark.parametrize("name", ["figure.pdf", "figure", "figure.PNG.gif"])
def test_another_suffix_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match=r"written as \.png or \.svg.*Change the suffix"):
        save_figure(plot_timelines([simulate(gpipe(1, 1))]), tmp_path / name)
    assert list(tmp_path.iterdir()) == []


def test_pyplot_is_not_loaded() -> None:
    code = "import sys, lightning_chimera.timeline.plot; sys.exit('matplotlib.pyplot' in sys.modules)"
    lines = [
        "import importlib.util, sys, types",
        # The package's own __init__ loads the whole of Lightning, which is not the question here.
        "package = types.ModuleType('lightning_chimera')",
        "package.__path__ = list(importlib.util.find_spec('lightning_chimera').submodule_search_locations)",
        "sys.modules['lightning_chimera'] = package",
        code,
    ]
    assert subprocess.run([sys.executable, "-c", "\n".join(lines)], check=False).returncode == 0


def test_ranks_are_called_by_their_labels() -> None:
    timeline = dataclasses.replace(simulate(gpipe(2, 2)), labels=("first", "second"))
    axes = plot_timelines([timeline]).axes[0]
    assert [tick.get_text() for tick in axes.get_yticklabels()] == ["first", "second"]


def test_every_rank_has_a_label_or_none_has() -> None:
    with pytest.raises(ValueError, match="1 labels for 2 ranks"):
        dataclasses.replace(simulate(gpipe(2, 2)), labels=("first",))
