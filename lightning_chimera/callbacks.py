"""Callbacks that know a pipeline."""

from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from lightning_chimera.schedules import Kind, Schedule
from lightning_chimera.strategy import ChimeraStrategy
from lightning_chimera.timeline import Costs, Timeline, simulate, write_trace
from lightning_chimera.timeline.plot import plot_timelines, save_figure


class PipelineTrace(Callback):
    """Writes when every action of one training step ran, beside what the simulator makes of the same costs.

    Two files, ``timeline.json`` for Perfetto (ui.perfetto.dev) and ``timeline.png``, show the first pipeline group.

    Args:
        dirpath: Folder for the files; the Trainer's ``default_root_dir`` if ``None``.
        at_step: The optimizer step to record, counted from 1. Early steps are slower than the rest.

    Raises:
        ValueError: ``at_step`` is below 1.
    """

    def __init__(self, dirpath: str | Path | None = None, at_step: int = 20) -> None:
        if at_step < 1:
            raise ValueError(f"at_step={at_step}: steps are counted from 1.")
        self.dirpath = dirpath
        self.at_step = at_step
        self._written = False

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
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Writes the files once the step has been made."""
        strategy = trainer.strategy
        if self._written or trainer.global_step != self.at_step or not isinstance(strategy, ChimeraStrategy):
            return
        self._written = True
        measured = strategy.timeline()
        if trainer.is_global_zero and measured is not None:
            self._write(measured, strategy.engine.pipeline.schedule, Path(self.dirpath or trainer.default_root_dir))

    @staticmethod
    def _write(measured: Timeline, schedule: Schedule, folder: Path) -> None:
        """Writes both files."""
        simulated = simulate(schedule, measured_costs(measured, schedule.num_stages))
        pair = {
            word: replace(timeline, name=f"{schedule.name}, {word}", labels=measured.labels)
            for word, timeline in (("measured", measured), ("simulated", simulated))
        }
        write_trace(folder / "timeline.json", pair)
        save_figure(plot_timelines(list(pair.values()), time_label="seconds"), folder / "timeline.png")


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
