from collections.abc import Iterator

import pytest

from .world import World


@pytest.fixture(scope="session")
def world() -> Iterator[World]:
    """Runs functions on the ranks of small worlds."""
    world = World()
    yield world
    world.close()
