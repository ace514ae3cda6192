"""Whole-model names in, whole-model names out, whatever the layout.

A checkpoint is the file that a plain Trainer writes: the union of what the ranks hold, under the names and optimizer
ids of a single process. So it loads at any number of stages and replicas, and in a plain Trainer.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from lightning_chimera.partition.ownership import Ownership
from lightning_chimera.partition.placeholder import Placeholder
from lightning_chimera.runtime.packing import receive_tree, send_tree


def gather_parameters(module: nn.Module, ownership: Ownership, world: ProcessGroup) -> dict[nn.Parameter, Tensor]:
    """Brings the parameters that global rank 0 does not hold to it. Every rank calls it.

    Returns:
        On global rank 0 the values of its placeholders, on the CPU; nothing elsewhere.
    """
    values: dict[nn.Parameter, Tensor] = {}
    for parameter in module.parameters():
        owner = ownership.owner(parameter)
        if owner == 0:
            continue
        if ownership.rank == 0:
            values[parameter] = torch.empty(parameter.shape, dtype=parameter.dtype)
            dist.recv(values[parameter], owner, group=world)
        elif ownership.rank == owner:
            dist.send(parameter.detach().cpu().contiguous(), 0, group=world)
    return values


def module_state(module: nn.Module, ownership: Ownership, world: ProcessGroup) -> dict[str, Any]:
    """The state of the whole module on global rank 0, with its names in their order.

    Every rank calls it. On the others the names are the same, so that hooks which take some out work there too, and
    what they do not hold is a tensor on the meta device.
    """
    values = gather_parameters(module, ownership, world)
    named = dict(module.named_parameters(remove_duplicate=False))

    def whole(name: str, value: Any) -> Any:
        if name in named and named[name] in values:
            return values[named[name]]
        is_absent = isinstance(value, Placeholder)
        return torch.empty(value.shape, dtype=value.dtype, device="meta") if is_absent else value

    return {name: whole(name, value) for name, value in module.state_dict().items()}


def spread_parameters(
    module: nn.Module,
    ownership: Ownership,
    world: ProcessGroup,
    device: torch.device,
    of: Callable[[nn.Parameter], Tensor | None] = lambda parameter: parameter.detach(),
) -> dict[nn.Parameter, Tensor]:
    """Brings something of every parameter to every rank. Every rank calls it.

    Args:
        module: The module, cut.
        ownership: Who holds what.
        world: All ranks, on the CPU.
        device: Where the values go.
        of: What is brought, of a parameter's shape: by default its value; ``None`` on all ranks if there is nothing.

    Returns:
        The values of this rank's placeholders.
    """
    values: dict[nn.Parameter, Tensor] = {}
    everyone = dist.get_world_size(world)
    for parameter in module.parameters():
        own = of(parameter)
        if own is None or len(ownership.holders[parameter]) == everyone:
            continue
        value = torch.empty(parameter.shape, dtype=parameter.dtype) if parameter.is_meta else own.cpu().contiguous()
        dist.broadcast(value, ownership.owner(parameter), group=world)
        if parameter.is_meta:
            values[parameter] = value.to(device)
    return values


def optimizer_state(optimizer: Optimizer, ownership: Ownership, world: ProcessGroup) -> dict[str, Any]:
    """The state of the whole module's optimizer on global rank 0, of its own part elsewhere. Every rank calls it."""
    state = optimizer.state_dict()
    owners = [ownership.owner(parameter) for parameter in _parameters(optimizer)]
    if ownership.rank != 0:
        own = {index: value for index, value in state["state"].items() if owners[index] == ownership.rank}
        if ownership.rank in owners:
            send_tree(own, 0, world)
        return state
    merged = {index: value for index, value in state["state"].items() if owners[index] == 0}
    for rank in sorted(set(owners) - {0}):
        merged |= receive_tree(rank, world)
    return {**state, "state": dict(sorted(merged.items()))}


def load_optimizer_state(optimizer: Optimizer, state: dict[str, Any]) -> None:
    """Loads what concerns the parameters on this rank from the state of the whole module's optimizer."""
    parameters = _parameters(optimizer)
    own = {
        index: value
        for index, value in state["state"].items()
        if index >= len(parameters) or not parameters[index].is_meta  # a wrong index is the optimizer's to refuse
    }
    optimizer.load_state_dict({**state, "state": own})


def _parameters(optimizer: Optimizer) -> Sequence[nn.Parameter]:
    """The optimizer's parameters in the order of their ids."""
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]
