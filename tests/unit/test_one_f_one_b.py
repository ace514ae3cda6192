import pytest

from lightning_chimera.schedules import one_f_one_b, validate
from lightning_chimera.timeline import Costs, simulate

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 3, 5, 8, 17)]

ORDER = """
rank 0: F0 F1 F2 F3 B0 F4 B1 B2 B3 B4
rank 1: F0 F1 F2 B0 F3 B1 F4 B2 B3 B4
rank 2: F0 F1 B0 F2 B1 F3 B2 F4 B3 B4
rank 3: F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
"""


def test_one_f_one_b_warms_up_alternates_and_drains() -> None:
    schedule = one_f_one_b(4, 5)
    lines = [
        f"rank {rank}: " + " ".join(f"{action.kind}{action.microbatch}" for action in row)
        for rank, row in enumerate(schedule.rows)
    ]
    assert lines == ORDER.split("\n")[1:-1]
    assert schedule.name == "1f1b"


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_one_f_one_b_takes_n_plus_d_minus_1_forwards_and_backwards(stages: int, microbatches: int) -> None:
    validate(one_f_one_b(stages, microbatches))
    timeline = simulate(one_f_one_b(stages, microbatches), Costs(1.5, 2.25))
    assert timeline.makespan == pytest.approx((microbatches + stages - 1) * 3.75)
    assert timeline.idle == pytest.approx([(stages - 1) * 3.75] * stages)


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_rank_r_of_one_f_one_b_holds_at_most_d_minus_r_microbatches(stages: int, microbatches: int) -> None:
    expected = tuple(min(microbatches, stages - rank) for rank in range(stages))
    assert one_f_one_b(stages, microbatches).peak_activations == expected


@pytest.mark.parametrize(("stages", "microbatches", "noun"), [(0, 4, "stage"), (4, 0, "microbatch")])
def test_one_f_one_b_refuses_sizes_below_one(stages: int, microbatches: int, noun: str) -> None:
    with pytest.raises(ValueError, match=f"1f1b needs at least one {noun}; got 0"):
        one_f_one_b(stages, microbatches)
