import math

import pytest

from lightning_chimera.schedules import (
    Schedule,
    chimera,
    default_num_microbatches,
    get_family,
    gpipe,
    one_f_one_b,
)
from lightning_chimera.timeline import Costs, render_timeline, simulate

# D: down pipe, U: up pipe.
FOUR_MICROBATCHES = """
P0: DF0 DF1 UF2 UB2 UF3 UB3 DB0 DB1
P1: DF0 UF2 DF1 UF3 UB2 DB0 UB3 DB1
P2: UF2 DF0 UF3 DF1 DB0 UB2 DB1 UB3
P3: UF2 UF3 DF0 DB0 DF1 DB1 UB2 UB3
"""

EIGHT_MICROBATCHES = """
P0: DF0 DF1 UF2 UB2 UF3 UB3 DB0 DF4 DB1 DF5 UF6 UB6 UF7 UB7 DB4 DB5
P1: DF0 UF2 DF1 UF3 UB2 DB0 UB3 DB1 DF4 UF6 DF5 UF7 UB6 DB4 UB7 DB5
P2: UF2 DF0 UF3 DF1 DB0 UB2 DB1 UB3 UF6 DF4 UF7 DF5 DB4 UB6 DB5 UB7
P3: UF2 UF3 DF0 DB0 DF1 DB1 UB2 UF6 UB3 UF7 DF4 DB4 DF5 DB5 UB6 UB7
"""

FOUR_MICROBATCHES_EQUAL_TIMES = """
rank 0  F0 F1 .  F2 B2 F3 B3 B0 .  B1
rank 1  .  F0 F2 F1 F3 B2 B0 B3 B1 .
rank 2  .  F2 F0 F3 F1 B0 B2 B1 B3 .
rank 3  F2 F3 .  F0 B0 F1 B1 B2 .  B3
"""

FOUR_MICROBATCHES_LONG_BACKWARD = """
rank 0  F0 F1 .  F2 B2 B2 F3 B3 B3 .  B0 B0 .  .  B1 B1
rank 1  .  F0 F2 F1 F3 .  B2 B2 B0 B0 B3 B3 B1 B1 .  .
rank 2  .  F2 F0 F3 F1 .  B0 B0 B2 B2 B1 B1 B3 B3 .  .
rank 3  F2 F3 .  F0 B0 B0 F1 B1 B1 .  B2 B2 .  .  B3 B3
"""

EIGHT_MICROBATCHES_LONG_BACKWARD = """
rank 0  F0 F1 .  F2 B2 B2 F3 B3 B3 .  B0 B0 F4 .  B1 B1 F5 F6 B6 B6 F7 B7 B7 .  B4 B4 .  .  B5 B5
rank 1  .  F0 F2 F1 F3 .  B2 B2 B0 B0 B3 B3 B1 B1 F4 F6 .  F5 F7 .  B6 B6 B4 B4 B7 B7 B5 B5 .  .
rank 2  .  F2 F0 F3 F1 .  B0 B0 B2 B2 B1 B1 B3 B3 F6 F4 .  F7 F5 .  B4 B4 B6 B6 B5 B5 B7 B7 .  .
rank 3  F2 F3 .  F0 B0 B0 F1 B1 B1 .  B2 B2 F6 .  B3 B3 F7 F4 B4 B4 F5 B5 B5 .  B6 B6 .  .  B7 B7
"""

EVEN = range(2, 17, 2)


def order(schedule: Schedule) -> str:
    lines = (
        f"P{rank}: " + " ".join(f"{'DU'[action.pipe]}{action.kind}{action.microbatch}" for action in row)
        for rank, row in enumerate(schedule.rows)
    )
    return "\n" + "\n".join(lines) + "\n"


def by_counted_loops(num_stages: int, num_units: int) -> str:
    """The same order by another rule: each rank repeats a few pairs of actions, without any slots."""
    half, lines = num_stages // 2, []
    for rank in range(num_stages):
        x, y = ("D", "U") if rank < half else ("U", "D")
        inner = min(rank, num_stages - 1 - rank)
        ids = {
            pipe: [unit * num_stages + offset + i for unit in range(num_units) for i in range(half)]
            for pipe, offset in (("D", 0), ("U", half))
        }
        queues = {pipe + kind: iter(ids[pipe]) for pipe in "DU" for kind in "FB"}
        row: list[str] = []
        for unit in range(num_units):
            row += (half - inner) * ([x + "B", x + "F"] if unit else [x + "F"])
            row += inner * [y + "F", x + "F"] + (half - inner) * [y + "F", y + "B"] + inner * [x + "B", y + "B"]
        row += (half - inner) * [x + "B"]
        lines.append(f"P{rank}: " + " ".join(f"{cell}{next(queues[cell])}" for cell in row))
    return "\n" + "\n".join(lines) + "\n"


def idle(num_stages: int, num_microbatches: int, costs: Costs) -> float:
    timeline = simulate(chimera(num_stages, num_microbatches), costs)
    return timeline.makespan - max(timeline.busy)


def test_four_stages_run_four_microbatches_in_the_order_of_the_paper() -> None:
    assert order(chimera(4, 4)) == FOUR_MICROBATCHES


def test_four_stages_run_eight_microbatches_as_two_units() -> None:
    assert order(chimera(4, 8)) == EIGHT_MICROBATCHES


@pytest.mark.parametrize("num_units", [1, 2, 3])
@pytest.mark.parametrize("num_stages", [2, 4, 6, 8, 16])
def test_the_slot_rule_gives_the_order_of_the_counted_loops(num_stages: int, num_units: int) -> None:
    assert order(chimera(num_stages, num_stages * num_units)) == by_counted_loops(num_stages, num_units)


@pytest.mark.parametrize(
    ("num_microbatches", "costs", "picture"),
    [
        (4, Costs(1, 1), FOUR_MICROBATCHES_EQUAL_TIMES),
        (4, Costs(1, 2), FOUR_MICROBATCHES_LONG_BACKWARD),
        (8, Costs(1, 2), EIGHT_MICROBATCHES_LONG_BACKWARD),
    ],
)
def test_chimera_runs_in_time_as_drawn(num_microbatches: int, costs: Costs, picture: str) -> None:
    assert render_timeline(simulate(chimera(4, num_microbatches), costs)) == picture.strip("\n")


@pytest.mark.parametrize(
    ("stages", "microbatches", "others", "expected"), [(2, 2, 9, 6), (4, 4, 21, 16), (4, 8, 33, 30), (8, 8, 45, 36)]
)
def test_chimera_is_faster_than_gpipe_and_1f1b(stages: int, microbatches: int, others: int, expected: int) -> None:
    makespans = [simulate(build(stages, microbatches)).makespan for build in (gpipe, one_f_one_b, chimera)]
    assert makespans == [others, others, expected]


@pytest.mark.parametrize("num_stages", EVEN)
def test_one_unit_idles_d_minus_2_halves_of_forward_and_backward(num_stages: int) -> None:
    assert idle(num_stages, num_stages, Costs(1, 1)) == num_stages - 2
    assert idle(num_stages, num_stages, Costs(1, 2)) == 2 * (num_stages - 2)


@pytest.mark.parametrize("num_units", [1, 2, 3, 4])
@pytest.mark.parametrize("num_stages", EVEN)
def test_direct_concatenation_idles_d_minus_2_for_each_unit_and_one_more(num_stages: int, num_units: int) -> None:
    num_microbatches = num_stages * num_units
    assert idle(num_stages, num_microbatches, Costs(1, 1)) == num_stages - 2
    assert idle(num_stages, num_microbatches, Costs(1, 2)) == (num_units + 1) * (num_stages - 2)
    expected = 1.5 * (num_stages - 2) + (num_units - 1) * 0.5 * (num_stages - 2)
    assert idle(num_stages, num_microbatches, Costs(1, 1.5)) == expected


@pytest.mark.parametrize("num_stages", EVEN)
def test_fewer_microbatches_than_stages_take_the_time_of_the_longer_pipe(num_stages: int) -> None:
    for num_microbatches in range(1, num_stages):
        schedule = chimera(num_stages, num_microbatches)
        rounds = math.ceil(num_microbatches / 2) - 1
        assert simulate(schedule, Costs(1, 1)).makespan == 2 * num_stages + 2 * rounds
        assert simulate(schedule, Costs(1, 2)).makespan == 3 * num_stages + 4 * rounds


@pytest.mark.parametrize(("num_microbatches", "equal", "long"), [(6, 4, 7), (10, 4, 9)])
def test_an_incomplete_last_unit_costs_little(num_microbatches: int, equal: int, long: int) -> None:
    assert idle(4, num_microbatches, Costs(1, 1)) == equal
    assert idle(4, num_microbatches, Costs(1, 2)) == long


@pytest.mark.parametrize("num_stages", EVEN)
@pytest.mark.parametrize("num_units", [1, 2, 3])
def test_a_rank_holds_between_half_and_all_of_a_unit(num_stages: int, num_units: int) -> None:
    peaks = chimera(num_stages, num_stages * num_units).peak_activations
    assert (min(peaks), max(peaks)) == (num_stages // 2 + 1, num_stages)


@pytest.mark.parametrize(
    ("num_microbatches", "pipes"), [(1, "D"), (2, "DU"), (3, "DDU"), (4, "DDUU"), (5, "DDUUD"), (7, "DDUUDDU")]
)
def test_the_down_pipe_gets_the_odd_microbatch_of_a_unit(num_microbatches: int, pipes: str) -> None:
    schedule = chimera(4, num_microbatches)
    assert "".join("DU"[schedule.pipe_of(microbatch)] for microbatch in range(num_microbatches)) == pipes


def test_one_stage_makes_one_pipe_that_alternates() -> None:
    schedule = chimera(1, 3)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0B0 0F1 0B1 0F2 0B2"]
    assert schedule.num_pipes == 1


@pytest.mark.parametrize("num_stages", [3, 5, 9])
def test_an_odd_number_of_stages_is_refused_with_a_remedy(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"even number of stages.*got {num_stages}") as caught:
        chimera(num_stages, 4)
    for remedy in (f"{num_stages - 1} or {num_stages + 1} stages", "gpipe or 1f1b"):
        assert remedy in str(caught.value)


@pytest.mark.parametrize(("stages", "microbatches", "noun"), [(0, 4, "stage"), (-2, 4, "stage"), (4, 0, "microbatch")])
def test_chimera_refuses_sizes_below_one(stages: int, microbatches: int, noun: str) -> None:
    with pytest.raises(ValueError, match=f"chimera needs at least one {noun}; got"):
        chimera(stages, microbatches)


@pytest.mark.parametrize(("name", "expected"), [("chimera", 4), ("gpipe", 8), ("1f1b", 8)])
def test_a_family_has_its_own_default_of_microbatches(name: str, expected: int) -> None:
    assert default_num_microbatches(name, 4) == expected


@pytest.mark.parametrize(
    ("name", "hint"), [("chimea", "'chimera'"), ("Chimera", "'chimera'"), ("GPIPE", "'gpipe'"), ("1f1", "'1f1b'")]
)
def test_a_misspelt_family_is_refused_with_the_nearest(name: str, hint: str) -> None:
    with pytest.raises(ValueError, match=f"no schedule '{name}'.*chimera, gpipe, 1f1b, .*Did you mean {hint}"):
        get_family(name)


def test_a_family_that_resembles_none_is_refused_with_the_list() -> None:
    with pytest.raises(ValueError, match=r"Known schedules: chimera, gpipe, 1f1b, .*\.$"):
        get_family("zzz")
