import pytest

from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Placement


def test_positions_run_against_the_global_ranks_within_each_replica() -> None:
    seen = [(Topology(4, 2, rank).replica, Topology(4, 2, rank).position) for rank in range(8)]
    assert seen == [(0, 3), (0, 2), (0, 1), (0, 0), (1, 3), (1, 2), (1, 1), (1, 0)]


def test_the_replicas_of_a_position_are_on_ranks_that_follow_each_other_where_they_are_innermost() -> None:
    topologies = [Topology(3, 2, rank, replicas_innermost=True) for rank in range(6)]
    seen = [(topology.replica, topology.position) for topology in topologies]
    assert seen == [(0, 2), (1, 2), (0, 1), (1, 1), (0, 0), (1, 0)]
    assert topologies[3].group() == (1, 3, 5)
    assert topologies[3].groups() == ((0, 2, 4), (1, 3, 5))
    assert topologies[3].leader == 1
    assert topologies[3].leaders() == (0, 1)
    assert topologies[3].peers() == (2, 3)
    assert topologies[3].holders(Placement.down(3), [0]) == (4, 5)


@pytest.mark.parametrize("replicas_innermost", [False, True])
@pytest.mark.parametrize("ascending", [False, True])
def test_a_global_rank_is_found_by_its_position(ascending: bool, replicas_innermost: bool) -> None:
    for rank in range(8):
        topology = Topology(4, 2, rank, ascending, replicas_innermost)
        assert topology.groups()[topology.replica] == topology.group()
        assert topology.at(topology.position) == rank
        assert rank in topology.group()
        assert rank in topology.peers()
        assert topology.is_leader == (rank in topology.leaders())


def test_the_last_stage_of_the_down_pipe_is_on_the_leader() -> None:
    topology = Topology(4, 2, 5)
    assert topology.at(Placement.down(4).rank_of(3)) == topology.leader == 4


def test_both_pipes_and_all_replicas_hold_a_stage() -> None:
    topology = Topology(4, 2, 0)
    assert topology.holders(Placement.down(4), [0]) == (3, 7)
    assert topology.holders(Placement.bidirectional(4), [0]) == (0, 3, 4, 7)
    assert topology.holders(Placement.bidirectional(4), [0, 1]) == tuple(range(8))


def test_a_world_that_is_no_multiple_of_the_stages_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match="num_stages=4 does not divide the 6 processes"):
        Topology.of_world(6, 4, 0)
