import itertools

import pytest

from lightning_chimera.schedules import SCHEDULES, Kind, chimera, gpipe
from lightning_chimera.timeline import (
    Costs,
    SyncPolicy,
    SyncSpan,
    Timeline,
    simulate,
    sync_order,
    sync_places,
    synchronize,
)


def synced(policy: SyncPolicy, stages: int = 8, cost: float = 1.0) -> Timeline:
    schedule = chimera(stages, stages)
    return synchronize(schedule, simulate(schedule, Costs(1, 2)), policy, cost=cost)


def starts(timeline: Timeline) -> list[float]:
    """How long before the last action each stage's all-reduce starts."""
    return [timeline.makespan - sync.start for sync in sorted(timeline.syncs)]


def test_an_eager_all_reduce_starts_with_the_last_gradient_of_its_stage() -> None:
    assert starts(synced(SyncPolicy.EAGER, cost=0)) == [0, 2, 4, 6, 8, 10, 12, 17]


def test_a_lazy_all_reduce_starts_after_the_last_action_of_its_ranks() -> None:
    # Rank r ends with its smaller stage, which ends 2 * min(r, 7 - r) units before the step.
    assert starts(synced(SyncPolicy.LAZY, cost=0)) == [0, 2, 4, 6, 6, 4, 2, 0]


def test_the_rule_of_the_paper_is_eager_beyond_the_middle_only() -> None:
    assert starts(synced(SyncPolicy.EAGER_OPT, cost=0)) == [0, 2, 4, 6, 6, 10, 12, 17]


def test_what_can_hide_is_found_by_the_costs() -> None:
    assert starts(synced(SyncPolicy.HIDDEN, cost=0)) == [0, 2, 4, 6, 8, 10, 12, 17]
    # Stage 4 would have to end 6 units before the step, with the last action of its ranks: it has 2 units for that.
    assert starts(synced(SyncPolicy.HIDDEN, cost=2))[4] == 8
    assert starts(synced(SyncPolicy.HIDDEN, cost=2.5))[4] == 6


@pytest.mark.parametrize("cost", [0.5, 2, 5])
@pytest.mark.parametrize("stages", [4, 8])
def test_the_earlier_an_all_reduce_starts_the_earlier_the_step_ends(stages: int, cost: float) -> None:
    ends = {policy: synced(policy, stages, cost).end for policy in SyncPolicy}
    assert ends[SyncPolicy.EAGER] <= ends[SyncPolicy.EAGER_OPT] <= ends[SyncPolicy.LAZY]
    assert ends[SyncPolicy.HIDDEN] <= ends[SyncPolicy.LAZY]


@pytest.mark.parametrize("policy", SyncPolicy)
def test_a_rank_takes_part_in_one_all_reduce_at_a_time(policy: SyncPolicy) -> None:
    timeline = synced(policy, cost=3)
    assert [sync.ranks for sync in sorted(timeline.syncs)] == [(min(s, 7 - s), max(s, 7 - s)) for s in range(8)]
    for rank in range(8):
        spans = sorted((sync.start, sync.end) for sync in timeline.syncs if rank in sync.ranks)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(spans))


def test_a_stage_that_one_rank_holds_needs_no_all_reduce_without_replicas() -> None:
    schedule = gpipe(3, 4)
    timeline = simulate(schedule)
    assert synchronize(schedule, timeline, SyncPolicy.LAZY) == timeline
    assert timeline.end == timeline.makespan
    alike = synchronize(schedule, timeline, SyncPolicy.LAZY, cost=[1, 2, 4], num_replicas=2)
    assert alike.syncs == (SyncSpan((2,), (2,), 14, 18), SyncSpan((1,), (1,), 16, 18), SyncSpan((0,), (0,), 18, 19))
    assert (alike.makespan, alike.end) == (18, 19)


def test_the_number_of_costs_is_the_number_of_stages() -> None:
    with pytest.raises(ValueError, match="2 costs for 3 stages"):
        synchronize(gpipe(3, 4), simulate(gpipe(3, 4)), SyncPolicy.LAZY, cost=[1, 2])


# ------------------------------------------------------------------------------------------------------ order of starts


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name != "gems"])
def test_all_stages_of_a_schedule_may_be_summed_early_in_the_order_of_their_gradients(name: str) -> None:
    for num_microbatches in (4, 8):
        try:
            schedule = SCHEDULES[name].build(4, num_microbatches)
        except ValueError:  # too few microbatches for it
            continue
        order = sync_order(schedule, SyncPolicy.EAGER)
        assert sorted(order) == list(range(schedule.num_stages))
        if name.startswith("chimera"):
            assert order[0] == schedule.num_stages - 1


def test_what_a_rank_sums_early_must_not_keep_others_from_coming_there() -> None:
    # GEMS runs one microbatch at a time: the last one waits for ranks that would wait for it.
    assert sync_order(SCHEDULES["gems"].build(4, 4), SyncPolicy.EAGER) == ()
    assert sync_places(SCHEDULES["gems"].build(4, 4), 0, (3,)) == {}


@pytest.mark.parametrize("policy", SyncPolicy)
def test_the_order_is_of_the_stages_that_the_simulator_starts_early(policy: SyncPolicy) -> None:
    early = {SyncPolicy.EAGER: 8, SyncPolicy.EAGER_OPT: 3, SyncPolicy.HIDDEN: 4, SyncPolicy.LAZY: 0}[policy]
    assert sync_order(chimera(8, 8), policy) == tuple(range(7, 7 - early, -1))


def test_a_rank_starts_a_sum_before_the_action_behind_the_last_gradient() -> None:
    schedule = chimera(4, 4)
    for rank, stage in ((0, 3), (3, 3), (1, 2), (2, 2)):
        row, places = schedule.rows[rank], sync_places(schedule, rank, (3, 2))
        place = max(map(row.index, places))
        assert (row[place - 1].kind, row[place - 1].stage) == (Kind.BACKWARD, stage)
        assert all(action.stage != stage for action in row[place:])
        assert places[row[place]] == 2


@pytest.mark.parametrize("policy", SyncPolicy)
@pytest.mark.parametrize("name", SCHEDULES)
def test_copies_that_train_no_microbatch_wait_for_nothing(name: str, policy: SyncPolicy) -> None:
    family = SCHEDULES[name]
    schedule = (family.short or family.build)(4, 1)
    assert len(synchronize(schedule, simulate(schedule), policy, num_replicas=2).syncs) == schedule.num_stages
    assert set(sync_order(schedule, policy)) <= set(range(schedule.num_stages))
