import copy

import pytest
import torch
from lightning.pytorch.utilities import grad_norm
from torch import nn

from lightning_chimera.partition.placeholder import Placeholder, PlaceholderGradient

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


@pytest.fixture
def half_here() -> nn.Linear:
    """A layer whose weight is elsewhere, with gradients of both."""
    module = nn.Linear(2, 2)
    module.weight = Placeholder(module.weight, CPU)
    module.weight.grad, module.bias.grad = PlaceholderGradient(module.weight), torch.ones(2)
    return module


def test_a_placeholders_gradient_is_one_but_for_its_numbers(half_here: nn.Linear) -> None:
    gradient = half_here.weight.grad
    assert isinstance(gradient, PlaceholderGradient)
    assert (gradient.shape, gradient.dtype, gradient.device, gradient.is_meta) == ((2, 2), torch.float32, CPU, True)
    assert (gradient.numel(), gradient.is_sparse, gradient.grad_fn, gradient.requires_grad) == (4, False, None, False)
    assert gradient.detach() is gradient.data is half_here.weight.grad
    assert repr(gradient) == "PlaceholderGradient(shape=(2, 2), dtype=torch.float32)"


def test_a_placeholders_gradient_may_be_changed_in_place_with_the_others(half_here: nn.Linear) -> None:
    for parameter in half_here.parameters():
        parameter.grad *= 0.5
        parameter.grad /= 2
        parameter.grad.add_(parameter.detach(), alpha=0.0).nan_to_num_().clamp_(-1, 1)
    assert half_here.bias.grad.tolist() == [0.25, 0.25]
    nn.utils.clip_grad_value_(half_here.parameters(), 0.125)
    assert half_here.bias.grad.tolist() == [0.125, 0.125]
    torch._foreach_mul_([parameter.grad for parameter in half_here.parameters()], 2.0)
    assert half_here.bias.grad.tolist() == [0.25, 0.25]


def test_gradients_are_zeroed_by_modules_and_optimizers(half_here: nn.Linear) -> None:
    optimizers = [torch.optim.SGD(half_here.parameters(), lr=0.1, foreach=foreach) for foreach in (False, True)]
    for zero_grad in (half_here.zero_grad, *(optimizer.zero_grad for optimizer in optimizers)):
        half_here.weight.grad, half_here.bias.grad = PlaceholderGradient(half_here.weight), torch.ones(2)
        zero_grad(set_to_none=False)
        assert half_here.weight.grad is not None
        assert half_here.bias.grad.tolist() == [0.0, 0.0]
        zero_grad(set_to_none=True)
        assert half_here.weight.grad is half_here.bias.grad is None


def test_whatever_needs_a_gradients_numbers_names_the_ways_out(half_here: nn.Linear) -> None:
    gradient = half_here.weight.grad
    for use in (
        lambda: nn.utils.clip_grad_norm_(half_here.parameters(), 1.0),
        lambda: nn.utils.clip_grad_norm_(half_here.parameters(), 1.0, foreach=False),
        lambda: nn.utils.get_total_norm([gradient], torch.inf),
        lambda: grad_norm(half_here, 2),
        lambda: gradient.norm(),
        lambda: gradient.abs().max(),
        lambda: gradient.clone(),
        lambda: torch.isfinite(gradient),
        lambda: half_here.bias.grad.add_(gradient[0]),
        lambda: gradient.normal_(),  # other ranks would draw other numbers
    ):
        with pytest.raises(
            RuntimeError, match=r"(?s)the gradient of .*\.grad_norm\(.*\.clip_grad_norm\(.*gradients=True"
        ):
            use()


def test_an_optimizer_that_sees_a_placeholders_gradient_refuses_to_step(half_here: nn.Linear) -> None:
    with pytest.raises(RuntimeError, match=r"that another rank of the pipeline holds"):
        torch.optim.SGD(half_here.parameters(), lr=0.1).step()


def test_a_placeholder_equals_itself_alone(half_here: nn.Linear) -> None:
    weight = half_here.weight
    assert torch.equal(weight, weight)
    assert not torch.equal(weight, Placeholder(weight, CPU))
    assert not torch.equal(torch.ones(2, 2), weight)
