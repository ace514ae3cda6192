"""Ranks share the cores of their node."""

import os
from typing import Any

import pytest
import torch

from lightning_chimera.threads import own_cores

from .fidelity import Cell, make_trainer
from .users import LanguageModule, make_loader, make_rows
from .world import World

CHIMERA = Cell("chimera", 2, microbatches=2, precision="32-true")


class Notes(LanguageModule):
    """Notes its threads in mid-run."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.threads = torch.get_num_threads()


def train(said: dict[str, str], threads: int, bound: bool) -> tuple[int, int, int]:
    """Trains a batch; the cores of this rank, and the threads in the run and after it."""
    os.environ.pop("OMP_NUM_THREADS", None)
    os.environ.update(said)
    rank, cores = int(os.environ["LOCAL_RANK"]), sorted(os.sched_getaffinity(0))
    if bound:
        os.sched_setaffinity(0, {cores[rank % len(cores)]})
    torch.set_num_threads(threads)
    module = Notes(exact=False)
    make_trainer(CHIMERA, max_steps=1).fit(module, make_loader(make_rows("gpt2", 8)))
    return len(own_cores()), module.threads, torch.get_num_threads()


@pytest.mark.contract("Launch", "each rank computes with its share of the node's cores, unless OMP_NUM_THREADS is set")
@pytest.mark.parametrize("bound", [False, True])
def test_ranks_share_the_cores_of_a_node_for_the_time_of_a_run(world: World, bound: bool) -> None:
    for cores, during, after in world.run(train, {}, 8, bound, size=2):
        assert during == (1 if bound else max(1, cores // 2))
        assert after == 8


@pytest.mark.parametrize(("said", "threads"), [({"OMP_NUM_THREADS": "8"}, 8), ({"SLURM_CPUS_PER_TASK": "1"}, 1)])
def test_what_has_been_said_of_threads_holds(world: World, said: dict[str, str], threads: int) -> None:
    assert [during for _, during, _ in world.run(train, said, 8, False, size=2)] == [threads] * 2
