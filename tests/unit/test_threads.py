"""A rank computes with its share of the cores of its node, unless somebody has said otherwise."""

import os

import pytest
import torch

from lightning_chimera.threads import Seat, Threads, own_cores, share_of_cores


def seats(*masks: tuple[int, set[int]]) -> list[Seat]:
    return [Seat(node, frozenset(cores), 1) for node, cores in masks]


@pytest.mark.parametrize(
    ("ranks", "shares"),
    [
        ([(0, {0, 1, 2, 3})], [4]),
        ([(0, {0, 1, 2, 3})] * 2, [2, 2]),
        ([(0, {0, 1, 2, 3})] * 3, [1, 1, 1]),
        ([(0, {0})] * 4, [1] * 4),
        ([(0, {0, 1}), (0, {2, 3})], [2, 2]),
        ([(0, {0, 1, 2, 3}), (1, {0, 1})], [4, 2]),
        ([(0, {0, 1, 2, 3}), (0, {2, 3})], [3, 1]),
    ],
)
def test_a_core_is_shared_by_the_ranks_of_a_node_that_may_run_on_it(
    ranks: list[tuple[int, set[int]]], shares: list[int]
) -> None:
    assert [share_of_cores(seats(*ranks), rank) for rank in range(len(ranks))] == shares


@pytest.fixture
def _threads() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("starts", [True, False])
def test_a_process_has_its_own_threads_again_after_a_run(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    cores = len(own_cores())
    torch.set_num_threads(4 * cores)
    with Threads().around(2, starts=starts):
        # Those that this process starts take their number from the environment, and Lightning leaves it alone.
        assert torch.get_num_threads() == (max(1, cores // 2) if starts else 4 * cores)
        assert os.environ["OMP_NUM_THREADS"] == str(torch.get_num_threads())
    assert torch.get_num_threads() == 4 * cores
    assert "OMP_NUM_THREADS" not in os.environ


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("said", ["OMP_NUM_THREADS", "MKL_NUM_THREADS"])
def test_what_the_environment_says_is_left_alone(monkeypatch: pytest.MonkeyPatch, said: str) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    monkeypatch.setenv(said, "7")
    torch.set_num_threads(7)
    before = dict(os.environ)
    with Threads().around(2, starts=True):
        assert torch.get_num_threads() == 7
        assert os.environ == before
    assert torch.get_num_threads() == 7


@pytest.mark.usefixtures("_threads")
def test_fewer_threads_than_a_share_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(1)
    with Threads().around(1, starts=True):
        assert torch.get_num_threads() == 1
