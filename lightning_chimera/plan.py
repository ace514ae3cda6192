"""What a run will do, said once before it starts."""

import socket
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch.distributed as dist
from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from lightning_chimera.partition.balance import layer_costs
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Placement, Schedule
from lightning_chimera.timeline import Costs, simulate

_WIDEST = 10_000
"""Columns of any table."""


def plan_table(
    module: nn.Module,
    runner: StageRunner,
    topology: Topology,
    schedule: Schedule,
    recomputed: Collection[int] = (),
    threads: Collection[int] = (),
    nodes: Sequence[str] = (),
) -> Table:
    """A table of the ranks of a pipeline group and what is on them.

    Args:
        module: The user's module, whole.
        runner: Its stages.
        topology: Where the positions are.
        schedule: The training schedule.
        recomputed: The stages whose forward runs once more in the backward.
        threads: The intra-op threads of each rank.
        nodes: The node of each global rank; shown if there are several.
    """
    costs = _stage_costs(module, runner)
    pipes = "1 pipe" if schedule.num_pipes == 1 else f"{schedule.num_pipes} pipes"
    bubble = simulate(schedule, relative_costs(costs, recomputed)).bubble
    table = Table(
        title=f"{schedule.name}: {schedule.num_stages} stages, {pipes}, {schedule.num_microbatches} microbatches,"
        f" {topology.num_replicas} x {topology.num_positions} ranks",
        caption=f"simulated bubble {bubble:.0%} with the estimated costs; cuts={list(runner.cuts)}{_threads(threads)}"
        f"{_warning(schedule)}{_map_of_nodes(topology, schedule.placement, nodes)}",
        box=box.SIMPLE_HEAD,
        padding=(0, 2, 0, 0),
        pad_edge=False,
        title_justify="left",
        caption_justify="left",
    )
    where = ["node"] if len(set(nodes)) > 1 else []
    for heading in ("global rank", *where, "position", "stages", "params", "cost", "in flight"):
        table.add_column(heading, justify="left" if heading == "stages" else "right", no_wrap=True)
    for position in sorted(range(topology.num_positions), key=topology.at):
        stages = schedule.placement.stages_of(position)
        ranks = [topology.at(position, replica) for replica in range(topology.num_replicas)]
        table.add_row(
            ", ".join(map(str, ranks)),
            *(", ".join(dict.fromkeys(nodes[rank] for rank in ranks)) for _ in where),
            str(position),
            "\n".join(f"{stage}: {_contents(runner, stage)}" for stage in stages),
            f"{_parameters_on(module, runner, stages) / 1e6:.1f} M",
            f"{sum(costs[stage] for stage in stages) / sum(costs):.0%}",
            str(schedule.peak_activations[position]),
        )
    return table


def print_whole(table: Table) -> None:
    """Prints a table without hiding anything of it, however narrow the screen is, or is taken to be in a job's log."""
    console = Console()
    width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    Console(width=max(console.width, width)).print(table)


def share_nodes(rank: int, world_size: int) -> list[str]:
    """The name of the node of each global rank, on rank 0; every rank calls it."""
    if not dist.is_initialized():
        return []
    store = _get_default_store()
    store.set(f"chimera/node/{rank}", socket.gethostname())
    return [store.get(f"chimera/node/{other}").decode() for other in range(world_size)] if rank == 0 else []


def relative_costs(costs: Sequence[int], recomputed: Collection[int] = ()) -> Costs:
    """Costs for the simulator, in units of the mean stage's forward.

    A backward costs two forwards, one for the gradient of the input and one for those of the weights, and another where
    the forward runs once more.
    """
    mean = sum(costs) / len(costs)
    forward = [cost / mean for cost in costs]
    backward = [(3 if stage in recomputed else 2) * cost for stage, cost in enumerate(forward)]
    return Costs(forward, backward, weight=forward)


def _threads(threads: Collection[int]) -> str:
    """With how many threads the ranks compute."""
    if not threads:
        return ""
    least, most = min(threads), max(threads)
    count = f"{least} to {most} threads" if least < most else f"{most} thread{'s' * (most > 1)}"
    return f"\n{count} per rank"


def _map_of_nodes(topology: Topology, placement: Placement, nodes: Sequence[str]) -> str:
    """The stages of each node, if there are several; nodes that have the same ones share a line."""
    stages: dict[str, set[int]] = {}
    for rank, node in enumerate(nodes):
        stages.setdefault(node, set()).update(placement.stages_of(replace(topology, global_rank=rank).position))
    alike: dict[str, list[str]] = {}
    for node, held in stages.items():
        alike.setdefault(", ".join(map(str, sorted(held))), []).append(node)
    lines = [f"\n{', '.join(names)}: stage{'s' * (',' in held)} {held}" for held, names in alike.items()]
    return "".join(lines) if len(stages) > 1 else ""


def _warning(schedule: Schedule) -> str:
    """What people should know before they wonder about their memory."""
    held = [len(schedule.placement.stages_of(rank)) for rank in range(schedule.num_ranks)]
    return "\nevery rank holds the whole model" if schedule.num_ranks > 1 and min(held) == schedule.num_stages else ""


def _stage_costs(module: nn.Module, runner: StageRunner) -> list[int]:
    """Estimated cost of each stage."""
    costs = [0] * runner.num_stages
    for layer, cost in enumerate(layer_costs(module, runner.anatomy)):
        costs[runner.stage_of(layer)] += cost
    return costs


def _parameters_on(module: nn.Module, runner: StageRunner, stages: Sequence[int]) -> int:
    """Number of parameters on a rank that holds some stages; a tied table is on both end stages, but once on a rank."""
    held = set()
    for name, parameter in module.named_parameters(remove_duplicate=False):
        layer = runner.anatomy.layer_of(name)
        if layer is None or runner.stage_of(layer) in stages:
            held.add(parameter)
    return sum(parameter.numel() for parameter in held)


def _contents(runner: StageRunner, stage: int) -> str:
    """What is on a stage, in words."""
    blocks = runner.blocks_of(stage)
    walk = f"blocks {blocks.start}-{blocks.stop - 1}" if len(blocks) > 1 else f"block {blocks.start}"
    first = ["embedding"] if stage == 0 else []
    last = ["head"] if stage == runner.num_stages - 1 else []
    return ", ".join([*first, walk, *last])
