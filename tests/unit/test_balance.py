import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.balance import balance, check_cuts, layer_costs

costs_of_layers = st.lists(st.integers(1, 30), min_size=3, max_size=10)


def stages(costs: list[int], cuts: tuple[int, ...]) -> list[int]:
    """Cost of each stage: the first has the prologue as well, the last the epilogue."""
    blocks = [*costs[1:-1]]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    return [sum(blocks[start:end]) for start, end in itertools.pairwise((0, *cuts, len(blocks)))]


def all_cuts(costs: list[int], num_stages: int) -> itertools.combinations:
    return itertools.combinations(range(1, len(costs) - 2), num_stages - 1)


@given(costs_of_layers, st.data())
def test_a_chain_is_cut_as_evenly_as_it_can_be(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs) - 2))

    def score(cuts: tuple[int, ...]) -> tuple[int, int]:
        return max(stages(costs, cuts)), sum(cost**2 for cost in stages(costs, cuts))

    assert score(balance(costs, num_stages)) == min(map(score, all_cuts(costs, num_stages)))


@given(costs_of_layers, st.data())
def test_pairs_that_share_a_rank_are_cut_as_evenly_as_they_can_be(costs: list[int], data: st.DataObject) -> None:
    num_stages = 2 * data.draw(st.integers(0, (len(costs) - 2) // 2)) or 1

    def score(cuts: tuple[int, ...]) -> tuple[int, int]:
        cost = stages(costs, cuts)
        return max(low + high for low, high in zip(cost, reversed(cost), strict=True)), max(cost)

    assert score(balance(costs, num_stages, paired=True)) == min(map(score, all_cuts(costs, num_stages)))


@settings(max_examples=20)
@given(st.integers(2, 12), st.integers(0, 40))
def test_a_deep_model_is_cut_at_once(half: int, more: int) -> None:
    num_stages, num_blocks = 2 * half, 2 * half + more
    cuts = balance([3, *[7] * num_blocks, 40], num_stages, paired=True)
    assert len(cuts) == num_stages - 1
    assert check_cuts(cuts, num_blocks, num_stages) == cuts


def test_a_stage_without_a_block_is_refused_with_both_numbers() -> None:
    with pytest.raises(ValueError, match=r"4 blocks can't be cut into 5 stages.*at most 4 stages"):
        balance([1, 1, 1, 1, 1, 1], 5)


@pytest.mark.parametrize("cuts", [(1,), (1, 2, 3), (2, 1), (0, 2), (2, 4), (2, 2)])
def test_cuts_that_do_not_fit_are_refused_with_the_rule(cuts: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"do not cut 4 blocks into 3 stages.*2 ascending numbers between 1 and 3"):
        check_cuts(cuts, 4, 3)


def test_the_head_of_gpt2_small_costs_about_five_blocks(gpt2_small) -> None:
    costs = layer_costs(gpt2_small, find_anatomy(gpt2_small))
    assert 5 < costs[-1] / costs[1] < 6
    assert 0 < costs[0] < costs[1]
    assert len(set(costs[1:-1])) == 1


def test_a_tied_head_costs_as_much_as_an_untied_one(gpt2_small, gpt2_small_untied) -> None:
    tied, untied = (layer_costs(module, find_anatomy(module)) for module in (gpt2_small, gpt2_small_untied))
    assert tied == untied
