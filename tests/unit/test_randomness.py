import random

import numpy as np
import torch

from lightning_chimera.runtime.randomness import keyed, mix, reseed


def draws() -> tuple[float, float, float]:
    return torch.rand(()).item(), float(np.random.rand()), random.random()


def test_one_key_gives_the_same_draws_and_another_gives_others() -> None:
    seen = []
    for key in ((1, 2), (1, 2), (2, 1), (1, 2, 0)):
        with keyed(*key):
            seen.append(draws())
    assert seen[0] == seen[1]
    assert len({*seen}) == 3


def test_the_global_generators_are_left_where_they_were() -> None:
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    expected = draws()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    with keyed(1):
        draws()
        reseed(2, 1)
    assert draws() == expected


def test_a_normal_number_that_was_drawn_with_another_is_kept() -> None:
    np.random.seed(5)
    first, second = np.random.randn(2)
    np.random.seed(5)
    assert np.random.randn() == first
    with keyed(1):
        np.random.randn()
    assert np.random.randn() == second


def test_one_key_inside_of_another_leaves_it_where_it_was() -> None:
    with keyed(1):
        draws()
        expected = draws()
    with keyed(1):
        draws()
        with keyed(2):
            draws()
        assert draws() == expected


def test_numpy_draws_from_the_same_generator_afterwards() -> None:
    before = np.random.get_bit_generator()
    with keyed(1):
        np.random.rand()
    assert np.random.get_bit_generator() is before


def test_a_failure_inside_does_not_leave_the_key_in_force() -> None:
    torch.manual_seed(5)
    expected = torch.rand(())
    torch.manual_seed(5)
    try:
        with keyed(1):
            raise KeyError
    except KeyError:
        pass
    assert torch.equal(torch.rand(()), expected)


def test_nearby_keys_give_seeds_that_have_nothing_in_common() -> None:
    seeds = {mix(step, microbatch, layer) for step in range(8) for microbatch in range(8) for layer in range(8)}
    assert len(seeds) == 512
    assert all(0 <= seed < 2**63 for seed in seeds)
