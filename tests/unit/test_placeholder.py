import copy

import pytest
import torch
from torch import nn

from lightning_chimera.partition.placeholder import Placeholder

CPU = torch.device("cpu")


@pytest.fixture
def original() -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(3, 4, dtype=torch.float64), requires_grad=False)
    parameter.no_decay = True
    return parameter


def test_a_placeholder_is_the_parameter_but_for_its_numbers(original: nn.Parameter) -> None:
    placeholder = Placeholder(original, CPU)
    assert isinstance(placeholder, nn.Parameter)
    assert placeholder.is_meta
    assert (placeholder.shape, placeholder.dtype, placeholder.requires_grad) == ((3, 4), torch.float64, False)
    assert (placeholder.numel(), placeholder.ndim, placeholder.size(1), placeholder.element_size()) == (12, 2, 4, 8)
    assert placeholder.no_decay
    assert placeholder.device == CPU
    assert placeholder.grad is None
    assert repr(placeholder) == "Placeholder(shape=(3, 4), dtype=torch.float64)"


def test_whatever_needs_numbers_names_the_way_out(original: nn.Parameter) -> None:
    placeholder = Placeholder(original, CPU)
    for use in (
        lambda: placeholder.pow(2).sum(),
        lambda: placeholder + 1,
        lambda: torch.ones(3) @ placeholder,
        lambda: placeholder.norm(),
        lambda: placeholder.tolist(),
        lambda: placeholder.cpu(),
        lambda: placeholder.detach().clone(),
        lambda: placeholder.data.norm(),
        lambda: placeholder.data.mul_(2),
    ):
        with pytest.raises(RuntimeError, match=r"another rank of the pipeline holds.*full_parameters\(\)"):
            use()


def test_modules_optimizers_and_checkpoints_live_with_it() -> None:
    module = nn.Linear(2, 2)
    module.weight = Placeholder(module.weight, CPU)
    assert module.weight is dict(module.named_parameters())["weight"]
    assert sum(parameter.numel() for parameter in module.parameters()) == 6
    module.load_state_dict({"weight": torch.ones(2, 2), "bias": torch.ones(2)})
    assert module.state_dict()["weight"].is_meta
    module.requires_grad_(False).requires_grad_(True)
    for make in (
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
        lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
        lambda parameters: torch.optim.RMSprop(parameters, lr=0.1, foreach=True),
    ):
        optimizer = make(module.parameters())
        module.bias.grad = torch.ones(2)
        optimizer.step()
        optimizer.zero_grad()
        assert set(optimizer.state_dict()["state"]) == {1}


def test_a_copy_of_the_module_has_placeholders_too(original: nn.Parameter) -> None:
    module = nn.Module()
    module.weight = Placeholder(original, CPU)
    weight = copy.deepcopy(module).weight
    assert weight is not module.weight
    assert (weight.is_meta, weight.device, weight.requires_grad, weight.no_decay) == (True, CPU, False, True)
    assert isinstance(weight, nn.Parameter)
