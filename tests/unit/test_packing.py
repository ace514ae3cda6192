from collections import OrderedDict
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_chimera.runtime.packing import Codec, Flat, Numbers, Packed, pack, unpack

TREES = {
    "types": {
        name: torch.arange(6).to(getattr(torch, name)).view(2, 3)
        for name in ("float64", "float32", "bfloat16", "float16", "int64", "int32", "uint8", "bool")
    },
    "shapes": [torch.zeros(0, 4), torch.tensor(3), torch.zeros(2, 1, 5)],
    "not contiguous": {"mirrored": torch.arange(6).view(2, 3).t()},
    "no tensor": {"names": ["a", "b"], "n": 1, "nothing": None},
    "nested": OrderedDict(a=[(torch.ones(2), "x"), None]),
    "of the tokenizer": BatchEncoding({"input_ids": torch.ones(2, 3)}),
    "of the model": CausalLMOutput(loss=torch.tensor(2.0), logits=torch.ones(2, 3, 4)),
}


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and one.shape == other.shape and torch.equal(one, other)
    if isinstance(one, dict | BatchEncoding):
        return type(one) is type(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return type(one) is type(other) and all(map(same, one, other))
    return one == other


@pytest.mark.parametrize("name", TREES)
def test_a_tree_comes_back_as_it_was(name: str) -> None:
    assert same(TREES[name], unpack(pack(TREES[name])))


def test_batches_of_one_shape_have_one_layout_whatever_their_numbers() -> None:
    first, second = (pack({"input_ids": torch.full((2, 3), value)}) for value in (1, 2))
    assert first.layout == second.layout
    assert not torch.equal(first.data, second.data)
    assert same(unpack(Packed(first.layout, second.data)), {"input_ids": torch.full((2, 3), 2)})


def test_what_comes_back_may_be_written_to() -> None:
    packed = pack([torch.zeros(2), torch.ones(2)])
    first, second = unpack(packed)
    first += 5
    assert torch.equal(second, torch.ones(2))
    assert torch.equal(unpack(packed)[0], torch.zeros(2))


def elsewhere(layout: Any) -> Any:
    """The same layout of tensors that were on a device."""
    if layout[0] == "tensor":
        return (*layout[:-1], False)
    return tuple(elsewhere(part) if isinstance(part, tuple) and part and part[0] in KINDS else part for part in layout)


KINDS = ("tensor", "tuple", "list", "dict", "fixed", "d", "q")


def test_a_layout_says_whether_a_tensor_was_on_the_cpu() -> None:
    there = torch.empty(3, device="meta")
    here = torch.empty(3)
    layout = Flat((here, {"a": there}, Numbers([there, here]), there)).layout
    assert layout == Flat((here, {"a": there}, Numbers([there, here]), there)).layout
    flags = [layout[1][-1], layout[2][2][-1], layout[3][1][-1], layout[3][2][-1], layout[4][-1]]
    assert flags == [True, False, True, True, False]  # what is to be read as numbers is where it can be read


def test_what_was_on_a_device_is_put_on_the_readers_and_what_was_on_the_cpu_stays() -> None:
    tree = {"a": torch.arange(3), "b": [1.5, torch.ones(2, 2)], "c": torch.tensor(7)}
    flat = Flat(tree)
    tag, keys, first, *rest = flat.layout
    codec = Codec((tag, keys, first, *map(elsewhere, rest)))
    row = torch.empty(codec.nbytes, dtype=torch.uint8)
    flat.write(codec, row)
    read = codec.read(row, torch.device("meta"))
    assert [read["a"].device.type, read["b"][1].device.type, read["c"].device.type] == ["cpu", "meta", "meta"]
    assert [read["b"][1].shape, read["b"][1].dtype, read["c"].shape] == [(2, 2), torch.float32, ()]
    assert (read["a"].tolist(), read["b"][0]) == ([0, 1, 2], 1.5)
    assert same(codec.read(row), tree)
