"""A split backward gives the gradients of a full one, and leaves those of large weights for later."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.pytorch_utils import Conv1D

from lightning_chimera.partition.deferral import Left, Splitter, WeightGradients

WIDTH = 6


class Block(nn.Module):
    """A norm, and layers of both kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = Conv1D(2 * WIDTH, WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(self.norm(hidden))))


class Checkpointed(Block):
    use_reentrant = False

    def forward(self, hidden: Tensor) -> Tensor:
        out: Tensor = checkpoint(super().forward, hidden, use_reentrant=self.use_reentrant)
        return out


class Reentrant(Checkpointed):
    use_reentrant = True


class UsesOneWeightTwice(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(super().forward(hidden))


class HasAWeightOffTheInputsPath(Block):
    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(WIDTH, WIDTH)
        self.start = nn.Parameter(torch.randn(WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) * self.side(self.start)


class HasAWeightMadeOfOthers(Block):
    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.down)


class HasFrozenWeights(Block):
    def __init__(self) -> None:
        super().__init__()
        self.up.requires_grad_(False)
        self.down.bias.requires_grad_(False)


class NamesTheInput(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(input=torch.tanh(self.up(x=self.norm(hidden))))


class ChangesWhatALayerGave(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).tanh_()).relu_()


class DifferentiatesOnTheWay(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        inner = self.norm(hidden).requires_grad_()
        out = self.down(torch.tanh(self.up(inner)))
        (slope,) = torch.autograd.grad(out.sum(), inner, retain_graph=True)
        return out * slope


class TransformsALayer(Block):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.func.vmap(self.down)(torch.tanh(self.up(self.norm(hidden))))


class LendsALayerItsWeight(Block):
    def __init__(self) -> None:
        super().__init__()
        self.lent = nn.Parameter(torch.randn(WIDTH, 2 * WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        up = torch.tanh(self.up(self.norm(hidden)))
        return self.down(up) + torch.func.functional_call(self.down, {"weight": self.lent}, (up,))


class HasNoBias(Block):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)


def half(block: nn.Module, hidden: Tensor) -> tuple[Tensor, WeightGradients]:
    """Forward and first half of the backward, as a stage runs them: in different entries."""
    splitter, later = Splitter([block]), WeightGradients()
    with splitter.into(later):
        left = block(hidden)
    with splitter.into(later):
        left.square().sum().backward()
    return left, later


def gradients(block: nn.Module) -> dict[str, Tensor | None]:
    return {name: parameter.grad for name, parameter in block.named_parameters()}


@pytest.mark.parametrize(
    "make",
    [
        Block,
        Checkpointed,
        Reentrant,
        UsesOneWeightTwice,
        HasAWeightOffTheInputsPath,
        HasAWeightMadeOfOthers,
        HasFrozenWeights,
        HasNoBias,
        NamesTheInput,
        ChangesWhatALayerGave,
        DifferentiatesOnTheWay,
        TransformsALayer,
        LendsALayerItsWeight,
    ],
)
@pytest.mark.parametrize("needs_input", [True, False])
@pytest.mark.parametrize("shape", [(5, WIDTH), (2, 3, WIDTH)], ids=str)
def test_both_halves_give_the_gradients_of_a_full_backward(
    make: Callable[[], Block], needs_input: bool, shape: tuple[int, ...]
) -> None:
    if make is Reentrant:  # torch gives no gradient behind one whose input needs none, split or not
        needs_input = True
    torch.manual_seed(0)
    block = make().double()
    whole = copy.deepcopy(block)
    hidden = torch.randn(shape, dtype=torch.float64)
    inputs = [hidden.clone().requires_grad_(needs_input) for _ in range(2)]
    expected = whole(inputs[0])
    expected.square().sum().backward()

    left, later = half(block, inputs[1])
    torch.testing.assert_close(left, expected)
    if needs_input:
        torch.testing.assert_close(inputs[1].grad, inputs[0].grad)
    later.accumulate()
    torch.testing.assert_close(gradients(block), gradients(whole), rtol=1e-12, atol=1e-14)


def test_the_first_half_leaves_the_weights_of_linear_layers() -> None:
    block = Block()
    _, later = half(block, torch.randn(5, WIDTH))
    assert {name for name, gradient in gradients(block).items() if gradient is not None} == {"norm.weight", "norm.bias"}
    later.accumulate()
    assert all(gradient is not None for gradient in gradients(block).values())


def test_gradients_of_several_microbatches_add_up_in_any_order() -> None:
    torch.manual_seed(0)
    block, rows = Block().double(), torch.randn(4, 5, WIDTH, dtype=torch.float64)
    whole = copy.deepcopy(block)
    for part in rows:
        whole(part).square().sum().backward()
    left = [half(block, part)[1] for part in rows]
    for later in reversed(left):
        later.accumulate()
    torch.testing.assert_close(gradients(block), gradients(whole), rtol=1e-12, atol=1e-14)


def test_autocast_multiplies_in_its_own_type_and_adds_to_weights_in_theirs() -> None:
    torch.manual_seed(0)
    block, hidden = Block(), torch.randn(5, WIDTH)
    whole = copy.deepcopy(block)
    splitter, later = Splitter([block]), WeightGradients()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = whole(hidden)
        with splitter.into(later):
            left = block(hidden)
    assert torch.equal(left, expected)
    expected.square().sum().backward()
    with splitter.into(later):
        left.square().sum().backward()
    later.accumulate()
    for (name, own), wanted in zip(gradients(block).items(), gradients(whole).values(), strict=True):
        assert own is not None
        assert wanted is not None
        assert own.dtype == torch.float32
        torch.testing.assert_close(own, wanted, rtol=1e-2, atol=1e-2, msg=name)


def test_autocast_leaves_double_precision_alone() -> None:
    torch.manual_seed(0)
    layer, hidden = nn.Linear(WIDTH, WIDTH).double(), torch.randn(5, WIDTH, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        expected = layer(hidden)
        with Splitter([layer]).into(WeightGradients()):
            assert torch.equal(layer(hidden), expected)


def test_a_second_derivative_is_refused() -> None:
    block, hidden = Block(), torch.randn(5, WIDTH, requires_grad=True)
    with Splitter([block]).into(WeightGradients()):
        out = block(hidden).sum()
        with pytest.raises(RuntimeError, match=r"create_graph=True.*Use a schedule whose backward is not split"):
            torch.autograd.grad(out, hidden, create_graph=True)


def test_hooks_on_parameters_are_called_once_with_the_gradient() -> None:
    block, seen = Block(), []
    block.up.weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad is not None))
    _, later = half(block, torch.randn(5, WIDTH))
    assert seen == []
    later.accumulate()
    assert seen == [True]


def test_what_the_second_half_has_used_is_given_back() -> None:
    freed: list[int] = []
    later = WeightGradients()
    layer = nn.Linear(WIDTH, WIDTH)

    class Watched(Tensor):
        def __del__(self) -> None:
            freed.append(1)

    entered: Any = torch.randn(5, WIDTH).as_subclass(Watched)
    later.add(Left(layer.weight, layer.bias, False, entered, torch.randn(5, WIDTH)))
    del entered
    assert freed == []
    later.accumulate()
    assert freed


def test_layers_are_as_before_outside() -> None:
    block = Block()
    splitter = Splitter([block])
    with splitter.into(WeightGradients()):
        assert "forward" in vars(block.up)
    assert "forward" not in vars(block.up)


def test_a_forward_of_ones_own_is_left_alone_whenever_it_came() -> None:
    block = Block()
    splitter = Splitter([block])
    block.down.__dict__["forward"] = own = lambda hidden: hidden[..., :WIDTH]
    for each in (splitter, Splitter([block])):
        with each.into(WeightGradients()):
            assert vars(block.down)["forward"] is own
        assert vars(block.down)["forward"] is own


def test_a_layer_that_is_copied_inside_runs_with_the_copy() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    with Splitter([layer]).into(WeightGradients()):
        copied = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in copied.parameters():
            parameter.zero_()
    assert not copied(torch.ones(1, WIDTH)).any()
