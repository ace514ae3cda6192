"""Which rank holds which parameter, and what an optimizer may bring."""

import gc
from collections.abc import Iterable

import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.ownership import Ownership, Ranks
from lightning_chimera.partition.stage import StageRunner


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8))


def cut(module: nn.Module) -> Ownership:
    """Cuts a module after its first block, for the rank of the first stage."""
    runner = StageRunner(find_anatomy(module), (1,))

    def ranks_of(stages: Iterable[int]) -> Ranks:
        return tuple(stages)

    ownership = Ownership(module, runner, ranks_of, rank=0)
    ownership.drop(torch.device("cpu"))
    return ownership


def test_parameters_from_before_the_cut_become_the_placeholders_in_their_places() -> None:
    module = Whole()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    cut(module).adopt(optimizer)
    assert list(map(id, optimizer.param_groups[0]["params"])) == list(map(id, module.parameters()))


def test_no_stranger_is_taken_for_a_parameter_that_is_gone() -> None:
    module = Whole()
    ownership = cut(module)
    gc.collect()
    # Enough of them to get the memory, and so the ids, of the parameters that the cut has left to nobody.
    for stranger in [nn.Parameter(torch.zeros(3)) for _ in range(2000)]:
        with pytest.raises(ValueError, match="1 parameters that are not the module's"):
            ownership.adopt(torch.optim.SGD([*module.parameters(), stranger], lr=0.1))
