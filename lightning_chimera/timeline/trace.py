"""Writes timelines in the Chrome trace format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lightning_chimera.schedules.action import producers
from lightning_chimera.timeline.timeline import Span, SyncSpan, Timeline

Event = dict[str, Any]

_COMPUTE = 0
_SUMS = 1
_MICROSECONDS = 1e6
# Names of the viewer's palette, one for each pipe in turn.
_COLOURS = ("thread_state_running", "thread_state_runnable", "thread_state_iowait", "thread_state_uninterruptible")


def chrome_trace(timelines: Mapping[str, Timeline] | Timeline) -> Event:
    """Return a trace as an object that ``json.dump`` can write.

    A rank is a process; each message between two ranks is an arrow. Several timelines stand one below the other on one
    time axis.

    Args:
        timelines: one timeline, or several under their titles.
    """
    events: list[Event] = []
    if isinstance(timelines, Timeline):
        events += _events(timelines, "", 0)
    else:
        first_process = 0
        for title, timeline in timelines.items():
            events += _events(timeline, f"{title}, ", first_process)
            first_process += timeline.num_ranks
    # An arrow has one identifier at both of its ends, different from those of all other arrows.
    arrows = (event for event in events if event["ph"] in "sf")
    for number, event in enumerate(arrows):
        event["id"] = number // 2
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def write_trace(path: str | os.PathLike[str], timelines: Mapping[str, Timeline] | Timeline) -> Path:
    """Write a trace file and return its path; folders are made, and an interrupted write leaves no file behind.

    Args:
        path: the JSON file to write.
        timelines: one timeline, or several under their titles.

    Raises:
        OSError: if the file cannot be written.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}.unfinished")
    try:
        unfinished.write_text(json.dumps(chrome_trace(timelines)) + "\n", encoding="ascii")
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return path


def _events(timeline: Timeline, prefix: str, first_process: int) -> Iterator[Event]:
    for rank in range(timeline.num_ranks):
        process = first_process + rank
        yield _metadata("process_name", process, name=f"{prefix}{timeline.label(rank)}")
        yield _metadata("process_sort_index", process, sort_index=process)
        yield _metadata("thread_name", process, name="compute")
    for sync in timeline.syncs:
        yield from _sums(sync, first_process)
    for span in timeline.spans:
        yield _slice(span, first_process)
    yield from _arrows(timeline, first_process)


def _sums(sync: SyncSpan, first_process: int) -> Iterator[Event]:
    """Yield an all-reduce on a row of its own below each of its ranks."""
    for rank in sync.ranks:
        yield {
            "ph": "X",
            "name": f"all-reduce {', '.join(map(str, sync.stages))}",
            "cat": "all-reduce",
            "pid": first_process + rank,
            "tid": _SUMS,
            "ts": sync.start * _MICROSECONDS,
            "dur": (sync.end - sync.start) * _MICROSECONDS,
            "args": {"stages": list(sync.stages)},
        }


def _metadata(event: str, process: int, **args: str | int) -> Event:
    return {"ph": "M", "name": event, "pid": process, "tid": _COMPUTE, "args": args}


def _slice(span: Span, first_process: int) -> Event:
    action = span.action
    return {
        "ph": "X",
        "name": str(action),
        "cat": action.kind.name.lower(),
        "pid": first_process + span.rank,
        "tid": _COMPUTE,
        "ts": span.start * _MICROSECONDS,
        "dur": span.duration * _MICROSECONDS,
        "cname": _COLOURS[action.pipe % len(_COLOURS)],
        "args": {
            "stage": action.stage,
            "microbatch": action.microbatch,
            "pipe": action.pipe,
            "kind": action.kind.name.lower(),
        },
    }


def _arrows(timeline: Timeline, first_process: int) -> Iterator[Event]:
    """Yield the start and the finish of the arrow of each message, next to each other."""
    spans = {span.action: span for span in timeline.spans}
    made_by = producers(spans)
    for span in timeline.spans:
        producer = spans[made_by.get(span.action, span.action)]
        if producer.rank == span.rank:
            continue
        name = f"{producer.action} -> {span.action}"
        arrow = {"name": name, "cat": "message", "tid": _COMPUTE}
        # Viewers tie an arrow to the slice around its time, so it starts shortly before the end of the producer's.
        start = (producer.start + 0.99 * producer.duration) * _MICROSECONDS
        yield {**arrow, "ph": "s", "pid": first_process + producer.rank, "ts": start}
        yield {**arrow, "ph": "f", "bp": "e", "pid": first_process + span.rank, "ts": span.start * _MICROSECONDS}
