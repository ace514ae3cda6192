"""A backward in two halves: the gradients of a stage's input first, those of its large weights whenever there is time.

    forward      y  = x W^T + b          saves x and W
    backward I   dx = dy W               keeps x and dy
    backward W   dW = dy^T x, db = sum dy

Linear layers hold nearly all weights of a transformer, and a good half of its backward. So the backward is split there
and nowhere else: while a stage runs, the forward of each ``nn.Linear`` and ``Conv1D`` is shadowed by one that leaves
the gradient of its weight for later. Everything else (norms, embeddings, weights in code of the user's own) is
differentiated as always, in the first half. The graph is walked once, and freed; both halves together multiply the same
matrices as a full backward. Zero-bubble schedules fill their gaps with the second half (Qi et al., "Zero Bubble
Pipeline Parallelism", ICLR'24).
"""

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from transformers.pytorch_utils import Conv1D

_ANCHOR = torch.zeros((), requires_grad=True)
"""Makes the output of a layer need a gradient where its input does not."""


class _Left(NamedTuple):
    """What is left to do for one call of a layer.

    Attributes:
        layer: The layer.
        entered: What entered it, as it was multiplied.
        gradient: The gradient of what came out.
    """

    layer: nn.Linear | Conv1D
    entered: Tensor
    gradient: Tensor


class WeightGradients:
    """The gradients of weights that one backward has left for later."""

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def add(self, layer: nn.Linear | Conv1D, entered: Tensor, gradient: Tensor) -> None:
        """Leaves the weight of one call of a layer for later."""
        self._left.append(_Left(layer, entered, gradient))

    def accumulate(self) -> None:
        """The second half: adds them to ``.grad``, in the order of the backward, and gives back what they needed."""
        left, self._left = self._left, []
        left.reverse()
        while left:
            _accumulate(left.pop())


class Splitter:
    """Splits backwards at the linear layers of some modules.

    Args:
        modules: What a stage runs. Split are plain linear layers whose forward nobody has changed.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._forwards = {
            layer: self._split(layer)
            for module in modules
            for layer in module.modules()
            if isinstance(layer, nn.Linear | Conv1D) and type(layer) in (nn.Linear, Conv1D)
            if "forward" not in vars(layer)
        }
        self._later = WeightGradients()

    @contextmanager
    def into(self, later: WeightGradients) -> Iterator[None]:
        """Enters around a forward, and around the first half of its backward, where checkpointed layers run once more.

        Args:
            later: Where to leave the gradients of the weights.
        """
        self._later = later
        for layer, forward in self._forwards.items():
            layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for layer in self._forwards:
                layer.__dict__.pop("forward", None)

    def _split(self, layer: nn.Linear | Conv1D) -> Callable[[Tensor], Tensor]:
        """The forward of a layer, with a backward that leaves the gradient of its weight for later."""
        plain = layer.forward

        def forward(entered: Tensor) -> Tensor:
            weight: Tensor = layer.weight
            bias: Tensor | None = layer.bias
            # One that is made of others has a graph of its own, which a backward for each use would walk twice.
            made = not weight.is_leaf or (bias is not None and not bias.is_leaf)
            if made or not weight.requires_grad or not torch.is_grad_enabled():
                return plain(entered)
            # Detached: the node that adds to a weight would else run in the first half too, and call the user's hooks.
            weight, bias = weight.detach(), None if bias is None else bias.detach()
            kind = entered.device.type
            if torch.is_autocast_enabled(kind):
                dtype = torch.get_autocast_dtype(kind)
                entered, weight = entered.to(dtype), weight.to(dtype)
                bias = None if bias is None else bias.to(dtype)
            matrix = weight.t() if isinstance(layer, Conv1D) else weight
            left: Tensor = _Linear.apply(  # type: ignore[no-untyped-call]
                entered, matrix, bias, _ANCHOR, partial(self._later.add, layer)
            )
            return left

        return forward


class _Linear(torch.autograd.Function):
    """``F.linear``, whose backward hands on what its weight's gradient needs instead of computing it."""

    @staticmethod
    def forward(
        ctx: Any,
        entered: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        later: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(entered, weight)
        ctx.later = later
        return nn.functional.linear(entered, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        entered, weight = ctx.saved_tensors
        ctx.later(entered.detach(), gradient)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


def _accumulate(left: _Left) -> None:
    """Adds the gradients of a layer's weight and bias, as autograd would."""
    entered, gradient = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (left.entered, left.gradient))
    factors = (entered.t(), gradient) if isinstance(left.layer, Conv1D) else (gradient.t(), entered)
    weight, bias = left.layer.weight, left.layer.bias
    if _is_plain(weight) and weight.grad is not None and weight.grad.dtype == gradient.dtype:
        weight.grad.addmm_(*factors)  # one pass over the weight, where a full backward takes two
    else:
        _add(weight, torch.mm(*factors))
    if bias is not None and bias.requires_grad:
        _add(bias, gradient.sum(0))


def _add(parameter: Tensor, gradient: Tensor) -> None:
    """Adds to the gradient of a parameter; the user's hooks on it are called."""
    gradient = gradient.to(parameter.dtype)
    if _is_plain(parameter):
        parameter.grad = gradient if parameter.grad is None else parameter.grad.add_(gradient)
    else:
        torch.autograd.backward(parameter, gradient)


def _is_plain(parameter: Tensor) -> bool:
    """Whether nobody listens to a parameter's gradient."""
    return not (parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None))
