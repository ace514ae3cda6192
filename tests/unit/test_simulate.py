import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_chimera.schedules import (
    SCHEDULES,
    Action,
    Placement,
    Schedule,
    ScheduleError,
    chimera,
    forward_only,
    get_family,
    gpipe,
)
from lightning_chimera.timeline import Costs, Span, Timeline, render_timeline, sample, simulate


def span(rank: int, action: str, start: float, end: float) -> Span:
    return Span(rank, Action.parse(action), start, end)


def times(timeline: Timeline) -> dict[str, tuple[float, float]]:
    return {str(span.action): (span.start, span.end) for span in timeline.spans}


def test_costs_are_one_and_two_unless_told_otherwise() -> None:
    assert simulate(gpipe(2, 2)) == simulate(gpipe(2, 2), Costs(1, 2, 0))


@pytest.mark.parametrize(
    ("text", "costs"),
    [
        ("1:2", Costs(1, 2)),
        ("1:1:1", Costs(1, 2, weight=1)),
        ("2:1.5:0", Costs(2, 1.5, weight=0)),
        ("0.5:1e-1", Costs(0.5, 0.1)),
    ],
)
def test_costs_have_a_text_form(text: str, costs: Costs) -> None:
    assert Costs.parse(text) == costs


def test_latency_is_added_to_parsed_costs() -> None:
    assert Costs.parse("1:2", latency=0.5) == Costs(1, 2, 0.5)


@pytest.mark.parametrize(
    "text", ["", "1", "1:", "1:2:3:4", "1:x", "1,2", "-1:2", "1:-2", "0:1", "1:0", "1:3:-1", "nan:1", "1:nan"]
)
def test_a_text_that_is_no_cost_is_refused_by_name(text: str) -> None:
    with pytest.raises(ValueError, match="is no cost") as caught:
        Costs.parse(text)
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf")])
@pytest.mark.parametrize("noun", ["forward", "backward", "latency"])
def test_a_time_that_cannot_be_is_refused(noun: str, value: float) -> None:
    with pytest.raises(ValueError, match=f"{noun} time must be a finite number, 0 or more"):
        Costs(**{noun: value})
    if noun != "latency":
        with pytest.raises(ValueError, match=f"{noun} time must be"):
            Costs(**{noun: [1.0, value]})


def test_each_stage_may_have_its_own_times() -> None:
    assert times(simulate(gpipe(2, 2), Costs([1, 3], (2, 5)))) == {
        "0F0": (0, 1),
        "0F1": (1, 2),
        "1F0": (1, 4),
        "1F1": (4, 7),
        "1B0": (7, 12),
        "1B1": (12, 17),
        "0B0": (12, 14),
        "0B1": (17, 19),
    }


@pytest.mark.parametrize("noun", ["forward", "backward"])
def test_the_number_of_times_is_the_number_of_stages(noun: str) -> None:
    with pytest.raises(ValueError, match=f"3 {noun} times for 2 stages"):
        simulate(gpipe(2, 2), Costs(**{noun: [1, 1, 1]}))


def test_latency_delays_messages_between_ranks_only() -> None:
    assert times(simulate(chimera(2, 2), Costs(1, 2, 0.25))) == {
        "0F0": (0, 1),
        "1F1.1": (1.25, 2.25),
        "1B1.1": (2.25, 4.25),
        "0B0": (4.5, 6.5),
        "0F1.1": (0, 1),
        "1F0": (1.25, 2.25),
        "1B0": (2.25, 4.25),
        "0B1.1": (4.5, 6.5),
    }


def test_two_stages_on_one_rank_have_no_latency_between_them() -> None:
    rows = (tuple(map(Action.parse, ["0F0", "1F0", "1B0", "0B0"])),)
    assert simulate(Schedule("one rank", Placement(((0, 0),)), 1, rows), Costs([1, 1], [2, 2], 5)).makespan == 6


def test_a_time_that_is_one_number_is_shared_by_the_stages_of_a_rank() -> None:
    rows = (tuple(map(Action.parse, ["0F0", "1F0", "1I0", "1W0", "0B0"])),)
    timeline = simulate(Schedule("one rank", Placement(((0, 0),)), 1, rows), Costs(1, 2, weight=0.5))
    assert [span.duration for span in timeline.spans] == [0.5, 0.5, 0.75, 0.25, 1]


def test_the_parts_of_a_backward_take_half_of_it_each_unless_told_otherwise() -> None:
    assert [Costs(1, 3).of(Action.parse(text)) for text in ("0F0", "0B0", "0I0", "0W0", "0B0a")] == [
        1,
        3,
        1.5,
        1.5,
        1.5,
    ]
    assert [Costs(1, 3, weight=1).of(Action.parse(text)) for text in ("0I0", "0W0")] == [2, 1]
    assert [Costs(1, [3, 4], weight=[1, 3]).of(Action.parse(text)) for text in ("1I0", "1W0")] == [1, 3]


@pytest.mark.parametrize(("backward", "weight"), [(2, 3), ([2, 2], 3), ([4, 2], [1, 3]), (2, [1, 3])])
def test_a_part_longer_than_the_backward_is_refused(backward: float, weight: float) -> None:
    with pytest.raises(ValueError, match="a part of the backward time; got 3"):
        Costs(1, backward, weight=weight)


def test_an_invalid_schedule_is_not_simulated() -> None:
    rows = gpipe(2, 2).rows
    with pytest.raises(ScheduleError, match="1B1 runs before 1F1"):
        simulate(dataclasses.replace(gpipe(2, 2), rows=(rows[0], rows[1][::-1])))


@settings(deadline=None)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.integers(1, 4),
    st.integers(1, 12),
    st.integers(1, 8),
    st.integers(1, 8),
    st.integers(0, 8),
)
def test_each_action_starts_as_soon_as_its_rank_and_its_input_allow(
    name: str, half: int, num_microbatches: int, forward: int, backward: int, latency: int
) -> None:
    # DualPipe takes an even number of microbatches, two for each rank or more.
    num_microbatches = 4 * half + 2 * num_microbatches if name.startswith("dualpipe") else num_microbatches
    schedule = get_family(name).build(2 * half, num_microbatches)
    costs = Costs([forward] * schedule.num_stages, [backward] * schedule.num_stages, latency)
    timeline = simulate(schedule, costs)
    spans = {span.action: span for span in timeline.spans}
    assert len(spans) == len(timeline.spans) == sum(map(len, schedule.rows))
    for rank, row in enumerate(schedule.rows):
        assert [span.action for span in timeline.of_rank(rank)] == list(row)
        free = 0.0
        for action in row:
            producer = schedule.producers.get(action)
            arrival = 0.0
            if producer is not None:
                arrival = spans[producer].end + (latency if spans[producer].rank != rank else 0)
            assert spans[action].start == max(free, arrival)
            assert spans[action].duration == costs.of(action)
            free = spans[action].end
    assert timeline.peak_activations == schedule.peak_activations


def test_a_timeline_counts_busy_idle_and_bubble() -> None:
    timeline = Timeline("x", 3, (span(0, "0F0", 0, 1), span(1, "1F0", 1, 3), span(0, "0B0", 3, 4)))
    assert timeline.makespan == 4
    assert timeline.busy == (2, 2, 0)
    assert timeline.idle == (2, 2, 4)
    assert timeline.bubble == pytest.approx(8 / 12)


def test_an_empty_timeline_has_no_bubble() -> None:
    timeline = Timeline("x", 2, ())
    assert (timeline.makespan, timeline.idle, timeline.bubble, timeline.peak_activations) == (0, (0, 0), 0, (0, 0))


def test_peak_activations_follow_the_time_of_the_spans_and_not_their_place() -> None:
    spans = (
        span(0, "0F0", 0, 1),
        span(0, "0F1", 2, 3),
        span(0, "0B1", 3, 4),
        span(0, "0B0", 1, 2),
        span(1, "1F0", 0, 1),
    )
    assert Timeline("x", 2, spans).peak_activations == (1, 1)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (span(2, "0F0", 0, 1), "0F0 is on rank 2, but there are 2 ranks"),
        (span(1, "1F0", 2, 1), "1F0 on rank 1 runs from 2 to 1"),
        (span(1, "1F0", -1, 1), "runs from -1 to 1"),
    ],
)
def test_a_span_that_cannot_be_is_refused(bad: Span, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Timeline("x", 2, (bad,))


@pytest.mark.parametrize(("backward", "column"), [(2, 1), (1.5, 0.5), (4 / 3, 1 / 3), (1.75, 0.25), (1.9, 1)])
def test_columns_are_exact_where_a_few_parts_of_the_shortest_action_suffice(backward: float, column: float) -> None:
    assert sample(simulate(gpipe(2, 2), Costs(1, backward))).column == pytest.approx(column)


def test_a_column_shows_what_runs_in_its_middle() -> None:
    # B1 begins at 3.3 and ends at 4.6.
    assert render_timeline(simulate(gpipe(1, 2), Costs(1, 1.3))) == "rank 0  F0 F1 B0 B1 B1"
    # B1 begins at 3.2 and ends at 4.4.
    assert render_timeline(simulate(gpipe(1, 2), Costs(1, 1.2))) == "rank 0  F0 F1 B0 B1"


@settings(deadline=None)
@given(st.integers(1, 4), st.integers(1, 6), st.floats(0.1, 10), st.floats(0.1, 10))
def test_every_action_is_seen_in_the_columns(half: int, num_microbatches: int, forward: float, backward: float) -> None:
    schedule = chimera(2 * half, num_microbatches)
    for row, sampled in zip(schedule.rows, sample(simulate(schedule, Costs(forward, backward))).rows, strict=True):
        seen = [action for action in sampled if action is not None]
        assert list(dict.fromkeys(seen)) == list(row)


def test_a_timeline_is_drawn_with_cells_of_one_width() -> None:
    assert render_timeline(simulate(forward_only(Placement.down(2), 11), Costs(1))).splitlines() == [
        "rank 0  F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10 .",
        "rank 1  .   F0  F1  F2  F3  F4  F5  F6  F7  F8  F9  F10",
    ]
