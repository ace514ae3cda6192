import pytest

from lightning_chimera.schedules import Kind, chimera, forward_only, validate
from lightning_chimera.timeline import simulate


def test_forward_only_runs_each_microbatch_forward_through_one_pipe() -> None:
    schedule = forward_only(3, 2)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1", "1F0 1F1", "2F0 2F1"]
    assert schedule.num_pipes == 1
    assert schedule.forward_only
    assert not chimera(2, 2).forward_only


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (3, 1), (4, 8), (7, 3)])
def test_forward_only_takes_n_plus_d_minus_1_forwards(stages: int, microbatches: int) -> None:
    schedule = forward_only(stages, microbatches)
    validate(schedule)
    timeline = simulate(schedule)
    assert timeline.makespan == microbatches + stages - 1
    assert {span.action.kind for span in timeline.spans} == {Kind.FORWARD}


@pytest.mark.parametrize(("stages", "microbatches", "noun"), [(0, 4, "stage"), (4, 0, "microbatch")])
def test_forward_only_refuses_sizes_below_one(stages: int, microbatches: int, noun: str) -> None:
    with pytest.raises(ValueError, match=f"forward_only needs at least one {noun}; got 0"):
        forward_only(stages, microbatches)
