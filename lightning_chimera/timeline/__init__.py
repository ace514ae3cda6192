"""Timelines: what a schedule costs, simulated or measured. ``plot`` is apart, since it needs matplotlib."""

from __future__ import annotations

from lightning_chimera.timeline.simulate import Costs, simulate
from lightning_chimera.timeline.sync import SyncPolicy, meets_in_order, sync_order, sync_places, synchronize
from lightning_chimera.timeline.timeline import (
    Grid,
    Span,
    SyncSpan,
    Timeline,
    cell_text,
    render_timeline,
    sample,
    upward_stages,
)
from lightning_chimera.timeline.trace import chrome_trace, write_trace

__all__ = [
    "Costs",
    "Grid",
    "Span",
    "SyncPolicy",
    "SyncSpan",
    "Timeline",
    "cell_text",
    "chrome_trace",
    "meets_in_order",
    "render_timeline",
    "sample",
    "simulate",
    "sync_order",
    "sync_places",
    "synchronize",
    "upward_stages",
    "write_trace",
]
