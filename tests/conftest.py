"""Shared by all tests: no network, one thread per process, and an environment that no test leaves changed."""

import os
from collections.abc import Iterator

# Read when torch and transformers are imported, hence here. The tests start several ranks on few cores.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["OMP_NUM_THREADS"] = "1"

import pytest
from distributed.world import World


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    """A Trainer leaves LOCAL_RANK, MASTER_PORT, PL_GLOBAL_SEED and others behind, which would steer the next one."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Runs functions on the ranks of small worlds."""
    world = World()
    yield world
    world.close()
