from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import BatchEncoding

from lightning_chimera.runtime.microbatches import count_rows, split


class Pair(NamedTuple):
    ids: torch.Tensor
    name: str


@dataclass
class Record:
    ids: torch.Tensor
    scale: float


def joined(parts: list[Any]) -> torch.Tensor:
    return torch.cat(parts)


@given(st.integers(1, 20), st.integers(1, 12))
def test_rows_are_split_evenly_in_order_and_none_is_lost(rows: int, count: int) -> None:
    batch = torch.arange(rows).view(rows, 1)
    parts = split(batch, count)
    sizes = [part.rows for part in parts]
    assert len(parts) == min(rows, count)
    assert max(sizes) - min(sizes) <= 1
    assert torch.equal(joined([part.data for part in parts]), batch)


def test_every_structure_is_kept() -> None:
    ids = torch.arange(8).view(4, 2)
    for batch, get in (
        ({"input_ids": ids}, lambda data: data["input_ids"]),
        (OrderedDict(input_ids=ids), lambda data: data["input_ids"]),
        (BatchEncoding({"input_ids": ids}), lambda data: data["input_ids"]),
        ([ids, 1], lambda data: data[0]),
        ((ids, None), lambda data: data[0]),
        (Pair(ids, "x"), lambda data: data.ids),
        (Record(ids, 0.5), lambda data: data.ids),
        ({"text": {"input_ids": ids}}, lambda data: data["text"]["input_ids"]),
    ):
        parts = split(batch, 2)
        assert all(type(part.data) is type(batch) for part in parts)
        assert torch.equal(joined([get(part.data) for part in parts]), ids)
        assert torch.equal(get(batch), ids), "the batch itself is left alone"


@pytest.mark.contract("Data", "nested batches with strings, numbers, `None` and lists")
def test_lists_with_an_entry_per_row_are_cut_and_all_else_goes_everywhere() -> None:
    batch = {
        "input_ids": torch.zeros(4, 3),
        "names": ["a", "b", "c", "d"],
        "mask": torch.ones(1, 1, 3, 3),
        "step": torch.tensor(7),
        "flag": True,
        "nothing": None,
        "title": "four",
    }
    first, second = (part.data for part in split(batch, 2))
    assert (first["names"], second["names"]) == (["a", "b"], ["c", "d"])
    for data in (first, second):
        assert data["mask"].shape == (1, 1, 3, 3)
        assert (int(data["step"]), data["flag"], data["nothing"], data["title"]) == (7, True, None, "four")


def test_rows_are_counted_by_the_input_ids_where_there_are_some() -> None:
    assert count_rows({"position_ids": torch.zeros(1, 5), "input_ids": torch.zeros(3, 5)}) == 3
    assert count_rows([torch.tensor(1), torch.zeros(2, 5)]) == 2
    assert count_rows(["a", "b", "c"]) == 3
    assert count_rows({"n": 1}) is None


def test_a_list_of_samples_has_a_row_for_each() -> None:
    ids = [torch.arange(5), torch.arange(5), torch.arange(3)]
    for samples in (
        ids,
        [{"input_ids": row, "label": 1} for row in ids],
        [{"input_ids": row} for row in ids[:2]],
        [(row, torch.tensor(1)) for row in ids],
    ):
        assert count_rows(samples) == len(samples)
        assert [part.data for part in split(samples, len(samples))] == [[sample] for sample in samples]
    assert count_rows([torch.zeros(8, 16), torch.zeros(8)]) == 8
    assert count_rows([torch.zeros(8), torch.zeros(8)]) == 8
    assert count_rows([{"input_ids": torch.zeros(8, 16)}, {"input_ids": torch.zeros(8, 16)}]) == 8
    assert count_rows((["a", "b", "c"], ["x", "y", "z"])) == 3


@pytest.mark.parametrize(
    ("part", "given"),
    [
        (torch.eye(4).to_sparse(), r"sparse tensor \(torch.sparse_coo\)"),
        (torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged), r"nested tensor \(torch.jagged\)"),
        (torch.nn.utils.rnn.pack_sequence([torch.ones(3)] * 4), "PackedSequence"),
    ],
)
def test_what_has_no_rows_to_cut_is_refused(part: Any, given: str) -> None:
    with pytest.raises(TypeError, match=f"The batch holds a {given}.*made of dense tensors: pad in the data loader"):
        split({"input_ids": torch.zeros(4, 3), "part": part}, 2)


def test_a_batch_without_rows_is_one_microbatch() -> None:
    [part] = split({"n": 1}, 4)
    assert (part.data, part.rows) == ({"n": 1}, 1)


def test_a_signature_tells_shapes_and_types_apart_and_nothing_else() -> None:
    def signature(**data: Any) -> Any:
        return split(data, 1)[0].signature()

    assert signature(ids=torch.zeros(2, 3)) == signature(ids=torch.ones(2, 3))
    assert signature(ids=torch.zeros(2, 3)) != signature(ids=torch.zeros(2, 4))
    assert signature(ids=torch.zeros(2, 3)) != signature(ids=torch.zeros(2, 3).double())
    assert signature(ids=torch.zeros(2, 3), name="a") == signature(ids=torch.zeros(2, 3), name="b")
