import dataclasses
import graphlib
import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, reject, settings
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
    zb_v,
)


def make(placement: Placement, num_microbatches: int, *rows: str) -> Schedule:
    return Schedule("made", placement, num_microbatches, tuple(tuple(map(Action.parse, row.split())) for row in rows))


def swapped(schedule: Schedule, rank: int, i: int, j: int) -> Schedule:
    rows = [list(row) for row in schedule.rows]
    rows[rank][i], rows[rank][j] = rows[rank][j], rows[rank][i]
    return dataclasses.replace(schedule, rows=tuple(map(tuple, rows)))


def can_run(schedule: Schedule, *, in_order: bool = False) -> bool:
    """The oracle: a complete schedule runs if its graph of dependencies has no circle (and its queues match)."""
    before: dict[Action, list[Action]] = {}
    messages: dict[tuple[int, int], list[tuple[Action, Action]]] = {}
    owner = {action: rank for rank, row in enumerate(schedule.rows) for action in row}
    for row in schedule.rows:
        for earlier, later in itertools.pairwise(row):
            before.setdefault(later, []).append(earlier)
        for taker in row:
            if taker.kind is Kind.WEIGHT:
                before.setdefault(taker, []).append(taker._replace(kind=Kind.INPUT))
                continue
            forward = taker.kind is Kind.FORWARD
            if not forward:
                before.setdefault(taker, []).append(taker._replace(kind=Kind.FORWARD, half=""))
            for kind in [Kind.FORWARD] if forward else [Kind.BACKWARD, Kind.INPUT]:
                maker = taker._replace(kind=kind, stage=taker.stage - 1 if forward else taker.stage + 1)
                if maker in owner:
                    before.setdefault(taker, []).append(maker)
                    if owner[maker] != owner[taker]:
                        messages.setdefault((owner[maker], owner[taker]), []).append((maker, taker))
    for (source, _), pairs in messages.items():
        made = [schedule.rows[source].index(maker) for maker, _ in pairs]
        if in_order and made != sorted(made):
            return False
    try:
        graphlib.TopologicalSorter(before).prepare()
    except graphlib.CycleError:
        return False
    return True


def accepts(schedule: Schedule, *, in_order: bool = False) -> bool:
    try:
        validate(schedule, in_order=in_order)
    except ScheduleError:
        return False
    return True


@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(
    ("name", "num_stages"),
    [
        (name, stages)
        for name in ("chimera", "gpipe", "1f1b")
        for stages in (1, 2, 3, 4)
        if (name, stages) != ("chimera", 3)
    ],
)
def test_after_any_swap_in_a_small_schedule_the_oracle_agrees(name: str, num_stages: int, in_order: bool) -> None:
    verdicts = set()
    for num_microbatches in range(1, 7):
        schedule = get_family(name).build(num_stages, num_microbatches)
        for rank in range(num_stages):
            for i, j in itertools.combinations(range(2 * num_microbatches), 2):
                changed = swapped(schedule, rank, i, j)
                verdict = can_run(changed, in_order=in_order)
                assert accepts(changed, in_order=in_order) == verdict, (rank, i, j)
                verdicts.add(verdict)
    assert verdicts == {True, False}


def drawn(name: str, half: int, num_microbatches: int) -> Schedule:
    """A schedule of a family; where the family refuses the numbers, nothing is tested."""
    try:
        return get_family(name).build(2 * half, num_microbatches)
    except ScheduleError:
        raise
    except ValueError:
        reject()


@settings(deadline=None, max_examples=300)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.integers(1, 6), st.integers(1, 24), st.integers(1, 3))
def test_after_a_few_swaps_in_any_schedule_the_oracle_agrees(
    data: st.DataObject, name: str, half: int, num_microbatches: int, num_swaps: int
) -> None:
    schedule = drawn(name, half, num_microbatches)
    for _ in range(num_swaps):
        rank = data.draw(st.integers(0, 2 * half - 1))
        index = st.integers(0, len(schedule.rows[rank]) - 1)
        schedule = swapped(schedule, rank, data.draw(index), data.draw(index))
    for in_order in (False, True):
        assert accepts(schedule, in_order=in_order) == can_run(schedule, in_order=in_order)


@settings(deadline=None, max_examples=100)
@given(st.data(), st.sampled_from(sorted(SCHEDULES)), st.integers(1, 3), st.integers(1, 4))
def test_after_a_shuffle_of_all_rows_the_oracle_agrees(
    data: st.DataObject, name: str, half: int, num_microbatches: int
) -> None:
    schedule = drawn(name, half, num_microbatches)
    rows = tuple(tuple(data.draw(st.permutations(row))) for row in schedule.rows)
    changed = dataclasses.replace(schedule, rows=rows)
    assert accepts(changed) == can_run(changed)


def failure(
    schedule: Schedule, max_activations: float | Sequence[float] | None = None, *, in_order: bool = False
) -> ScheduleError:
    with pytest.raises(ScheduleError) as caught:
        validate(schedule, max_activations=max_activations, in_order=in_order)
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
        (make(DOWN, 1, "0F0 0I0", "1F0 1B0"), 0, None, "0W0 is missing from rank 0"),
        (make(DOWN, 1, "0F0 0W0", "1F0 1B0"), 0, None, "0I0 is missing from rank 0"),
        (make(DOWN, 1, "0F0 0B0", "1F0 1B0 1W0"), 1, None, "1I0 is missing from rank 1"),
        (make(DOWN, 1, "0F0 0B0 0W0 0I0", "1F0 1B0"), 0, 2, "0W0 is a part of 0B0, which runs whole"),
        (make(DOWN, 1, "0F0 0B0a", "1F0 1B0a 1B0b"), 0, None, "0B0b is missing from rank 0"),
        (make(DOWN, 1, "0F0 0B0", "1F0 1B0a 1B0b"), 1, 1, "1B0a is a half, but its microbatch runs otherwise before"),
        (make(DOWN, 1, "0F0 0W0 0I0", "1F0 1B0"), 0, 1, "0W0 runs before 0I0"),
        (make(DOWN, 1, "0F0 0B0a 0B0b", "1B0a 1F0 1B0b"), 1, 0, "1B0a runs before 1F0"),
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


def test_a_queue_that_is_consumed_in_another_order_is_refused_where_order_is_asked_for() -> None:
    schedule = make(DOWN, 2, "0F0 0F1 0B0 0B1", "1F1 1F0 1B0 1B1")
    validate(schedule)
    error = failure(schedule, in_order=True)
    assert (error.rank, error.index) == (1, 0)
    assert "1F1 takes its input from rank 0, which sends the input of 1F0 before that" in str(error)


@pytest.mark.parametrize("rows", [("0F0 0I0 0W0", "1F0 1B0"), ("0F0 0B0", "1F0 1I0 1W0"), ("0F0 0B0", "1F0 1B0")])
def test_a_backward_may_be_whole_on_one_stage_and_in_parts_on_another(rows: tuple[str, ...]) -> None:
    validate(make(DOWN, 1, *rows))


def test_activations_are_bounded_in_shares_of_a_rank() -> None:
    validate(zb_v(4, 8), max_activations=4)
    assert "makes 4 microbatches" in str(failure(zb_v(4, 8), 3.5))


def test_the_message_gives_place_rule_and_grid() -> None:
    assert str(failure(make(DOWN, 1, "0F0 0B0", "1B0 1F0"))).splitlines() == [
        "Schedule made, rank 1, position 0: 1B0 runs before 1F0.",
        "A stage runs the backward of a microbatch after its forward, and of its parts the input gradient (I) first.",
        "        0     1",
        "rank 0  0F0   0B0",
        "rank 1 >1B0<  1F0",
    ]


def test_the_first_message_out_of_order_is_named() -> None:
    # Both links are out of order: rank 0 takes from rank 1 at position 4, rank 1 takes from rank 0 at position 1.
    rows = ("0F0 0F1 0F2 0B0 0B2 0B1", "1F0 1F2 1F1 1B0 1B1 1B2")
    error = failure(make(DOWN, 3, *rows), in_order=True)
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
    validate(forward_only(Placement.down(3), 4))
    error = failure(
        dataclasses.replace(forward_only(Placement.down(2), 1), rows=(forward_only(Placement.down(2), 1).rows[0], ()))
    )
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
