"""The strategy's own arguments, checked when they are given, and what follows from them for a world of ranks."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cached_property
from typing import Literal

from torch import nn

from lightning_chimera.checks import (
    check_backend,
    check_choice,
    check_cuts_type,
    check_fixed_schedule,
    check_recompute,
    check_sizes,
    check_timeout,
)
from lightning_chimera.layout import Layout
from lightning_chimera.nonfinite import Nonfinite
from lightning_chimera.partition.anatomy import Anatomy
from lightning_chimera.partition.balance import balance, check_cuts, layer_costs
from lightning_chimera.partition.compilation import check_compile_blocks
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Builder, Schedule, Selection, select
from lightning_chimera.timeline import SyncPolicy

GradientSync = Literal["eager", "eager-opt", "hidden", "lazy"]
Innermost = Literal["stages", "replicas"]
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
_INNERMOST = ("stages", "replicas")
_START_METHODS = ("popen", "spawn", "fork", "forkserver")
_NONFINITE = ("ignore", "raise", "skip")


@dataclass(frozen=True)
class Settings:
    """Arguments of ``ChimeraStrategy`` as they were given; its docstring says what each of them means.

    Raises:
        ValueError: An argument is out of its range.
    """

    schedule: str | os.PathLike[str] | Builder | Schedule
    num_stages: int | None
    num_microbatches: int | None
    recompute: Literal["blocks", "stages"] | Sequence[int] | None
    pipes: int | None
    chunks: int | None
    cuts: Sequence[int] | None
    innermost: Innermost
    gradient_sync: GradientSync
    timeout: float | timedelta
    stall_timeout: float | timedelta
    nonfinite: Nonfinite
    shared_memory: bool
    save_on_signal: bool
    start_method: StartMethod
    compile_blocks: bool | str
    process_group_backend: str | None
    _ascending: dict[int, bool] = field(default_factory=dict, init=False, repr=False, compare=False)
    _layouts: dict[Topology, Layout] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_sizes(
            num_stages=self.num_stages, num_microbatches=self.num_microbatches, pipes=self.pipes, chunks=self.chunks
        )
        check_choice("innermost", self.innermost, _INNERMOST)
        check_choice("start_method", self.start_method, _START_METHODS)
        check_choice("gradient_sync", self.gradient_sync, tuple(SyncPolicy))
        check_choice("nonfinite", self.nonfinite, _NONFINITE)
        check_cuts_type(self.cuts)
        check_backend(self.process_group_backend)
        check_timeout(self.timeout)
        check_timeout(self.stall_timeout, "stall_timeout")
        check_recompute(self.recompute)
        check_compile_blocks(self.compile_blocks)
        if self.selection.fixed is not None:
            check_fixed_schedule(self.selection.fixed, self.num_stages, self.num_microbatches)

    @cached_property
    def selection(self) -> Selection:
        """How to make the schedule."""
        return select(self.schedule, pipes=self.pipes, chunks=self.chunks)

    @cached_property
    def compile_backend(self) -> str | None:
        """What compiles blocks, if they are to be compiled."""
        return check_compile_blocks(self.compile_blocks)

    @property
    def longest_wait(self) -> timedelta:
        """Bound on every wait for another rank that is alive."""
        return check_timeout(self.timeout)

    @property
    def longest_silence(self) -> timedelta:
        """Without a sign of life for this long a rank has stalled."""
        return check_timeout(self.stall_timeout, "stall_timeout")

    def topology(self, world_size: int, global_rank: int) -> Topology:
        """Where a rank is.

        Raises:
            ValueError: The number of processes is no multiple of the number of stages.
        """
        num_positions = self._num_positions(world_size)
        return Topology.of_world(
            world_size,
            num_positions,
            global_rank,
            ascending=self._ascends(num_positions),
            replicas_innermost=self.innermost == "replicas",
        )

    def layout(self, topology: Topology) -> Layout:
        """How a run is laid out for a rank, with the schedules that it has made."""
        if topology not in self._layouts:
            self._layouts[topology] = Layout(
                topology,
                self.selection.build,
                self._num_microbatches(topology.num_positions),
                self.selection.short,
                self.recompute,
                SyncPolicy(self.gradient_sync),
                self.shared_memory,
            )
        return self._layouts[topology]

    def choose_cuts(self, module: nn.Module, anatomy: Anatomy, schedule: Schedule) -> tuple[int, ...]:
        """The first block of each stage but the first: as given, or balanced.

        Raises:
            ValueError: Those that are given do not fit.
        """
        if self.cuts is not None:
            return check_cuts(self.cuts, anatomy.num_blocks, schedule.num_stages)
        return balance(layer_costs(module, anatomy), schedule.num_stages, paired=schedule.placement.is_paired)

    @property
    def facts(self) -> dict[str, object]:
        """Those that all ranks must have alike."""
        fixed = self.selection.fixed
        return {
            "num_stages": self.num_stages if fixed is None else fixed.num_ranks,
            "num_microbatches": self.num_microbatches if fixed is None else fixed.num_microbatches,
            "recompute": self.recompute,
            "cuts": self.cuts,
            "innermost": self.innermost,
            "gradient_sync": SyncPolicy(self.gradient_sync).value,
            "nonfinite": self.nonfinite,
        }

    def _num_positions(self, world_size: int) -> int:
        """Ranks of a pipeline group."""
        fixed = self.selection.fixed
        if fixed is None:
            return self.num_stages or world_size
        if world_size % fixed.num_ranks:
            raise ValueError(
                f"The schedule {fixed.name!r} is for {fixed.num_ranks} ranks, and this run has {world_size} processes"
                f" (devices x num_nodes). Use a multiple of {fixed.num_ranks}, or a schedule by name."
            )
        return fixed.num_ranks

    def _num_microbatches(self, num_positions: int) -> int:
        """Microbatches of a batch with enough rows."""
        if self.selection.fixed is not None:
            return self.selection.fixed.num_microbatches
        return self.num_microbatches or self.selection.microbatches_per_rank * num_positions

    def _ascends(self, num_positions: int) -> bool:
        """Whether positions run with the global ranks, so that the last stage is on the first rank."""
        if num_positions not in self._ascending:
            schedule = self.selection.build(num_positions, self._num_microbatches(num_positions))
            ends = schedule.placement.rank_of(schedule.num_stages - 1) if isinstance(schedule, Schedule) else None
            self._ascending[num_positions] = num_positions > 1 and ends == 0
        return self._ascending[num_positions]
