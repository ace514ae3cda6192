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

import copy
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers.pytorch_utils import Conv1D

_ANCHOR = torch.zeros((), requires_grad=True)
"""Makes the output of a layer need a gradient where its input does not."""

_ANCHORED = torch.autograd.graph.get_gradient_edge(_ANCHOR).node
"""What a backward reaches that adds to parameters, and ``torch.autograd.grad`` of some tensors does not."""


class Left(NamedTuple):
    """What is left to do for one call of a layer.

    Attributes:
        weight: The weight of the layer.
        bias: Its bias, if it has one.
        is_transposed: Whether the weight has a row for each input, as that of ``Conv1D``.
        entered: What entered it, as it was multiplied.
        gradient: The gradient of what came out.
    """

    weight: Tensor
    bias: Tensor | None
    is_transposed: bool
    entered: Tensor
    gradient: Tensor


class WeightGradients:
    """The gradients of weights that one backward has left for later."""

    def __init__(self) -> None:
        self._left: list[Left] = []

    def add(self, left: Left) -> None:
        """Leaves the weight of one call of a layer for later."""
        self._left.append(left)

    def accumulate(self) -> None:
        """The second half: adds them to ``.grad``, in the order of the backward, and gives back what they needed."""
        left, self._left = self._left, []
        left.reverse()
        while left:
            _accumulate(left.pop())


class Splitter:
    """Splits backwards at the linear layers of some modules.

    Args:
        modules: What a stage runs. Split are plain linear layers, where nobody has put a forward of their own.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._forwards = [
            _Forward(layer)
            for module in modules
            for layer in module.modules()
            if isinstance(layer, nn.Linear | Conv1D) and type(layer) in (nn.Linear, Conv1D)
        ]

    @contextmanager
    def into(self, later: WeightGradients) -> Iterator[None]:
        """Enters around a forward, and around the first half of its backward, where checkpointed layers run once more.

        Args:
            later: Where to leave the gradients of the weights.
        """
        shadowed = [forward for forward in self._forwards if "forward" not in vars(forward.layer)]
        for forward in shadowed:
            forward.later = later
            forward.layer.__dict__["forward"] = forward
        try:
            yield
        finally:
            for forward in shadowed:
                forward.layer.__dict__.pop("forward", None)


class _Forward:
    """The forward of a layer, with a backward that leaves the gradient of its weight for later.

    Args:
        layer: The layer.
    """

    def __init__(self, layer: nn.Linear | Conv1D) -> None:
        self.layer = layer
        self.later = WeightGradients()
        self._plain = layer.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        weight: Tensor = self.layer.weight
        bias: Tensor | None = self.layer.bias
        # One that is made of others has a graph of its own, which a backward for each use would walk twice.
        made = not weight.is_leaf or (bias is not None and not bias.is_leaf)
        # What torch.func transforms has no backward of its own.
        transformed = torch._C._are_functorch_transforms_active()
        if made or transformed or not weight.requires_grad or not torch.is_grad_enabled():
            return self._plain(*args, **kwargs)
        (entered,) = (*args, *kwargs.values())
        return _split(entered, weight, bias, self.later, is_transposed=isinstance(self.layer, Conv1D))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Tensor]:
        """The layer's own forward, of a layer that is copied inside of a step."""
        return copy.deepcopy(self._plain, memo)


def _split(
    entered: Tensor, weight: Tensor, bias: Tensor | None, later: WeightGradients, *, is_transposed: bool
) -> Tensor:
    """What a layer gives, as autocast has it."""

    def leave(entered: Tensor, gradient: Tensor) -> None:
        later.add(Left(weight, bias, is_transposed, entered, gradient))

    # Detached: the node that adds to a weight would else run in the first half too, and call the user's hooks.
    matrix = weight.detach().t() if is_transposed else weight.detach()
    added = None if bias is None else bias.detach()
    kind = entered.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        entered, matrix = _cast(entered, dtype), _cast(matrix, dtype)
        added = None if added is None else _cast(added, dtype)
    left: Tensor = _Linear.apply(entered, matrix, added, _ANCHOR, leave)  # type: ignore[no-untyped-call]
    return left


def _cast(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor as autocast multiplies it, which leaves double precision alone."""
    return tensor if tensor.dtype == torch.float64 else tensor.to(dtype)


class _Linear(torch.autograd.Function):
    """``F.linear``, whose backward hands on what its weight's gradient needs instead of computing it."""

    @staticmethod
    def forward(
        ctx: Any,
        entered: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        anchor: Tensor,
        leave: Callable[[Tensor, Tensor], None],
    ) -> Tensor:
        ctx.save_for_backward(entered, weight)
        ctx.leave = leave
        # Its data: torch refuses to change a view from in here in place, as some activations do.
        return nn.functional.linear(entered, weight, bias).data

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None]:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "The step differentiates a gradient (create_graph=True) through a linear layer, whose backward this"
                " schedule runs in two halves: it has one derivative only. Use a schedule whose backward is not split,"
                " such as chimera, 1f1b or interleaved."
            )
        entered, weight = ctx.saved_tensors
        if torch._C._will_engine_execute_node(_ANCHORED):
            ctx.leave(entered.detach(), gradient)
        return gradient @ weight if ctx.needs_input_grad[0] else None, None, None, None, None


def _accumulate(left: Left) -> None:
    """Adds the gradients of a layer's weight and bias, as autograd would."""
    entered, gradient = (tensor.reshape(-1, tensor.shape[-1]) for tensor in (left.entered, left.gradient))
    factors = (entered.t(), gradient) if left.is_transposed else (gradient.t(), entered)
    weight, bias = left.weight, left.bias
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
