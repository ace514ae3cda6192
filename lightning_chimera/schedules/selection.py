"""The schedule that a user chose: by name, as a builder, or as a value."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lightning_chimera.schedules.action import Schedule
from lightning_chimera.schedules.validate import validate

Builder = Callable[[int, int], Schedule]
"""Makes a schedule from a number of ranks and a number of microbatches."""


@dataclass(frozen=True)
class Selection:
    """How to make the schedule of a run.

    Attributes:
        build: makes it for a number of ranks and of microbatches.
        microbatches_per_rank: the default number of microbatches, divided by the number of ranks.
        fixed: the schedule itself, where the user gave one; it fits no other numbers.
        short: makes it for fewer microbatches, where ``build`` needs many.
    """

    build: Builder
    microbatches_per_rank: int
    fixed: Schedule | None = None
    short: Builder | None = None

    @classmethod
    def of_value(cls, schedule: Schedule) -> Selection:
        """Return the selection of a schedule that is there already.

        Raises:
            ScheduleError: if it is not valid.
        """
        validate(schedule)
        return cls(_Fixed(schedule), 1, schedule)


@dataclass(frozen=True)
class _Fixed:
    """The builder of a schedule that is there already; a class, so that it can be pickled for spawned processes."""

    schedule: Schedule

    def __call__(self, num_ranks: int, num_microbatches: int) -> Schedule:
        """Return the schedule, if it is for these sizes.

        Raises:
            ValueError: if it is for others.
        """
        if (num_ranks, num_microbatches) != (self.schedule.num_ranks, self.schedule.num_microbatches):
            raise ValueError(
                f"The schedule {self.schedule.name!r} is for {self.schedule.num_ranks} ranks and"
                f" {self.schedule.num_microbatches} microbatches, not for {num_ranks} and {num_microbatches}. A batch"
                " with fewer rows than microbatches, too, needs a schedule that is given by name or as a builder."
            )
        return self.schedule
