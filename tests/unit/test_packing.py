from collections import OrderedDict
from typing import Any

import pytest
import torch
from transformers import BatchEncoding
from transformers.modeling_outputs import CausalLMOutput

from lightning_chimera.runtime.packing import Packed, pack, unpack

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
