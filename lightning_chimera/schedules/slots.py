"""Tables of slots: each rank runs its actions in the order of their slots.

Slots give the order only: an action starts as soon as its rank is free and its input is there.
"""

from __future__ import annotations

from lightning_chimera.schedules.action import Action, Placement


class Slots:
    """The slots of every rank.

    Args:
        placement: which rank runs which stage.
    """

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._rows: list[dict[int, Action]] = [{} for _ in range(placement.num_ranks)]

    def put(self, slot: int, action: Action) -> None:
        """Put an action into a slot of its rank; a rule that gives two actions one slot is wrong."""
        row = self._rows[self._placement.rank_of(action.stage, action.pipe)]
        assert slot not in row, f"{action} and {row[slot]} share slot {slot}"
        row[slot] = action

    def rows(self) -> tuple[tuple[Action, ...], ...]:
        """Return the actions of each rank in the order of their slots."""
        return tuple(tuple(action for _, action in sorted(row.items())) for row in self._rows)
