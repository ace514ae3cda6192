import copy
from typing import Any

import pytest
import torch
from torch import nn

from lightning_chimera.notes import Addition, Notes, growing
from lightning_chimera.results import join, join_grown
from lightning_chimera.runtime.packing import pack, unpack


def module(**notes: Any) -> nn.Module:
    made = nn.Module()
    for name, value in notes.items():
        setattr(made, name, value)
    return made


def run_a_step(there: nn.Module) -> None:
    """What the rank of the last stage does."""
    there.losses.append(torch.tensor(2.0))
    there.total += 3
    there.mean = torch.tensor(4.0)
    there.sum.add_(1)
    there.by_loader[1].append("x")
    there.by_loader[2] = ["new"]
    there.nested[0].append({"loss": torch.tensor(5.0)})
    there.name = "after"
    del there.kept["b"]
    there.fresh = [1]


def notes() -> dict[str, Any]:
    return {
        "losses": [torch.tensor(1.0)],
        "total": 1,
        "mean": torch.tensor(0.0),
        "sum": torch.zeros(2),
        "by_loader": {0: [], 1: ["a"]},
        "nested": [[], []],
        "name": "before",
        "kept": {"a": 1, "b": 2},
        "untouched": [1, 2, 3],
    }


def test_what_a_step_notes_on_one_rank_is_made_true_on_another() -> None:
    there, here = module(**notes()), module(**copy.deepcopy(notes()))
    before_there, before_here = Notes.of(there), Notes.of(here)
    run_a_step(there)
    changes = before_there.changes(there)
    assert "untouched" not in changes
    here.losses.append(torch.tensor(-1.0))  # of the code in front of the model call, which every rank runs
    before_here.apply(here, unpack(pack(changes)))
    for name in (*notes(), "fresh"):
        assert repr(getattr(here, name)) == repr(getattr(there, name)), name


def test_lists_are_sent_by_what_they_have_grown() -> None:
    there = module(losses=[torch.zeros(1000)] * 100)
    before = Notes.of(there)
    there.losses.append(torch.zeros(1))
    assert pack(before.changes(there)).data.numel() == 8 + 4  # how long it was, and what is new


def test_nothing_noted_is_nothing_to_send() -> None:
    there = module(**notes())
    assert Notes.of(there).changes(there) == {}


def test_what_lists_have_grown_by_is_taken_away_from_them() -> None:
    there = module(losses=[1], added=[1], others=[])
    losses = there.losses
    with growing(there) as grown:
        there.losses += [2, 3]
        there.losses.append(4)
        there.losses.append(5)
        there.added = [*there.added, 2]
    assert grown == {
        "losses": [Addition([2, 3], False), Addition([4], True), Addition([5], True)],
        "added": [Addition([2], False)],
    }
    assert there.losses is losses
    assert (there.losses, there.added, type(there.losses)) == ([1], [1], list)


def test_other_changes_of_lists_stay() -> None:
    there = module(losses=[1, 2, 3], new=[1])
    with growing(there) as grown:
        there.losses.clear()
        there.new = None
    assert grown == {}
    assert (there.losses, there.new) == ([], None)


def test_what_was_appended_is_one_entry_though_it_has_as_many_entries_as_rows() -> None:
    singles = [[Addition([1.0], True), Addition([2.0], True)], [Addition([3.0], True), Addition([4.0], True)]]
    assert join_grown(singles, [1, 1], [2, 2]) == [2.0, 3.0]
    assert join_grown(singles, [1, 1], [1, 1]) == [2.0, 3.0]
    at_once = [[Addition([1.0, 2.0], False)], [Addition([3.0, 4.0], False)]]
    assert join_grown(at_once, [1, 1], [2, 2]) == [1.0, 2.0, 3.0, 4.0]
    assert join_grown(at_once, [1, 1], [3, 3]) == [2.0, 3.0]


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([torch.tensor(1.0), torch.tensor(5.0)], torch.tensor(4.0)),
        ([1.0, 5.0], 4.0),
        ([torch.tensor([1, 2]), torch.tensor([3])], torch.tensor([1, 2, 3])),
        ([["a", "b"], ["c"]], ["a", "b", "c"]),
        ([{"x": 1.0}, {"x": 5.0}], {"x": 4.0}),
        ([[1.0, "s"], [5.0, "t"]], [4.0, "s"]),
        (["one", "two"], "one"),
        ([torch.tensor(float("nan")), torch.tensor(5.0)], torch.tensor(float("nan"))),
    ],
)
def test_values_of_parts_are_joined_into_those_of_the_whole(values: list[Any], expected: Any) -> None:
    joined = join(values, shares=[0.25, 0.75], rows=[2, 1])
    if isinstance(expected, torch.Tensor):
        torch.testing.assert_close(joined, expected, equal_nan=True)
    else:
        assert joined == expected


def test_a_part_that_counts_nothing_does_not_spoil_a_mean() -> None:
    joined = join([torch.tensor(float("nan")), torch.tensor(5.0)], shares=[0.0, 1.0], rows=[1, 1])
    assert joined == 5
