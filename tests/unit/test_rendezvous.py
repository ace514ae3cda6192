"""Where ranks meet."""

import os
import socket
from datetime import timedelta

import pytest
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from torch.distributed import TCPStore

from lightning_chimera import rendezvous
from lightning_chimera.rendezvous import check_rendezvous, reserve_port

VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "GROUP_RANK", "LOCAL_RANK", "STANDALONE_PORT")


@pytest.fixture(autouse=True)
def _environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.setenv(name, "")  # so that what a test sets is undone
        monkeypatch.delenv(name)
    monkeypatch.setattr(rendezvous, "_PATIENCE", 0.0)
    monkeypatch.setattr(rendezvous, "_reserved", [])


def reserved() -> int:
    os.environ.pop("MASTER_PORT", None)
    reserve_port(LightningEnvironment())
    return int(os.environ["MASTER_PORT"])


def chosen_by_the_system(*, reuse: bool) -> int:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, reuse)
        candidate.bind(("", 0))
        return int(candidate.getsockname()[1])


@pytest.mark.contract("Launch", "runs that start at the same moment on one machine never get the same port")
@pytest.mark.parametrize("reuse", [False, True])
def test_a_reserved_port_is_given_to_nobody_else(reuse: bool) -> None:
    ports = {reserved() for _ in range(500)}
    assert len(ports) == 500
    # Of about 28,000 ports: without the reservation some 50 of 3000 would be among them.
    assert ports.isdisjoint(chosen_by_the_system(reuse=reuse) for _ in range(3000))
    for keeper in rendezvous._reserved:
        keeper.close()


def test_a_run_listens_on_the_port_that_it_has_reserved() -> None:
    port = reserved()
    store = TCPStore("127.0.0.1", port, None, is_master=True, timeout=timedelta(seconds=10), wait_for_workers=False)
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_a_port_that_is_given_is_kept(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "12345")
    reserve_port(LightningEnvironment())
    assert os.environ["MASTER_PORT"] == "12345"
    assert not rendezvous._reserved


@pytest.mark.parametrize(
    ("given", "missing"),
    [
        ({}, "NODE_RANK and MASTER_PORT"),
        ({"NODE_RANK": "0"}, "MASTER_PORT"),
        ({"NODE_RANK": "1", "MASTER_PORT": "12345"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}, "NODE_RANK"),
    ],
)
def test_a_machine_among_several_must_know_where_it_is(monkeypatch, given, missing) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"num_nodes=2, without {missing} in the environment"):
        check_rendezvous(LightningEnvironment(), 2)
    check_rendezvous(LightningEnvironment(), 1)


def test_a_machine_that_knows_goes_on(monkeypatch) -> None:
    for name, value in {"NODE_RANK": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "12345"}.items():
        monkeypatch.setenv(name, value)
    check_rendezvous(LightningEnvironment(), 2)


def test_an_address_that_nobody_knows_is_named(monkeypatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "nowhere.invalid")
    with pytest.raises(ValueError, match=r"MASTER_ADDR='nowhere.invalid': .* knows no machine of that name"):
        check_rendezvous(LightningEnvironment(), 1)


def test_a_port_in_use_is_named_by_the_rank_that_would_listen_on_it(monkeypatch) -> None:
    with socket.socket() as other:
        other.bind(("", 0))
        other.listen()
        port = other.getsockname()[1]
        monkeypatch.setenv("MASTER_PORT", str(port))
        environment = LightningEnvironment()
        with pytest.raises(OSError, match=rf"MASTER_PORT={port}: global rank 0 .* \(Address already in use\)"):
            check_rendezvous(environment, 1)
        environment._global_rank = 1
        check_rendezvous(environment, 1)
        monkeypatch.setenv("RANK", "0")
        monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
        check_rendezvous(TorchElasticEnvironment(), 1)  # torchrun itself listens there
