"""Out of memory: what the rank holds, what the schedule allows it to hold, and what helps, the most first."""

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.optim import Optimizer

from lightning_chimera.engine import Engine
from lightning_chimera.schedules import SCHEDULES, Builder, Schedule

_LEANER = ("1f1b", "v_half", "v_min")
"""Schedules that hold few activations and one copy of each stage."""

_KEPT_BY_BLOCKS = 0.1
"""About what is left of a block's activations if it keeps its input only: 2 of 34 bytes per number, and the head's."""


class Holdings(NamedTuple):
    """Bytes on a rank; what shares memory is counted once.

    Attributes:
        parameters: Of its stages.
        gradients: Those in place, and those of the step that runs.
        optimizer: State of the optimizer.
        activations: What the graphs keep that have not run backward yet, without the parameters in them.
        in_flight: How many activations these are, as a schedule counts them.
    """

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    in_flight: float


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory is used up, of a device or of the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(error)


def explain(error: BaseException, engine: Engine, optimizers: Sequence[Optimizer], precision: str) -> None:
    """Adds to the message of an error what the rank holds and what helps; its type and traceback stay."""
    topology, schedule = engine.topology, engine.pipeline.schedule
    holdings = holdings_of(engine, optimizers)
    stages = schedule.placement.stages_of(topology.position)
    bound = schedule.peak_activations[topology.position]
    noun = "stage" if len(stages) == 1 else "stages"
    lines = [
        f"{error}".rstrip(),
        "",
        f"Global rank {topology.global_rank} (position {topology.position}, {noun} {', '.join(map(str, stages))}) ran"
        f" out of memory with the schedule {schedule.name!r}, {schedule.num_microbatches} microbatches. It holds"
        f" {_bytes(holdings.parameters)} of parameters, {_bytes(holdings.gradients)} of gradients,"
        f" {_bytes(holdings.optimizer)} of optimizer state, and {_bytes(holdings.activations)} in"
        f" {holdings.in_flight:g} activations, of which the schedule allows {bound:g} at a time."
        f"{_device(engine.device)}",
        "What helps, by estimates the most first:",
        *(f"  - {knob.text}" for knob in knobs(engine, holdings, precision)),
    ]
    error.args = ("\n".join(lines).lstrip(),)


def holdings_of(engine: Engine, optimizers: Iterable[Optimizer]) -> Holdings:
    """What a rank holds now."""
    held = engine.ownership.held()
    in_flight, roots = engine.pipeline.in_flight
    gradients = [parameter.grad for parameter in held if parameter.grad is not None]
    states = [value for optimizer in optimizers for state in optimizer.state.values() for value in _tensors(state)]
    known = {tensor.untyped_storage().data_ptr() for tensor in (*held, *gradients)}
    return Holdings(
        _size(held, set()), _size(gradients, set()), _size(states, set()), _size(_saved(roots), known), in_flight
    )


class _Knob(NamedTuple):
    saves: float
    text: str


def knobs(engine: Engine, holdings: Holdings, precision: str) -> list[_Knob]:
    """What can be changed, with about how many bytes each change saves on this rank, the most first."""
    layout, topology = engine.layout, engine.topology
    schedule = engine.layout.schedule()
    position, microbatches = topology.position, schedule.num_microbatches
    weights = float(holdings.parameters + holdings.gradients + holdings.optimizer)
    part = schedule.peak_activations[position]
    # What the graphs will keep at the schedule's peak. Where they have kept nothing yet it is more than all else, and
    # nothing where it is not a training step that has failed.
    activations = 2 * weights if engine.pipeline.is_training else 0.0
    if holdings.in_flight:
        activations = holdings.activations / holdings.in_flight * part
    found = [
        _Knob(
            weights / 2 + activations / 4,
            f"more stages: num_stages={2 * topology.num_positions} halves what a rank holds of the model",
        ),
        _Knob(
            activations / 2 or 1.0,
            "half the rows in a batch, and twice Trainer(accumulate_grad_batches=...), which trains the same",
        ),
    ]
    if layout.recompute is None:
        text = "recompute='blocks' keeps the inputs of blocks only, for a third more computing"
        found.append(_Knob(activations * (1 - _KEPT_BY_BLOCKS), text))
    if layout.recompute != "stages":
        text = "recompute='stages' keeps the inputs of stages only"
        found.append(_Knob(activations * (0.85 if layout.recompute is None else 0.5), text))
    if precision.startswith(("32", "64")):
        found.append(
            _Knob(activations * 0.4, "Trainer(precision='bf16-mixed') keeps most activations in half the bytes")
        )
        text = "Trainer(precision='bf16-true') holds all in half the bytes"
        found.append(_Knob((weights + activations) * 0.45, text))
    for name, count, peak in _leaner(schedule, layout.build, topology.num_positions, position):
        left = (peak / count) / (part / microbatches)
        if left < 0.95:
            text = (
                f"{name} holds at most {peak:g} activations of 1/{count} of a batch each, not {part:g} of"
                f" 1/{microbatches}: {left:.0%}"
            )
            found.append(_Knob(activations * (1 - left), text))
    excess = 1 - _mean_parameters(engine) / max(1, sum(parameter.numel() for parameter in engine.ownership.held()))
    if excess > 0.1:
        text = f"cuts=[...] that give this rank fewer blocks: it holds {1 / (1 - excess):.1f} times the mean"
        found.append(_Knob((weights + activations) * excess, text))
    return sorted((knob for knob in found if knob.saves), key=lambda knob: -knob.saves)


def _leaner(schedule: Schedule, build: Builder, ranks: int, position: int) -> Iterator[tuple[str, int, float]]:
    """What may hold less: how people ask for it, its microbatches, and the activations that it holds at most."""
    more = 2 * schedule.num_microbatches
    candidates: list[tuple[str, int, Builder]] = [(f"num_microbatches={more}", more, build)]
    candidates += [
        (f"schedule={name!r}", schedule.num_microbatches, SCHEDULES[name].build)
        for name in _LEANER
        if name != schedule.name
    ]
    for text, count, builder in candidates:
        try:
            peaks = builder(ranks, count).peak_activations
        except ValueError:  # not for these numbers
            continue
        yield text, count, peaks[position] if builder is build else max(peaks)


def _mean_parameters(engine: Engine) -> float:
    """Parameters that a rank of the group holds in the mean."""
    holders = engine.ownership.holders
    total = sum(parameter.numel() * len(ranks) for parameter, ranks in holders.items())
    return total / engine.topology.world_size


def _saved(roots: Iterable[Tensor | Node]) -> Iterator[Tensor]:
    """Tensors, and those that the graphs behind them and behind some nodes keep for their backward."""
    pending: list[Any] = []
    for root in roots:
        if isinstance(root, Tensor):
            yield root
        pending.append(root.grad_fn if isinstance(root, Tensor) else root)
    seen: set[Any] = set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [function for function, _ in node.next_functions]
        names = [name for name in dir(node) if name.startswith("_saved_") or name == "saved_tensors"]
        for name in names:
            try:
                yield from _tensors(getattr(node, name))
            except RuntimeError:  # freed already, or changed since
                continue


def _tensors(tree: Any) -> list[Tensor]:
    if isinstance(tree, Tensor):
        return [tree]
    parts = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for part in parts for tensor in _tensors(part)]


def _size(tensors: Iterable[Tensor | nn.Parameter], seen: set[int]) -> int:
    """Bytes of the storages of some tensors, each counted once, and those seen already not at all."""
    total = 0
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            total += storage.nbytes()
    return total


def _device(device: torch.device) -> str:
    """What the device, or this process, uses altogether."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        used, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        return (
            f" torch uses {_bytes(used)} of {device} and keeps {_bytes(reserved)}; {_bytes(free)} of {_bytes(total)}"
            " are free."
        )
    try:
        with open("/proc/self/statm") as numbers:
            pages = int(numbers.read().split()[1])
    except OSError:  # not on Linux
        return ""
    return f" The process uses {_bytes(pages * os.sysconf('SC_PAGE_SIZE'))} altogether."


def _bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.4g} {unit}"
        count /= 1024
    return f"{count:.4g} TiB"
