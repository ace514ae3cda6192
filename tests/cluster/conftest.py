"""One cluster for all tests of a session."""

from collections.abc import Iterator

import pytest

from .cluster import Cluster, why_not


@pytest.fixture(scope="session")
def _session_cluster() -> Iterator[Cluster]:
    cluster = Cluster(4)
    yield cluster
    cluster.close()


@pytest.fixture
def cluster(request: pytest.FixtureRequest) -> Iterator[Cluster]:
    """A Slurm cluster of four nodes whose nodes are idle; jobs that a test leaves are cancelled."""
    reason = why_not()
    if reason is not None:
        pytest.skip(f"NO SLURM CLUSTER: {reason}")
    cluster: Cluster = request.getfixturevalue("_session_cluster")
    yield cluster
    cluster.cancel_all()
