import dataclasses
import graphlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_chimera.schedules import (
    SCHEDULES,
    Action,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    chimera,
    forward_only,
    get_family,
    gpipe,
    one_f_one_b,
    validate,
)


def make(placement: Placement, num_microbatches: int, *rows: str) -> Schedule:
    return Schedule("made", placement, num_microbatches, tuple(tuple(map(Action.parse, row.split())) for row in rows))


def swapped(schedule: Schedule, rank: int, i: int, j: int) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def can_run(schedule: Schedule) -> bool:
    """The oracle: a complete schedule runs if its queues match and its graph of dependencies has no circle."""
    before: dict[Action, list[Action]] = {}
    messages: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    owner = {action: rank for rank, row in enumerate(schedule.rows) for action in row}
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            before.setdefault(later, []).append(earlier)
        for stage, kind, microbatch, pipe in row:
            taker = Action(stage, kind, microbatch, pipe)
            if kind is Kind.BACKWARD:
                before.setdefault(taker, []).append(Action(stage, Kind.FORWARD, microbatch, pipe))
            maker = Action(stage - 1 if kind is Kind.FORWARD else stage + 1, kind, microbatch, pipe)
            if maker in owner:
                before.setdefault(taker, []).append(maker)
                messages.setdefault((owner[maker], owner[taker]), []).append((maker, taker))
    for (source, _), pairs in messages.items():
        made = [schedule.rows[source].index(maker) for maker, _ in pairs]
        if made != sorted(made):
            return False
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return False
    return True


def accepts(schedule: Schedule) -> bool:
    try:
        validate(schedule)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize(
    ("name", "num_stages"),
    [(name, stages) for name in SCHEDULES for stages in (1, 2, 3, 4) if (name, stages) != ("chimera", 3)],
)
def test_after_any_swap_in_a_small_schedule_the_oracle_agrees(name: str, num_stages: int) -> None:
    verdicts = set()
    for num_microbatches in range(1, 9):
        schedule = get_family(name).build(num_stages, num_microbatches)
        for rank in range(num_stages):
            for i, j in itertools.combinations(range(2 * num_microbatches), 2):
                changed = swapped(schedule, rank, i, j)
                verdict = can_run(changed)
                assert accepts(changed) == verdict, (rank, i, j)
                verdicts.add(verdict)
    assert verdicts == {True, False}


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 24), st.integers(1, 3))
def test_after_a_few_swaps_in_any_schedule_the_oracle_agrees(
    data: st.DataObject, name: str, half: int, num_microbatches: int, num_swaps: int
) -> None:
    schedule = get_family(name).build(2 * half, num_microbatches)
    index = st.integers(0, 2 * num_microbatches - 1)
    for _ in range(num_swaps):
        schedule = swapped(schedule, data.draw(st.integers(0, 2 * half - 1)), data.draw(index), data.draw(index))
    assert accepts(schedule) == can_run(schedule)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.integers(1, 3), st.integers(1, 4))
def test_after_a_shuffle_of_all_rows_the_oracle_agrees(
    data: st.DataObject, name: str, half: int, num_microbatches: int
) -> None:
    schedule = get_family(name).build(2 * half, num_microbatches)
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    changed = dataclasses.replace(schedule, rows=rows)
    assert accepts(changed) == can_run(changed)


def failure(schedule: Schedule, max_activations: int | Sequence[int] | None = None) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, max_activations=max_activations)
    return caught.value


DOWN = Placement.down(2)


@pytest.mark.parametrize(
    ("schedule", "rank", "index", "problem"),
    [
        (make(DOWN, 1, "0F0 0B0", "1F0 2F0 1B0"), 1, 1, "2F0 is of stage 2, but there are 2"),
        (make(DOWN, 1, "0F0 0F1 0B0", "1F0 1B0"), 0, 1, "0F1 is of microbatch 1, but there are 1"),
        (make(DOWN, 1, "0F0 0B0.1", "1F0 1B0"), 0, 1, "0B0.1 is of pipe 1, but there are 1"),
        (make(DOWN, 1, "0F0 1F0", "0B0 1B0"), 0, 1, "1F0 is on rank 0, but stage 1 of pipe 0 is on rank 1"),
        (make(DOWN, 1, "0F0 0B0 0F0", "1F0 1B0"), 0, 2, "0F0 runs a second time"),
        (
            make(Placement.bidirectional(2), 1, "0F0 1F0.1 0B0 1B0.1", "0F0.1 1F0 1B0 0B0.1"),
            0,
            1,
            "1F0.1 runs in pipe 1, but its microbatch already runs in pipe 0",
        ),
        (make(DOWN, 1, "0F0 0B0", "1F0"), 1, None, "1B0 is missing from rank 1"),
        (make(DOWN, 1, "0B0", "1F0 1B0"), 0, None, "0F0 is missing from rank 0"),
        (make(DOWN, 2, "0F0 0B0", "1F0 1B0"), None, None, "no action runs microbatch 1"),
        (make(DOWN, 1, "0F0", ""), 1, None, "1F0 is missing from rank 1"),
        (make(DOWN, 1, "0F0 0B0", "1B0 1F0"), 1, 0, "1B0 runs before 1F0"),
        (
            make(DOWN, 2, "0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1"),
            1,
            0,
            "1F1 takes its input from rank 0, which sends the input of 1F0 before that",
        ),
        (
            make(Placement.bidirectional(2), 2, "1F1.1 0F0 1B1.1 0B0", "1F0 0F1.1 1B0 0B1.1"),
            0,
            0,
            "1F1.1 on rank 0 waits for 0F1.1 on rank 1, 1F0 on rank 1 waits for 0F0 on rank 0",
        ),
    ],
)
def test_a_bad_cell_is_named(schedule: Schedule, rank: int | None, index: int | None, problem: str) -> None:
    error = failure(schedule)
    assert (error.rank, error.index) == (rank, index)
    assert problem in str(error)


def test_the_message_gives_place_rule_and_grid() -> None:
    assert str(failure(make(DOWN, 1, "0F0 0B0", "1B0 1F0"))).splitlines() == [
        "Schedule made, rank 1, position 0: 1B0 runs before 1F0.",
        "A stage runs the backward of a microbatch after its forward.",
        "        0     1",
        "rank 0  0F0   0B0",
        "rank 1 >1B0<  1F0",
    ]


def test_the_first_message_out_of_order_is_named() -> None:
    # Both links are out of order: rank 0 takes from rank 1 at position 4, rank 1 takes from rank 0 at position 1.
    rows = ("0F0 0F1 0F2 0B0 0B2 0B1", "1F0 1F2 1F1 1B0 1B1 1B2")
    error = failure(make(DOWN, 3, *rows))
    assert (error.rank, error.index) == (1, 1)


def test_a_deadlock_is_blamed_on_the_circle_and_not_on_those_who_wait_for_it() -> None:
    # Rank 2 waits for rank 1, but the circle is between ranks 0 and 1: 0B0 awaits 1B0, which stands behind 1F1.
    error = failure(make(Placement.down(3), 2, "0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1", "2F0 2B0 2F1 2B1"))
    assert (error.rank, error.index) == (0, 1)
    assert "0B0 on rank 0 waits for 1B0 on rank 1, 1F1 on rank 1 waits for 0F1 on rank 0." in str(error)


def test_a_deadlock_is_blamed_on_the_circle_though_an_earlier_rank_waits_for_it() -> None:
    # Rank 0 waits for rank 1, but the circle is between ranks 1 and 2: 1B0 awaits 2B0, which stands behind 2F1.
    error = failure(make(Placement.down(3), 2, "0F0 0B0 0F1 0B1", "1F0 1B0 1F1 1B1", "2F0 2F1 2B0 2B1"))
    assert (error.rank, error.index) == (1, 1)
    assert "0B0 on rank 0" not in str(error)


def test_forward_only_schedules_need_no_backward() -> None:
    validate(forward_only(3, 4))
    error = failure(dataclasses.replace(forward_only(2, 1), rows=(forward_only(2, 1).rows[0], ())))
    assert "1F0 is missing" in str(error)


def test_two_stages_on_one_rank_need_no_message() -> None:
    validate(make(Placement(((0, 0),)), 1, "0F0 1F0 1B0 0B0"))
    assert "wait" in str(failure(make(Placement(((0, 0),)), 1, "1F0 0F0 1B0 0B0")))


@pytest.mark.parametrize("bound", [4, (4, 3, 2, 1), [4, 4, 4, 4]])
def test_a_schedule_within_its_bound_of_activations_is_accepted(bound: int | Sequence[int]) -> None:
    validate(one_f_one_b(4, 8), max_activations=bound)


@pytest.mark.parametrize(("bound", "rank", "index"), [(3, 0, 3), ((4, 2, 2, 1), 1, 2), (0, 0, 0)])
def test_the_first_forward_beyond_the_bound_is_named(bound: int | Sequence[int], rank: int, index: int) -> None:
    error = failure(one_f_one_b(4, 8), bound)
    assert (error.rank, error.index) == (rank, index)
    assert f"Rank {rank} may hold at most" in str(error)


def test_the_number_of_bounds_is_the_number_of_ranks() -> None:
    with pytest.raises(ValueError, match="3 activation bounds for 4 ranks"):
        validate(gpipe(4, 4), max_activations=(4, 4, 4))


def test_a_bound_is_judged_by_the_peak_that_the_schedule_reports() -> None:
    for schedule in (gpipe(4, 6), one_f_one_b(4, 6), chimera(4, 6)):
        validate(schedule, max_activations=schedule.peak_activations)
        for rank, peak in enumerate(schedule.peak_activations):
            bounds = [*schedule.peak_activations[:rank], peak - 1, *schedule.peak_activations[rank + 1 :]]
            assert failure(schedule, bounds).rank == rank
