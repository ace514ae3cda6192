import pytest
import torch.distributed as dist

from lightning_chimera.runtime.errors import has_timed_out, is_of_a_peer
from lightning_chimera.runtime.shared_memory import LinkError

TIME_OUTS = [
    RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 1000ms for recv operation to complete"),
    dist.DistStoreError("wait timeout after 1000ms, keys: /default_pg/0"),
    LinkError("nothing has come for 1 s"),
    LinkError("the receiver has read no message for 1 s, and no more fit"),
]
PEERS = [
    RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:31337"),
    RuntimeError("NCCL communicator was aborted on rank 1."),
    LinkError("the sender has gone"),
    LinkError("the receiver has gone"),
]
OTHERS = [RuntimeError("DataLoader timed out after 5 seconds"), ValueError("no"), RuntimeError("shapes differ")]


@pytest.mark.parametrize("error", TIME_OUTS, ids=str)
def test_a_wait_in_vain_is_known_whatever_was_waited_for(error: Exception) -> None:
    assert has_timed_out(error)
    message = RuntimeError("Message 0F0 -> 1F0 was expected from rank 1.")
    message.__cause__ = error
    assert has_timed_out(message)


@pytest.mark.parametrize("error", PEERS, ids=str)
def test_a_peer_that_has_gone_is_known_and_was_not_waited_for(error: Exception) -> None:
    assert is_of_a_peer(error)
    assert not has_timed_out(error)


@pytest.mark.parametrize("error", OTHERS, ids=str)
def test_errors_of_this_rank_are_neither(error: Exception) -> None:
    assert not is_of_a_peer(error)
    assert not has_timed_out(error)
