"""Draws timelines as a figure: one panel each, on one time axis."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from lightning_chimera.schedules.action import Action, Kind
from lightning_chimera.timeline.timeline import Timeline, upward_stages

# Dark and light of four hues that colour-blind readers tell apart, with the ink that is legible on each.
_DOWN, _UP = 0, 1
_FILL = {
    (Kind.FORWARD, _DOWN): "#1f5fa8",
    (Kind.FORWARD, _UP): "#a9cdf0",
    (Kind.BACKWARD, _DOWN): "#c4560a",
    (Kind.BACKWARD, _UP): "#fbcf99",
    (Kind.INPUT, _DOWN): "#9c3f74",
    (Kind.INPUT, _UP): "#efc4dc",
    (Kind.WEIGHT, _DOWN): "#0f7a59",
    (Kind.WEIGHT, _UP): "#a4dcc6",
}
_NAME = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "input gradient",
    Kind.WEIGHT: "weight gradient",
}
_SYNC = "#2b2b2b"
_INK = {_DOWN: "white", _UP: "#1a1a1a"}
_EDGE = "#ffffff"
_AFTER = "#e9e9e9"
_GREY = "#5a5a5a"

_LEGEND_COLUMNS = 7
_WIDTH = 12.0
_RIGHT, _TOP, _BOTTOM = 0.2, 0.25, 0.6
_LABEL = 0.074
"""Width of a letter of a rank's label."""
_ROW = 0.27
_GAP = 0.55
_POINTS = 72
_MAX_FONT = 9.0
_MIN_FONT = 3.5
_DIGIT = 0.64
"""Width of a digit, in font sizes."""


def plot_timelines(timelines: Sequence[Timeline], *, time_label: str = "time") -> Figure:
    """Draw timelines below each other on one time axis.

    A panel shows the ranks as rows, rank 0 on top. A cell holds the number of its microbatch. What is white is bubble;
    what is grey comes after the end of the timeline. The hue tells forward from backward, and the parts of a backward
    from each other; where a pipe runs down the ranks its cells are dark, where it runs up they are light. A bar at the
    bottom of a row is an all-reduce of gradients.

    Args:
        timelines: what to draw, from top to bottom.
        time_label: label of the time axis, with its unit.

    Raises:
        ValueError: if there is nothing to draw.
    """
    end = max((timeline.end for timeline in timelines), default=0.0)
    if end == 0:
        raise ValueError("There is nothing to draw: give at least one timeline in which something runs.")
    panels = [_ROW * timeline.num_ranks for timeline in timelines]
    height = _TOP + sum(panels) + _GAP * len(panels) + _BOTTOM
    figure = Figure(figsize=(_WIDTH, height), facecolor="white")
    labels = [timeline.label(rank) for timeline in timelines for rank in range(timeline.num_ranks)]
    left = 0.3 + _LABEL * max(map(len, labels))
    points = (_WIDTH - left - _RIGHT) * _POINTS / end
    top = height - _TOP
    for timeline, panel in zip(timelines, panels, strict=True):
        top -= _GAP + panel
        box = (left / _WIDTH, top / height, (_WIDTH - left - _RIGHT) / _WIDTH, panel / height)
        axes = figure.add_axes(box, xlim=(0, end), ylim=(timeline.num_ranks - 0.5, -0.5))
        _style(axes, timeline)
        _draw(axes, timeline, points)
    for axes in figure.axes[:-1]:
        axes.tick_params(labelbottom=False)
    figure.axes[-1].set_xlabel(time_label)
    _add_legend(figure, timelines, left)
    return figure


def save_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a figure as PNG or SVG, by the suffix of the path, and return the path; folders are made.

    Raises:
        ValueError: if the suffix is another one.
        OSError: if the file cannot be written.
    """
    path = Path(path)
    if path.suffix not in (".png", ".svg"):
        raise ValueError(f"A figure is written as .png or .svg; got {str(path)!r}. Change the suffix.")
    path.parent.mkdir(parents=True, exist_ok=True)
    # With a fixed salt and no date a figure always gives the same bytes, which version control likes.
    with mpl.rc_context({"svg.hashsalt": "lightning-chimera"}):
        figure.savefig(path, dpi=200, metadata={"Date": None} if path.suffix == ".svg" else None)
    return path


def _style(axes: Axes, timeline: Timeline) -> None:
    synced = f", all-reduces end at {timeline.end:.4g}" if timeline.syncs else ""
    axes.set_title(
        f"{timeline.name}: makespan {timeline.makespan:.4g}, bubble {timeline.bubble:.1%}{synced}",
        loc="left",
        fontsize=11,
        fontweight="bold",
        pad=5,
    )
    axes.set_yticks(range(timeline.num_ranks), list(map(timeline.label, range(timeline.num_ranks))), fontsize=9)
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", color=_GREY, labelsize=9)
    for side in axes.spines.values():
        side.set_color(_GREY)
        side.set_linewidth(0.6)


def _draw(axes: Axes, timeline: Timeline, points: float) -> None:
    """Draw the cells of a panel; ``points`` is the width of one unit of time in points."""
    font = _font_size(timeline, points)
    styles = _styles(timeline)
    axes.axvspan(timeline.end, axes.get_xlim()[1], color=_AFTER, linewidth=0)
    for rank in range(timeline.num_ranks):
        spans = timeline.of_rank(rank)
        axes.broken_barh(
            [(span.start, span.duration) for span in spans],
            (rank - 0.5, 1),
            facecolors=[_FILL[styles[span.action]] for span in spans],
            edgecolors=_EDGE,
            linewidth=0.7,
        )
        for span in spans:
            text = f"{span.action.microbatch}{span.action.half}"
            if font >= _MIN_FONT and len(text) * _DIGIT * font <= span.duration * points:
                middle = (span.start + span.end) / 2
                ink = _INK[styles[span.action][1]]
                axes.text(middle, rank, text, color=ink, size=font, ha="center", va="center_baseline")
    for sync in timeline.syncs:
        for rank in sync.ranks:
            bar = [(sync.start, sync.end - sync.start)]
            axes.broken_barh(bar, (rank + 0.34, 0.16), facecolors=_SYNC, edgecolors=_EDGE, linewidth=0.5)


def _styles(timeline: Timeline) -> dict[Action, tuple[Kind, int]]:
    """Return kind and direction of each action."""
    upward = upward_stages(timeline)
    actions = (span.action for span in timeline.spans)
    return {action: (action.kind, _UP if (action.pipe, action.stage) in upward else _DOWN) for action in actions}


def _font_size(timeline: Timeline, points: float) -> float:
    """Return the size at which the longest number fits into an ordinary cell of the shorter kind."""
    digits = max((len(f"{span.action.microbatch}{span.action.half}") for span in timeline.spans), default=1)
    widths: dict[Kind, list[float]] = {}
    for span in timeline.spans:
        widths.setdefault(span.action.kind, []).append(span.duration * points)
    narrowest = min(map(statistics.median, widths.values()), default=0.0)
    return min(_MAX_FONT, 0.85 * narrowest / (digits * _DIGIT))


def _add_legend(figure: Figure, timelines: Sequence[Timeline], left: float) -> None:
    used = {style for timeline in timelines for style in _styles(timeline).values()}
    directions = {_DOWN: "down", _UP: "up"} if any(direction == _UP for _, direction in used) else {_DOWN: ""}
    handles = [
        Patch(facecolor=_FILL[kind, direction], label=f"{_NAME[kind]} {word}".rstrip())
        for direction, word in directions.items()
        for kind in Kind
        if (kind, direction) in used
    ]
    handles.append(Patch(facecolor="white", edgecolor=_GREY, linewidth=0.6, label="bubble"))
    if any(timeline.syncs for timeline in timelines):
        handles.append(Patch(facecolor=_SYNC, label="all-reduce"))
    top = 1 - 0.12 / figure.get_figheight()
    legend = figure.legend(
        handles=handles,
        loc="upper left",
        bbox_to_anchor=(left / _WIDTH, top),
        ncols=len(handles) if len(handles) <= _LEGEND_COLUMNS else (len(handles) + 1) // 2,
        frameon=False,
        borderaxespad=0,
        borderpad=0,
        fontsize=9.5,
        handlelength=1.4,
        handleheight=0.9,
        columnspacing=1.6,
    )
    beyond = legend.get_window_extent().x1 / figure.dpi - (_WIDTH - _RIGHT)
    if beyond > 0:  # long labels of ranks leave less room
        legend.set_bbox_to_anchor(((left - beyond) / _WIDTH, top))
