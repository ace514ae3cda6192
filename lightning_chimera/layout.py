"""How a run is laid out: where this rank is, and the schedules that it runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from lightning_chimera.checks import check_built, check_placed
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import Builder, Schedule
from lightning_chimera.timeline import SyncPolicy


@dataclass(frozen=True)
class Layout:
    """How a run is laid out.

    Attributes:
        topology: Where this rank is.
        build: Makes the schedules.
        num_microbatches: Microbatches of a batch with enough rows.
        build_short: Makes the schedules for fewer microbatches, where it is not ``build``.
        recompute: What runs once more in the backward instead of being kept, as the strategy takes it.
        gradient_sync: When the sums of gradients start.
        shared_memory: Whether messages between the stages go through memory where two ranks see the same.
    """

    topology: Topology
    build: Builder
    num_microbatches: int
    build_short: Builder | None = None
    recompute: str | Sequence[int] | None = None
    gradient_sync: SyncPolicy = SyncPolicy.LAZY
    shared_memory: bool = True
    _schedules: dict[int, Schedule] = field(default_factory=dict, init=False, repr=False, compare=False)

    def schedule(self, num_microbatches: int | None = None) -> Schedule:
        """The training schedule, checked; made once for each number of microbatches."""
        count = num_microbatches or self.num_microbatches
        if count not in self._schedules:
            self._schedules[count] = self._made(count)
        return self._schedules[count]

    def _made(self, num_microbatches: int) -> Schedule:
        if num_microbatches == self.num_microbatches:
            return self._built(self.build, num_microbatches)
        schedule = self._built(self.build_short or self.build, num_microbatches)
        return check_placed(schedule, self.schedule())

    def _built(self, build: Builder, num_microbatches: int) -> Schedule:
        sizes = self.topology.num_positions, num_microbatches
        return check_built(build(*sizes), *sizes)
