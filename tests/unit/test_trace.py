import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from lightning_chimera.schedules import Action, Placement, chimera, forward_only, gpipe
from lightning_chimera.timeline import Costs, Span, Timeline, chrome_trace, simulate, write_trace


def of(trace: dict[str, Any], *phases: str) -> list[dict[str, Any]]:
    return [event for event in trace["traceEvents"] if event["ph"] in phases]


def test_each_action_is_a_slice_in_microseconds() -> None:
    timeline = Timeline("x", 2, (Span(1, Action.parse("3B5.1"), 0.25, 0.75),))
    (event,) = of(chrome_trace(timeline), "X")
    assert (event["name"], event["cat"], event["ts"], event["dur"]) == ("3B5.1", "backward", 250_000, 500_000)
    assert (event["pid"], event["tid"]) == (1, 0)
    assert event["args"] == {"stage": 3, "microbatch": 5, "pipe": 1, "kind": "backward"}


def test_pipes_have_their_own_colours() -> None:
    colours = {(event["args"]["pipe"], event["cname"]) for event in of(chrome_trace(simulate(chimera(4, 4))), "X")}
    assert {pipe for pipe, _ in colours} == {0, 1}
    assert len({colour for _, colour in colours}) == len(colours) == 2


def test_ranks_are_named_and_sorted() -> None:
    metadata = of(chrome_trace(simulate(gpipe(3, 1))), "M")
    names = {event["pid"]: event["args"]["name"] for event in metadata if event["name"] == "process_name"}
    order = {event["pid"]: event["args"]["sort_index"] for event in metadata if event["name"] == "process_sort_index"}
    threads = {event["args"]["name"] for event in metadata if event["name"] == "thread_name"}
    assert names == {0: "rank 0", 1: "rank 1", 2: "rank 2"}
    assert order == {0: 0, 1: 1, 2: 2}
    assert threads == {"compute"}


def test_each_message_is_an_arrow_from_its_producer_to_its_consumer() -> None:
    schedule = chimera(4, 6)
    trace = chrome_trace(simulate(schedule, Costs(1, 2, 0.5)))
    slices = of(trace, "X")

    def around(event: dict[str, Any]) -> str:
        (name,) = [
            x["name"] for x in slices if x["pid"] == event["pid"] and x["ts"] <= event["ts"] < x["ts"] + x["dur"]
        ]
        return name

    starts = {event["id"]: around(event) for event in of(trace, "s")}
    finishes = {event["id"]: around(event) for event in of(trace, "f")}
    assert all(event["bp"] == "e" for event in of(trace, "f"))
    assert starts.keys() == finishes.keys()
    arrows = Counter((starts[number], finishes[number]) for number in starts)
    assert arrows == Counter(
        (str(producer), str(action))
        for row in schedule.rows
        for action in row
        if (producer := schedule.producers.get(action)) is not None
    )


def test_no_arrow_runs_backwards_in_time() -> None:
    trace = chrome_trace(simulate(chimera(4, 8)))
    finishes = {event["id"]: event["ts"] for event in of(trace, "f")}
    assert all(event["ts"] <= finishes[event["id"]] for event in of(trace, "s"))


def test_several_timelines_stand_side_by_side() -> None:
    trace = chrome_trace({"simulated": simulate(gpipe(2, 2)), "measured": simulate(gpipe(3, 2))})
    names = {event["pid"]: event["args"]["name"] for event in of(trace, "M") if event["name"] == "process_name"}
    assert list(names.values()) == [
        "simulated, rank 0",
        "simulated, rank 1",
        "measured, rank 0",
        "measured, rank 1",
        "measured, rank 2",
    ]
    assert Counter(event["pid"] for event in of(trace, "X")) == dict.fromkeys(range(5), 4)
    assert set(Counter(event["id"] for event in of(trace, "s")).values()) == {1}
    assert sorted(event["id"] for event in of(trace, "s")) == sorted(event["id"] for event in of(trace, "f"))


def test_a_timeline_without_messages_has_no_arrows() -> None:
    assert of(chrome_trace(simulate(forward_only(Placement.down(1), 3))), "s", "f") == []


def test_a_part_of_a_timeline_can_be_traced() -> None:
    timeline = Timeline("x", 2, (Span(1, Action.parse("1F0"), 0, 1), Span(1, Action.parse("1B0"), 1, 2)))
    assert of(chrome_trace(timeline), "s", "f") == []


def test_a_trace_file_is_json_and_its_folders_are_made(tmp_path: Path) -> None:
    path = write_trace(str(tmp_path / "new" / "folder" / "trace.json"), simulate(gpipe(2, 2)))
    assert path == tmp_path / "new" / "folder" / "trace.json"
    assert json.loads(path.read_text()) == chrome_trace(simulate(gpipe(2, 2)))
    assert [file.name for file in path.parent.iterdir()] == ["trace.json"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_trace(tmp_path / "trace.json", simulate(gpipe(2, 2)))
    before = path.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        write_trace(path, simulate(gpipe(3, 2)))
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["trace.json"]
