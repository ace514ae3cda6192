"""Callbacks that know a pipeline."""

import math
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from time import perf_counter
from typing import Any

import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.fabric.utilities.throughput import get_available_flops
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning_utilities.core.rank_zero import rank_zero_warn
from typing_extensions import override

from lightning_chimera.partition.flops import matmul_rate
from lightning_chimera.schedules import Kind
from lightning_chimera.strategy import ChimeraStrategy
from lightning_chimera.timeline import Costs, Timeline, simulate, synchronize, write_trace
from lightning_chimera.timeline.plot import plot_timelines, save_figure


class PipelineTrace(Callback):
    """Shows how well a pipeline works.

    **A trace of one step.** Two files, ``timeline.json`` for Perfetto (ui.perfetto.dev) and ``timeline.png``, show when
    every action and every sum of gradients ran in the first pipeline group, beside what the simulator makes of the same
    costs. The end of a sum is when its rank saw it, between two actions.

    **Figures** of some steps, the same on every rank, are logged:

    - ``pipeline/bubble``: the part of the time of a step's actions in which ranks idle;
    - ``pipeline/sync_wait``: seconds that a rank waits for sums of gradients behind its last action;
    - ``pipeline/peak_activations``: most activations on a rank at one time, 1 for a microbatch of an equal share;
    - ``pipeline/mfu``: model FLOP utilization: the operations of the model's matrices and attention, each counted once
      though it may be recomputed, over what the devices could have done from the batch's start to the step's end.

    Times are of the last batch of an accumulation window, by the host's clock. A GPU works behind it: there the trace,
    ``pipeline/bubble`` and ``pipeline/sync_wait`` are those of handing work over, not of the work itself, as a warning
    says. ``pipeline/mfu`` holds, since the host waits for each step's loss.

    Args:
        dirpath: Folder for the files; the Trainer's ``default_root_dir`` if ``None``.
        at_step: The optimizer step to record, counted from 1. Early steps are slower than the rest.
        every_n_steps: Steps from one log of figures to the next; the Trainer's ``log_every_n_steps`` if ``None``, and 0
            for none.
        peak_flops: Floating point operations that a device can do in a second. If ``None``, Lightning's table for GPUs
            says it, and on the CPU a few products of matrices at the start, in the threads of a rank; without either
            there is no ``pipeline/mfu``.

    Raises:
        ValueError: ``at_step`` is below 1, ``every_n_steps`` below 0, or ``peak_flops`` not above 0.
    """

    def __init__(
        self,
        dirpath: str | Path | None = None,
        at_step: int = 20,
        every_n_steps: int | None = None,
        peak_flops: float | None = None,
    ) -> None:
        if at_step < 1:
            raise ValueError(f"at_step={at_step}: steps are counted from 1.")
        if every_n_steps is not None and every_n_steps < 0:
            raise ValueError(f"every_n_steps={every_n_steps}: give a number of steps, or 0 to log nothing.")
        if peak_flops is not None and not peak_flops > 0:
            raise ValueError(f"peak_flops={peak_flops}: a device can do some operations in a second, such as 1e12.")
        self.dirpath = dirpath
        self.at_step = at_step
        self.every_n_steps = every_n_steps
        self.peak_flops = peak_flops
        self._written = False
        self._rate = 0.0
        self._started = (0, 0.0)

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Refuses a Trainer without a pipeline.

        Raises:
            MisconfigurationException: The strategy is another one.
        """
        if not isinstance(trainer.strategy, ChimeraStrategy):
            raise MisconfigurationException(
                f"PipelineTrace records a pipeline, but the strategy is {type(trainer.strategy).__name__}."
                " Use Trainer(strategy='chimera') or leave the callback out."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Finds out what a device can do, and says where its clock is not the one that is read."""
        device = trainer.strategy.root_device
        if device.type != "cpu":
            rank_zero_warn(
                f"PipelineTrace reads the host's clock, and {device.type} works behind it: the trace, pipeline/bubble"
                " and pipeline/sync_wait show when work was handed to the device, not when it ran. pipeline/mfu and"
                " pipeline/peak_activations hold."
            )
        if self._every(trainer):
            self._rate = self.peak_flops or _peak_flops(device, str(trainer.precision))

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Notes the time."""
        self._started = trainer.global_step, perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Logs the figures, and writes the files, once a step has been made."""
        strategy, (step_before, start) = trainer.strategy, self._started
        if not isinstance(strategy, ChimeraStrategy) or trainer.global_step == step_before:
            return
        every = self._every(trainer)
        if every and trainer.global_step % every == 0:
            figures = strategy.engine.figures(perf_counter() - start, self._rate)
            names = {name: name for name in figures._fields} | {"utilization": "mfu"}
            values = {f"pipeline/{names[name]}": value for name, value in figures._asdict().items()}
            pl_module.log_dict({name: value for name, value in values.items() if not math.isnan(value)}, batch_size=1)
        if self._written or trainer.global_step != self.at_step:
            return
        self._written = True
        measured = strategy.timeline()
        if trainer.is_global_zero and measured is not None:
            self._write(measured, strategy, Path(self.dirpath or trainer.default_root_dir))

    def _every(self, trainer: Trainer) -> int:
        return trainer.log_every_n_steps if self.every_n_steps is None else self.every_n_steps  # type: ignore[attr-defined]

    @staticmethod
    def _write(measured: Timeline, strategy: ChimeraStrategy, folder: Path) -> None:
        """Writes both files."""
        schedule = strategy.engine.pipeline.schedule
        simulated = synchronize(
            schedule,
            simulate(schedule, measured_costs(measured, schedule.num_stages)),
            strategy.engine.sync_order,
            cost=measured_sums(measured, schedule.num_stages),
            num_replicas=strategy.topology.num_replicas,
        )
        pair = {
            word: replace(timeline, name=f"{schedule.name}, {word}", labels=measured.labels)
            for word, timeline in (("measured", measured), ("simulated", simulated))
        }
        write_trace(folder / "timeline.json", pair)
        save_figure(plot_timelines(list(pair.values()), time_label="seconds"), folder / "timeline.png")


def _peak_flops(device: torch.device, precision: str) -> float:
    """What a device can do in a second, or 0 where nothing says it."""
    dtype = torch.bfloat16 if "bf16" in precision else torch.float16 if "16" in precision else torch.float32
    if device.type == "cpu":
        return matmul_rate(torch.float64 if "64" in precision else dtype)
    return float(get_available_flops(device, dtype) or 0.0)


class ValidationLosses(Callback):
    """Notes the loss of each validation, ``val/loss``.

    Attributes:
        values: The losses, in the order of the validations.
        has_begun: Whether a batch was about to be asked for, be it for the sanity check; before that most errors are
            mistakes in a config.
    """

    def __init__(self) -> None:
        self.values: list[float] = []
        self.has_begun = False

    @override
    def on_sanity_check_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.has_begun = True

    @override
    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.sanity_checking and "val/loss" in trainer.callback_metrics:
            self.values.append(trainer.callback_metrics["val/loss"].item())


def measured_sums(timeline: Timeline, num_stages: int) -> list[float]:
    """How long the sums of each stage's gradients took, from when the last of its ranks had started one.

    A sum of several stages is shared out evenly.
    """
    durations: dict[tuple[int, ...], list[float]] = defaultdict(list)
    for sync in timeline.syncs:
        durations[sync.stages].append(sync.end - sync.start)
    return [
        sum(min(times) / len(stages) for stages, times in durations.items() if stage in stages)
        for stage in range(num_stages)
    ]


def measured_costs(timeline: Timeline, num_stages: int) -> Costs:
    """Mean durations of each stage's forward and backward, and of its weight-gradient part, for the simulator."""
    durations: dict[tuple[Kind, int], list[float]] = defaultdict(list)
    for span in timeline.spans:
        action = span.action
        durations[action.kind, action.stage].append(span.duration * (2 if action.half else 1))

    def times(kind: Kind) -> list[float]:
        return [mean(durations.get((kind, stage), [0.0])) for stage in range(num_stages)]

    backward, inputs, weights = (times(kind) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT))
    if not any(weights):
        return Costs(times(Kind.FORWARD), backward)
    # A schedule may run some backwards whole and others in parts.
    wholes = [i + w if w else b for b, i, w in zip(backward, inputs, weights, strict=True)]
    return Costs(times(Kind.FORWARD), wholes, weight=weights)
