"""Where the processes of a run meet: the address of the first machine, and a port on it."""

import os
import socket
import time
from datetime import timedelta

import torch.distributed as dist
from lightning.fabric.plugins import ClusterEnvironment
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.fabric.utilities.distributed import _init_dist_connection

_PATIENCE = 10.0
"""Seconds for an answer about a name, which may take some at the start of a job."""

_reserved: list[socket.socket] = []


def check_rendezvous(environment: ClusterEnvironment, nodes: int) -> None:
    """Refuses an address and a port at which the processes can't meet, before any is started.

    Args:
        environment: Whom the Trainer asks for them.
        nodes: The Trainer's number of nodes.

    Raises:
        ValueError: They are not said, or not those of a machine.
        OSError: This process can't listen on the port.
    """
    if type(environment) is LightningEnvironment and nodes > 1:
        _check_variables(environment, nodes)
    _check_address(environment.main_address)
    listens = environment.global_rank() == 0 and not isinstance(environment, TorchElasticEnvironment)
    if listens and "MASTER_PORT" in os.environ and not dist.is_initialized():
        _check_port(environment.main_port)


def reserve_port(environment: ClusterEnvironment | None) -> None:
    """Chooses the port of a run, where nobody else does, and keeps it from others until this process ends.

    A port that was only looked for could be given to another run before this one listens on it. A socket that is bound
    and does not listen keeps it; it allows its address to be used again, so that this run can.
    """
    if type(environment) is not LightningEnvironment or "MASTER_PORT" in os.environ or environment._main_port != -1:
        return
    if "STANDALONE_PORT" in os.environ:
        return
    keeper = socket.socket()
    keeper.bind(("", 0))
    keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    _reserved.append(keeper)
    os.environ["MASTER_PORT"] = str(keeper.getsockname()[1])


def meet(environment: ClusterEnvironment, backend: str, timeout: timedelta) -> None:
    """Makes the process group of all ranks.

    Args:
        environment: Whom the Trainer asks for ranks, address and port.
        backend: Of the process group.
        timeout: Bound on every wait.

    Raises:
        RuntimeError: The ranks do not meet.
    """
    try:
        _init_dist_connection(environment, backend, timeout=timeout)
    except RuntimeError as error:
        error.add_note(
            f"chimera: global rank {environment.global_rank()} of {environment.world_size()} did not meet the others at"
            f" {environment.main_address}:{environment.main_port} (MASTER_ADDR, MASTER_PORT). All machines need the"
            " same address, port, devices and num_nodes, and each its own NODE_RANK. The name of each must stand for an"
            " address that the others reach, or GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME name such an interface."
        )
        raise


def _check_variables(environment: LightningEnvironment, nodes: int) -> None:
    missing = [] if {"NODE_RANK", "GROUP_RANK"} & os.environ.keys() else ["NODE_RANK"]
    missing += [] if "MASTER_ADDR" in os.environ or environment.node_rank() == 0 else ["MASTER_ADDR"]
    missing += [] if "MASTER_PORT" in os.environ else ["MASTER_PORT"]
    if missing:
        raise ValueError(
            f"num_nodes={nodes}, without {' and '.join(missing)} in the environment: this process would wait for others"
            f" that never come. On each machine set NODE_RANK, 0 to {nodes - 1}, and MASTER_ADDR and MASTER_PORT to"
            " the address of the first one and a free port of it; or let torchrun or srun start the processes."
        )


def _check_address(address: str) -> None:
    deadline = time.monotonic() + _PATIENCE
    while True:
        try:
            socket.getaddrinfo(address, None)
            return
        except OSError as error:
            if time.monotonic() > deadline:
                raise ValueError(
                    f"MASTER_ADDR={address!r}: {socket.gethostname()} knows no machine of that name ({error}). Set it"
                    " to the name or the address of the first machine."
                ) from error
        time.sleep(0.5)


def _check_port(port: int) -> None:
    with socket.socket() as candidate:
        candidate.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            candidate.bind(("", port))
        except OSError as error:
            raise OSError(
                f"MASTER_PORT={port}: global rank 0 can't listen on it ({error.strerror}). Set it to another one, alike"
                " on all machines; on a single one leave it out, and a free one is chosen."
            ) from error
