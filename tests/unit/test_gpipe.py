import pytest

from lightning_chimera.schedules import gpipe, validate
from lightning_chimera.timeline import Costs, simulate

SIZES = [(stages, microbatches) for stages in (1, 2, 3, 4, 8) for microbatches in (1, 2, 5, 8)]


def test_gpipe_runs_all_forwards_then_all_backwards() -> None:
    schedule = gpipe(2, 3)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 0F2 0B0 0B1 0B2", "1F0 1F1 1F2 1B0 1B1 1B2"]
    assert schedule.name == "gpipe"


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_takes_n_plus_d_minus_1_forwards_and_backwards(stages: int, microbatches: int) -> None:
    validate(gpipe(stages, microbatches))
    timeline = simulate(gpipe(stages, microbatches), Costs(1.5, 2.25))
    assert timeline.makespan == pytest.approx((microbatches + stages - 1) * 3.75)
    assert timeline.bubble == pytest.approx((stages - 1) / (microbatches + stages - 1))


@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_gpipe_holds_all_microbatches(stages: int, microbatches: int) -> None:
    assert gpipe(stages, microbatches).peak_activations == (microbatches,) * stages


@pytest.mark.parametrize(("stages", "microbatches", "noun"), [(0, 4, "stage"), (4, 0, "microbatch"), (-1, 4, "stage")])
def test_gpipe_refuses_sizes_below_one(stages: int, microbatches: int, noun: str) -> None:
    with pytest.raises(ValueError, match=rf"gpipe needs at least one {noun}; got {min(stages, microbatches)}\."):
        gpipe(stages, microbatches)
