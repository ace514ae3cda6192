import copy
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from lightning_chimera.notes import Addition, Notes, _Watched, growing
from lightning_chimera.results import join, join_grown, join_lists
from lightning_chimera.runtime.packing import pack, unpack


class Point(NamedTuple):
    """What a step may return."""

    x: float
    name: str


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


@pytest.mark.parametrize(
    ("before", "change"),
    [
        ({"a": 1, "b": 2}, lambda noted: noted.update(b=3)),
        ({"a": 1, "b": 2}, lambda noted: noted.update(c=3)),
        ({"a": 1, "b": 2}, lambda noted: noted.update(a=True)),
        ({"a": 1, "b": 2}, lambda noted: noted.update(a=1.0)),
        ({"a": 1, "b": 2}, lambda noted: noted.update(b=[1])),
        ({"a": 1, "b": 2}, lambda noted: (noted.pop("a"), noted.update(c=1))),
        ({"a": 1, "b": 2}, lambda noted: noted.clear()),
        ({"a": 1, "b": [2]}, lambda noted: noted["b"].append(3)),
        (Counter("aab"), lambda noted: noted.update("ac")),
        ({(1, 2): 300, "x": 400}, lambda noted: noted.update(x=int("401"))),
    ],
)
def test_a_change_of_a_dict_is_made_true_on_another_rank(before: Any, change: Callable[[Any], Any]) -> None:
    there, here = module(noted=copy.deepcopy(before)), module(noted=copy.deepcopy(before))
    before_there, before_here = Notes.of(there), Notes.of(here)
    change(there.noted)
    before_here.apply(here, unpack(pack(before_there.changes(there))))
    assert repr(here.noted) == repr(there.noted) != repr(before)


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


def test_older_entries_that_change_stay_so() -> None:
    changes: list[Callable[[list[int]], Any]] = [
        lambda values: values.__setitem__(0, 9),
        lambda values: values.__delitem__(0),
        lambda values: values.__imul__(0),
        lambda values: values.insert(0, 9),
        lambda values: values.pop(0),
        lambda values: values.remove(2),
        lambda values: values.reverse(),
        lambda values: values.sort(),
        lambda values: values.clear(),
    ]
    for change in changes:
        there, plain = module(values=[3, 1, 2]), [3, 1, 2]
        with growing(there):
            change(there.values)
        change(plain)
        assert there.values == plain[:3] != [3, 1, 2]


LONG = list(range(100_000))


def grow(there: nn.Module) -> None:
    """What grows lists in one way or another."""
    there.single.append(1)
    there.several += [1, 2]
    there.again = [*there.again, 1]


def test_a_long_list_that_has_not_grown_before_is_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[int] = []
    made = _Watched.__init__
    monkeypatch.setattr(_Watched, "__init__", lambda self, values: copied.append(len(values)) or made(self, values))
    there = module(vocabulary=LONG[:], known=LONG[:], short=[1])
    with growing(there, {"known"}):
        assert type(there.vocabulary) is list
    assert sorted(copied) == [1, len(LONG)]
    with growing(there):  # in the first step nobody knows yet
        pass
    assert sorted(copied[2:]) == [1, len(LONG), len(LONG)]


def test_what_long_lists_have_grown_by_is_taken_away_from_them_too() -> None:
    there = module(single=LONG[:], several=LONG[:], again=LONG[:])
    with growing(there, ()) as grown:
        grow(there)
    assert grown == {
        "single": [Addition([1], True)],
        "several": [Addition([1, 2], False)],
        "again": [Addition([1], False)],
    }
    assert there.single == there.several == there.again == LONG


def test_two_names_of_one_list_are_taken_back_once() -> None:
    there = module(one=[1])
    there.other = there.one
    with growing(there) as grown:
        there.one.append(2)
    assert grown == {"one": [Addition([2], True)]}
    assert there.one is there.other
    with growing(there):
        there.late = there.other = there.one
    assert there.one == there.other == [1]


def test_what_was_appended_is_one_entry_though_it_has_as_many_entries_as_rows() -> None:
    singles = [[Addition([1.0], True), Addition([2.0], True)], [Addition([3.0], True), Addition([4.0], True)]]
    assert join_grown(singles, [1, 1], [2, 2]) == [2.0, 3.0]
    assert join_grown(singles, [1, 1], [1, 1]) == [2.0, 3.0]
    at_once = [[Addition([1.0, 2.0], False)], [Addition([3.0, 4.0], False)]]
    assert join_grown(at_once, [1, 1], [2, 2]) == [1.0, 2.0, 3.0, 4.0]
    assert join_grown(at_once, [1, 1], [3, 3]) == [2.0, 3.0]


def test_what_some_parts_only_have_appended_is_an_entry_of_theirs() -> None:
    parts = [{}, {"hard": [Addition([2.0], True)]}, {"hard": [Addition([6.0], True)]}, {}]
    assert join_lists(parts, [0.25, 0.5, 0.125, 0.125], [2, 2, 2, 2]) == {"hard": [pytest.approx(2.8)]}
    assert join_lists([{}, {"a": [Addition([1.0], True)]}], [0.5, 0.5], [1, 1]) == {"a": [1.0]}


@pytest.mark.parametrize(
    "parts",
    [
        [[], [Addition(["a"], False)], [Addition(["b"], False)]],
        [[Addition([], False)], [Addition(["a"], False)], [Addition(["b"], False)]],
        [[Addition(["a"], False)], [], [Addition(["b"], False)]],
        [[], [Addition(["a", "b"], False)], []],
        [[Addition(["a"], True)], [Addition(["b"], False)], []],
        [[], [Addition(["a"], True), Addition(["b"], True)], []],
    ],
)
def test_what_was_added_for_some_rows_only_is_all_kept(parts: list[list[Addition]]) -> None:
    assert join_lists([{"hard": part} if part else {} for part in parts], [1, 1, 1], [3, 3, 3]) == {"hard": ["a", "b"]}


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
        ([{"x": 1.0, "only": 2}, {"y": 1.0, "x": 5.0}], {"x": 4.0}),
        ([{"x": {"y": 1.0}}, {"x": {}}], {"x": {}}),
        ([{"aux": {"x": 1.0}}, {"aux": None}], {"aux": {"x": 1.0}}),
        ([{"aux": None}, {"aux": {"x": 1.0}}], {"aux": None}),
        ([{"x": 1.0}, None], {"x": 1.0}),
        ([(1.0, 2.0), None], (1.0, 2.0)),
        ([[1.0], 3.0], [1.0]),
        ([[1.0], {"x": 1.0}], [1.0]),
        ([torch.ones(2, 3), torch.ones(1, 4)], torch.ones(2, 3)),
        ([torch.ones(2), torch.tensor(1.0)], torch.ones(2)),
        ([torch.ones(2), None], torch.ones(2)),
        ([torch.tensor(1.0), None], torch.tensor(1.0)),
        ([Point(1.0, "a"), Point(5.0, "b")], Point(4.0, "a")),
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
