import pytest

from lightning_chimera.schedules import Kind, Placement, chimera, forward_only, validate
from lightning_chimera.timeline import simulate


def test_forward_only_runs_each_microbatch_forward_through_one_pipe() -> None:
    schedule = forward_only(Placement.down(3), 2)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1", "1F0 1F1", "2F0 2F1"]
    assert schedule.num_pipes == 1
    assert schedule.forward_only
    assert not chimera(2, 2).forward_only


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 1), (1, 4), (3, 1), (4, 8), (7, 3)])
def test_forward_only_takes_n_plus_d_minus_1_forwards(stages: int, microbatches: int) -> None:
    schedule = forward_only(Placement.down(stages), microbatches)
    validate(schedule)
    timeline = simulate(schedule)
    assert timeline.makespan == microbatches + stages - 1
    assert {span.action.kind for span in timeline.spans} == {Kind.FORWARD}


def test_a_rank_with_several_stages_runs_them_one_after_the_other() -> None:
    schedule = forward_only(Placement.zigzag(2), 2)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0 0F1 3F0 3F1", "1F0 1F1 2F0 2F1"]
    validate(schedule)


def test_only_the_first_pipe_is_run() -> None:
    schedule = forward_only(Placement.bidirectional(2), 1)
    assert [" ".join(map(str, row)) for row in schedule.rows] == ["0F0", "1F0"]


def test_forward_only_refuses_to_run_no_microbatch() -> None:
    with pytest.raises(ValueError, match="forward_only needs at least one microbatch; got 0"):
        forward_only(Placement.down(4), 0)
