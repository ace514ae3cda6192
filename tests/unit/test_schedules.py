"""Every family against its closed forms, over a grid and with drawn numbers."""

import math

import pytest
from hypothesis import given, reject, settings
from hypothesis import strategies as st

from lightning_chimera.schedules import (
    SCHEDULES,
    Kind,
    Schedule,
    ScheduleError,
    chimera,
    chimera_doubling,
    chimera_greedy,
    chimera_halving,
    chimera_split,
    chimera_split_in_place,
    chimera_split_v,
    depths_that_hide,
    dualpipe,
    dualpipe_v,
    gems,
    get_family,
    gpipe,
    hanayo,
    interleaved,
    one_f_one_b,
    one_f_one_b_pb,
    one_f_one_b_so,
    v_half,
    v_min,
    validate,
    zb_h1,
    zb_h2,
    zb_v,
)
from lightning_chimera.timeline import Costs, simulate

EVEN = [2, 4, 6, 8, 12, 16]
EQUAL = Costs(1, 2, weight=1)
"""Forward, input gradient and weight gradient take the same time."""

BUILDERS = {name: family.build for name, family in SCHEDULES.items()}

# Idle time and peak activations where forward, input gradient and weight gradient take 1 each, from (stages,
# microbatches) = (4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32).
GOLDEN = """
gpipe                   9/4    9/8     9/16    21/8    21/16     21/32
1f1b                    9/4    9/4     9/4     21/8    21/8      21/8
interleaved:2           4.5/4  4.5/5.5 4.5/5.5 10.5/8  10.5/11.5 10.5/11.5
interleaved:4           2.25/4 2.25/4.75 2.25/4.75 5.25/8 5.25/9.75 5.25/9.75
zb_h1                   3/4    3/4     3/4     7/8     7/8       7/8
zb_h2                   3/4    3/7     3/7     7/8     7/15      7/15
zb_v                    1.5/4  1.5/4   1.5/4   3.5/8   3.5/8     3.5/8
v_half                  4/3    4/3     4/3     10/5    10/5      10/5
v_min                   5.5/2.5 5.5/2.5 5.5/2.5 13.5/4 13.5/4    13.5/4
dualpipe                -      1/5     1/5     -       3/9       3/9
dualpipe_v              -      1.5/4.5 1.5/4.5 -       3.5/8.5   3.5/8.5
chimera                 4/4    6/4     10/4    12/8    18/8      30/8
chimera_doubling        -      3/8     3/8     -       9/16      9/16
chimera_halving         2/4    2/4     2/4     6/8     6/8       6/8
chimera_greedy          4/4    3/5     3/5     12/8    11/9      11/9
chimera_split_in_place  2/4    2/4     2/4     6/8     6/8       6/8
chimera_split           1/4    1/4     1/4     3/8     3/8       3/8
chimera_split:4         0/4    0/4     0/4     1/8     1/8       1/8
chimera_split_v         0.5/4  0.5/4   0.5/4   1.5/8   1.5/8     1.5/8
hanayo:2                6/4    -       -       14/8    -         -
hanayo:4                3.25/4 -       -       7.5/8   -         -
hanayo:8                1.625/4 -      -       3.75/8  -         -
gems                    27/1   51/1    99/1    119/1   231/1     455/1
"""
SIZES = [(4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)]


def golden_cells() -> list[tuple[str, int, int, str]]:
    lines = [line.split() for line in GOLDEN.strip().splitlines()]
    return [(name, *size, cell) for name, *cells in lines for size, cell in zip(SIZES, cells, strict=True)]


def build(name: str, stages: int, microbatches: int) -> Schedule:
    """Build by the name of a family, followed by a colon and the value of its option if it is not the default."""
    name, _, option = name.partition(":")
    family = get_family(name)
    return family.build(stages, microbatches, **({family.option: int(option)} if option else {}))


def idle(schedule: Schedule, costs: Costs = EQUAL) -> float:
    """The idle time of the busiest rank."""
    return min(simulate(schedule, costs).idle)


def order(schedule: Schedule, rank: int) -> str:
    return " ".join(f"{'DU'[a.pipe]}{a.kind}{a.microbatch}{a.half}" for a in schedule.rows[rank])


@pytest.mark.parametrize(("name", "stages", "microbatches", "cell"), golden_cells())
def test_idle_time_and_peak_activations_are_the_golden_ones(
    name: str, stages: int, microbatches: int, cell: str
) -> None:
    if cell == "-":
        return
    schedule = build(name, stages, microbatches)
    assert f"{idle(schedule):g}/{max(schedule.peak_activations):g}" == cell


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    name = draw(st.sampled_from(sorted(SCHEDULES)))
    stages, microbatches = draw(st.integers(1, 12)), draw(st.integers(1, 30))
    options = {
        "pipes": st.integers(1, 6).map(lambda f: {"pipes": 2 * f}),
        "chunks": st.integers(1, 5).map(lambda v: {"chunks": v}),
    }
    option = draw(options[SCHEDULES[name].option]) if SCHEDULES[name].option and draw(st.booleans()) else {}
    try:
        return SCHEDULES[name].build(stages, microbatches, **option)
    except ScheduleError:
        raise
    except ValueError:
        reject()


@settings(deadline=None, max_examples=200)
@given(schedules(), st.tuples(*[st.integers(1, 9)] * 3), st.integers(0, 5))
def test_every_schedule_is_complete_and_runs_and_is_read_back(
    schedule: Schedule, times: tuple[int, int, int], latency: int
) -> None:
    validate(schedule, max_activations=schedule.peak_activations)
    assert Schedule.parse(schedule.to_text()) == schedule
    forward, grad_input, grad_weight = times
    timeline = simulate(schedule, Costs(forward, grad_input + grad_weight, latency, weight=grad_weight))
    # Each rank does its share of each microbatch, whatever the order.
    assert timeline.busy == pytest.approx([schedule.num_microbatches * sum(times)] * schedule.num_ranks)
    assert timeline.peak_activations == schedule.peak_activations


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_schedule_is_called_by_the_name_of_its_family(name: str) -> None:
    assert BUILDERS[name](2, 8).name == name


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("numbers", [(0, 4), (4, 0), (-1, 4)])
def test_every_family_refuses_numbers_below_one(name: str, numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=r"Schedule \w+ needs at least one .*; got"):
        BUILDERS[name](*numbers)


@pytest.mark.parametrize("name", [name for name in SCHEDULES if "chimera" in name or name in ("gems", "dualpipe")])
def test_opposite_pipes_refuse_an_odd_number_of_ranks(name: str) -> None:
    with pytest.raises(ValueError, match="even number of stages"):
        BUILDERS[name](3, 12)


# Chimera


@pytest.mark.parametrize("stages", [4, 8, 16])
def test_more_pipes_idle_less_and_keep_more(stages: int) -> None:
    for f in (f for f in range(1, stages // 2 + 1) if stages // 2 % f == 0):
        schedule = chimera(stages, stages, pipes=2 * f)
        assert idle(schedule, Costs(1, 1)) == stages / f - 2
        assert idle(schedule, Costs(1, 2)) == 2 * (stages / f - 2)
        assert idle(schedule, Costs(1, 1)) / simulate(schedule, Costs(1, 1)).makespan == (stages - 2 * f) / (
            2 * f * stages + stages - 2 * f
        )
        peaks = schedule.peak_activations
        assert (min(peaks), max(peaks)) == (stages - stages // (2 * f) + 1, stages)
        assert schedule.placement.weight_copies == (2 * f,) * stages
        assert idle(chimera_split_in_place(stages, 3 * stages, pipes=2 * f)) == stages / f - 2
        assert idle(chimera_split(stages, 3 * stages, pipes=2 * f)) == stages / (2 * f) - 1


@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize(("stages", "f"), [(4, 1), (4, 2), (8, 1), (8, 2), (8, 4), (12, 3), (16, 4)])
def test_each_unit_of_any_number_of_pipes_adds_the_same_bubble(stages: int, f: int, units: int) -> None:
    schedule = chimera(stages, units * stages, pipes=2 * f)
    assert idle(schedule, Costs(1, 1)) == stages / f - 2
    assert idle(schedule, Costs(1, 2)) == (units + 1) * (stages / f - 2)


@pytest.mark.parametrize("pipes", [0, 1, 3, 6, 10])
def test_a_number_of_pipes_that_is_not_evenly_shifted_is_refused(pipes: int) -> None:
    with pytest.raises(ValueError, match=rf"of 8 stages it makes 2, 4, 8 pipes; got {pipes}"):
        chimera(8, 8, pipes=pipes)


EIGHT_STAGES_FOUR_PIPES = """
0F0 0F1 3F6 1F2 3F7 1F3 2F4 2B4 2F5 2B5 1B2 3B6 1B3 3B7 0B0 0B1
0F0 3F6 0F1 3F7 1F2 2F4 1F3 2F5 2B4 1B2 2B5 1B3 3B6 0B0 3B7 0B1
3F6 0F0 3F7 0F1 2F4 1F2 2F5 1F3 1B2 2B4 1B3 2B5 0B0 3B6 0B1 3B7
3F6 3F7 0F0 2F4 0F1 2F5 1F2 1B2 1F3 1B3 2B4 0B0 2B5 0B1 3B6 3B7
"""


def test_four_pipes_run_in_the_order_of_the_paper() -> None:
    rows = chimera(8, 8, pipes=4).rows[:4]
    assert [" ".join(f"{a.pipe}{a.kind}{a.microbatch}" for a in row) for row in rows] == (
        EIGHT_STAGES_FOUR_PIPES.strip().splitlines()
    )


def test_the_last_microbatches_of_four_pipes_go_to_opposite_ones() -> None:
    schedule = chimera(8, 10, pipes=4)
    assert [schedule.pipe_of(microbatch) for microbatch in (8, 9)] == [0, 2]


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("stages", EVEN)
def test_doubling_idles_as_much_for_any_number_of_units(stages: int, units: int) -> None:
    schedule = chimera_doubling(stages, 2 * stages * units)
    assert idle(schedule) == 1.5 * (stages - 2)
    # Recomputation makes a backward a forward longer.
    assert idle(schedule, Costs(1, 3)) == (units + 1) * (stages - 2)
    assert idle(chimera(stages, 2 * stages * units), Costs(1, 3)) == (4 * units + 1) * (stages - 2)
    peaks = schedule.peak_activations
    assert (min(peaks), max(peaks)) == (3 * stages // 2 + 1, 2 * stages)


@pytest.mark.parametrize("units", [1, 2, 4])
@pytest.mark.parametrize("stages", EVEN)
def test_halving_idles_as_much_for_any_number_of_units(stages: int, units: int) -> None:
    schedule = chimera_halving(stages, stages * units)
    assert idle(schedule) == stages - 2
    assert max(schedule.peak_activations) == stages


def test_doubling_and_halving_run_in_the_orders_that_are_drawn_by_hand() -> None:
    assert order(chimera_doubling(4, 8), 0) == "DF0 DF1 DF2 DF3 UF4 UF5 UB4 UF6 UF7 UB5 DB0 UB6 DB1 UB7 DB2 DB3"
    assert order(chimera_doubling(4, 8), 1) == "DF0 DF1 UF4 UF5 DF2 DF3 UF6 UF7 UB4 DB0 UB5 DB1 UB6 DB2 UB7 DB3"
    assert order(chimera_halving(4, 8), 0) == (
        "DF0 DF1 UF2 UB2a UF3 UB2b DB0a UB3a DB0b UB3b DB1a DF4 DB1b "
        "DF5 UF6 UB6a UF7 UB6b DB4a UB7a DB4b UB7b DB5a DB5b"
    )
    makespans = [simulate(build(4, 8)).makespan for build in (chimera, chimera_doubling, chimera_halving)]
    assert makespans == [30, 27, 26]


@pytest.mark.parametrize("stages", [4, 8, 16])
def test_halving_beats_direct_concatenation_while_half_a_backward_is_not_too_slow(stages: int) -> None:
    limit = (stages - 2) / (3 * stages - 2)
    for factor, wins in ((1 + 0.99 * limit, True), (1 + 1.01 * limit, False)):
        halving = simulate(chimera_halving(stages, 4 * stages), Costs(1, 2 * factor)).makespan
        assert (halving < simulate(chimera(stages, 4 * stages)).makespan) == wins


@pytest.mark.parametrize("stages", EVEN)
def test_the_greedy_order_of_one_unit_costs_what_chimera_costs(stages: int) -> None:
    for costs in (Costs(1, 1), Costs(1, 2)):
        assert idle(chimera_greedy(stages, stages), costs) == idle(chimera(stages, stages), costs)


@pytest.mark.parametrize("stages", [4, 6, 8])
def test_the_greedy_order_of_several_units_idles_less_and_keeps_one_microbatch_more(stages: int) -> None:
    for units in (2, 3, 4):
        greedy = chimera_greedy(stages, units * stages)
        assert idle(greedy, Costs(1, 1)) == stages - 2
        assert idle(greedy) < idle(chimera(stages, units * stages))
        assert max(greedy.peak_activations) == stages + 1


@pytest.mark.parametrize(("stages", "expected"), [(4, 3), (8, 11)])
def test_the_greedy_order_idles_as_much_for_any_number_of_units(stages: int, expected: float) -> None:
    assert [idle(chimera_greedy(stages, units * stages)) for units in (2, 3, 4, 8)] == [expected] * 4


@pytest.mark.parametrize("stages", [4, 6, 8, 12])
def test_split_chimera_idles_half_d_minus_1_and_more_only_after_a_short_last_unit(stages: int) -> None:
    for microbatches in range(stages, 3 * stages + 1):
        left = microbatches % stages
        short = stages - 1 - 2 * (left // 2) if left else 0
        schedule = chimera_split(stages, microbatches)
        assert idle(schedule) == max(stages // 2 - 1, short)
        assert max(schedule.peak_activations) == stages
        roomy = chimera_split(stages, microbatches, max_activations=stages + 1)
        assert idle(roomy) == stages // 2 - 1
        assert max(roomy.peak_activations) <= stages + 1


@pytest.mark.parametrize(
    ("stages", "caps", "expected"),
    [
        (4, [3], [3]),
        (8, [5, 6, 7], [9, 7, 5]),
        (16, [9, 10, 11, 12, 13, 14, 15], [27, 21, 19, 15, 13, 11, 9]),
    ],
)
def test_split_chimera_idles_more_with_less_memory(stages: int, caps: list[int], expected: list[int]) -> None:
    built = [chimera_split(stages, stages, max_activations=cap) for cap in caps]
    assert list(map(idle, built)) == expected
    assert [max(schedule.peak_activations) for schedule in built] == caps


def test_split_chimera_refuses_memory_in_which_nothing_ends() -> None:
    with pytest.raises(ValueError, match="chimera_split cannot run where a rank holds at most 3 forwards"):
        chimera_split(8, 8, max_activations=3)


def test_the_weight_gradients_of_larger_stages_end_early_enough_for_their_all_reduce() -> None:
    timeline = simulate(chimera_split(8, 16), EQUAL)
    ends = [
        max(span.end for span in timeline.spans if span.action.stage == stage and span.action.kind is Kind.WEIGHT)
        for stage in range(8)
    ]
    assert [timeline.makespan - end for end in ends] == [0, 0, 0, 0, 4, 5, 7, 10]


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("ranks", EVEN)
def test_split_chimera_in_the_shape_of_a_v_idles_a_quarter_of_d_minus_2(ranks: int, units: int) -> None:
    schedule = chimera_split_v(ranks, ranks * units)
    assert idle(schedule) == (ranks - 2) / 4
    assert max(schedule.peak_activations) == ranks
    assert schedule.placement.weight_copies == (2,) * ranks


# The family


@pytest.mark.parametrize(("stages", "microbatches", "makespan"), [(4, 8, 75), (8, 32, 551)])
def test_gems_takes_as_long_as_its_authors_say(stages: int, microbatches: int, makespan: float) -> None:
    assert simulate(gems(stages, microbatches)).makespan == makespan


@pytest.mark.parametrize("stages", EVEN)
def test_gems_overlaps_the_forward_of_a_microbatch_with_the_backward_before_it(stages: int) -> None:
    for microbatches in (1, 2, 5, 8):
        schedule = gems(stages, microbatches)
        expected = stages * 3.5 + (microbatches - 1) * (1.5 + stages * 2)
        assert simulate(schedule, Costs(1.5, 2)).makespan == expected
        assert schedule.peak_activations == (1,) * stages


@pytest.mark.parametrize("latency", [0.25, 0.5, 1.5, 2, 4])
@pytest.mark.parametrize(("stages", "microbatches"), [(2, 9), (4, 24), (8, 24)])
def test_a_warm_up_that_is_deep_enough_hides_latency(stages: int, microbatches: int, latency: float) -> None:
    schedule = one_f_one_b(stages, microbatches, depths=depths_that_hide(latency, 3, stages))
    least = (microbatches + stages - 1) * 3 + 2 * (stages - 1) * latency
    assert simulate(schedule, Costs(1, 2, latency)).makespan == least


def test_policies_of_warm_up_have_their_golden_makespans() -> None:
    assert simulate(one_f_one_b(4, 24), Costs(1, 2, 0.5)).makespan == 101
    assert simulate(one_f_one_b_pb(4, 24), Costs(1, 2, 0.5)).makespan == 84
    assert depths_that_hide(0.5, 3, 4) == (7, 5, 3, 1)
    assert depths_that_hide(2, 3, 4) == (10, 7, 4, 1)
    assert simulate(one_f_one_b(4, 24, depths=(10, 7, 4, 1)), Costs(1, 2, 2)).makespan == 93


@pytest.mark.parametrize("microbatches", [1, 4, 9, 24])
@pytest.mark.parametrize("stages", [2, 4, 7])
def test_1f1b_without_overlap_of_messages_takes_as_long_as_bapipe_says(stages: int, microbatches: int) -> None:
    trips = stages + microbatches - 2 - math.ceil((microbatches - 1) / stages)
    expected = (microbatches + stages - 1) * 3 + 2 * 0.5 * trips
    assert simulate(one_f_one_b(stages, microbatches), Costs(1, 2, 0.5)).makespan == pytest.approx(expected)


def test_the_deep_policies_hold_what_they_may() -> None:
    assert one_f_one_b_pb(4, 24).peak_activations == (7, 5, 3, 1)
    assert one_f_one_b_so(4, 24).peak_activations == (8, 6, 4, 2)


@pytest.mark.parametrize("depths", [(4, 3, 2), (4, 3, 2, 0), (3, 3, 2, 1), (1, 2, 3, 4)])
def test_depths_that_cannot_run_are_refused(depths: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="depths of 1f1b are one for each of 4 stages"):
        one_f_one_b(4, 8, depths=depths)


@pytest.mark.parametrize("chunks", [1, 2, 3, 5])
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_interleaving_divides_the_bubble_by_the_chunks(ranks: int, chunks: int) -> None:
    for groups in (1, 2, 3):
        schedule = interleaved(ranks, groups * ranks, chunks=chunks)
        assert idle(schedule, Costs(1, 2.5)) == pytest.approx((ranks - 1) * 3.5 / chunks)
        more = (ranks - 1) / chunks if groups > 1 and chunks > 1 else 0
        assert max(schedule.peak_activations) == schedule.peak_activations[0] == pytest.approx(ranks + more)
        assert schedule.num_messages == 2 * groups * ranks * (ranks * chunks - 1)


def test_the_groups_of_interleaving_need_not_be_whole() -> None:
    whole, part = interleaved(4, 8).rows[0], interleaved(4, 6).rows[0]
    assert part == tuple(action for action in whole if action.microbatch < 6)


@pytest.mark.parametrize("stages", [2, 3, 4, 8, 13])
def test_zero_bubble_1f1b_idles_as_its_authors_say(stages: int) -> None:
    for microbatches in (stages, 2 * stages - 1, 3 * stages):
        assert idle(zb_h1(stages, microbatches)) == stages - 1
        assert max(zb_h1(stages, microbatches).peak_activations) == stages
    schedule = zb_h2(stages, 3 * stages)
    assert idle(schedule) == stages - 1
    assert max(schedule.peak_activations) == 2 * stages - 1
    timeline = simulate(schedule, EQUAL)
    for rank in range(stages):
        spans = timeline.of_rank(rank)
        assert spans[-1].end - spans[0].start == timeline.busy[rank]


@pytest.mark.parametrize("ranks", range(2, 17))
def test_zb_v_idles_half_of_d_minus_1_with_the_memory_of_1f1b_on_every_rank(ranks: int) -> None:
    for microbatches in (ranks, ranks + 1, 2 * ranks, 4 * ranks):
        schedule = zb_v(ranks, microbatches)
        assert idle(schedule) == (ranks - 1) / 2
        assert max(schedule.peak_activations) == ranks
    assert set(zb_v(ranks, 2 * ranks).peak_activations) == {ranks}


@pytest.mark.parametrize("ranks", range(3, 17))
def test_v_half_and_v_min_need_a_half_and_a_third_of_the_memory(ranks: int) -> None:
    bubble = idle(one_f_one_b(ranks, 4 * ranks))
    half, least = v_half(ranks, 4 * ranks), v_min(ranks, 4 * ranks)
    assert max(half.peak_activations) <= (ranks + 2) / 2
    assert max(least.peak_activations) <= (ranks + 5) / 3
    assert idle(half) <= bubble / 2 + 0.5
    assert idle(least) <= bubble * 2 / 3 + 1


@pytest.mark.parametrize("units", [2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 4, 6, 8, 12])
def test_the_dual_pipes_idle_half_of_d_where_outputs_are_sent_at_once(ranks: int, units: int) -> None:
    both, folded = dualpipe(ranks, units * ranks), dualpipe_v(ranks, units * ranks)
    assert idle(both) == ranks / 2 - 1
    assert idle(folded) == (ranks - 1) / 2
    assert max(both.peak_activations) == ranks + 1
    assert max(folded.peak_activations) == ranks + 0.5


@pytest.mark.parametrize(("build", "numbers"), [(dualpipe, (4, 6)), (dualpipe, (4, 9)), (dualpipe_v, (4, 7))])
def test_the_dual_pipes_refuse_too_few_microbatches(build: type, numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="at least twice as many"):
        build(*numbers)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_more_waves_idle_less(ranks: int) -> None:
    idles = [idle(hanayo(ranks, ranks, chunks=2 * waves)) for waves in (1, 2, 4)]
    assert idles == sorted(idles, reverse=True)
    assert idles[0] < idle(gpipe(ranks, ranks))
    assert all(max(hanayo(ranks, ranks, chunks=2 * waves).peak_activations) == ranks for waves in (1, 2, 4))


def test_half_a_wave_is_refused() -> None:
    with pytest.raises(ValueError, match="two chunks for each; got 3"):
        hanayo(4, 4, chunks=3)
