"""Stands for a parameter that another rank holds, and for its gradient."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from typing_extensions import override

_HARMLESS = {
    function.__name__
    for function in (
        Tensor.copy_,  # of a checkpoint into a module that is cut: nothing to do here
        Tensor.dim,
        Tensor.element_size,
        Tensor.is_complex,
        Tensor.is_floating_point,
        Tensor.nelement,
        Tensor.new_empty,
        Tensor.numel,
        Tensor.register_hook,
        Tensor.register_post_accumulate_grad_hook,
        Tensor.requires_grad_,
        Tensor.size,
        Tensor.stride,
        Tensor.is_contiguous,
        torch.empty_like,
        torch.is_complex,
        torch.is_floating_point,
        torch.numel,
    )
} | {"__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__"}


_IN_PLACE = {
    function.__name__
    for function in (
        Tensor.add_,
        Tensor.clamp_,
        Tensor.clamp_max_,
        Tensor.clamp_min_,
        Tensor.clip_,
        Tensor.detach_,
        Tensor.div_,
        Tensor.mul_,
        Tensor.nan_to_num_,
        Tensor.neg_,
        Tensor.sub_,
        Tensor.zero_,
    )
} | {"__iadd__", "__imul__", "__isub__", "__itruediv__"}
"""What may be done to a gradient without its numbers: the ranks that have them do the same."""


class _Absent(Tensor):
    """A tensor on the meta device, which says this rank's device and refuses to have numbers."""

    rank_device: torch.device

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """This rank's device."""
        return self.rank_device

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is instead of numbers."""
        return f"{type(self).__name__}(shape={tuple(self.shape)}, dtype={self.dtype})"

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be saved: the file would lack the numbers.

        Raises:
            RuntimeError: Always.
        """
        raise self.refuse("torch.save")

    @classmethod
    def refuse(cls, name: str) -> RuntimeError:
        """The error for a function that needs the numbers."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lets through what needs no numbers.

        Raises:
            RuntimeError: Something else was asked.
        """
        name = getattr(func, "__name__", "")
        if name == "equal":
            return args[0] is args[1]  # as where a callback looks for a parameter in an optimizer
        if name not in _HARMLESS:
            raise cls.refuse(name)
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))


class Placeholder(_Absent, nn.Parameter):
    """A parameter on the meta device, under the name of one that this rank does not hold.

    Optimizers, summaries and checkpoints see its shape, its type and the attributes that the user has given it; its
    device is this rank's, so that code which sends a batch to a model's device works. It has no numbers, and says so.

    Args:
        original: What it stands for.
        device: This rank's device.
    """

    def __new__(cls, original: nn.Parameter, device: torch.device) -> "Placeholder":
        """Makes it without memory for the numbers."""
        made: Placeholder = torch.Tensor._make_subclass(
            cls, torch.empty_like(original, device="meta"), original.requires_grad
        )
        made.__dict__.update(original.__dict__)
        made.rank_device = device
        return made

    def detach(self) -> "Placeholder":
        """Itself without a gradient; its numbers are missing as before."""
        detached = Placeholder(self, self.rank_device)
        detached.requires_grad_(False)
        return detached

    @property
    def data(self) -> "Placeholder":  # type: ignore[override]
        """As ``detach``."""
        return self.detach()

    def __deepcopy__(self, memo: dict[int, Any]) -> "Placeholder":
        copied = memo[id(self)] = Placeholder(self, self.rank_device)
        return copied

    @classmethod
    @override
    def refuse(cls, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name}() was called on a parameter that another rank of the pipeline holds. A rank has the parameters"
            " of its own stages only: use those for which `not parameter.is_meta`, or wrap the code in"
            " `with trainer.strategy.full_parameters():`, on all ranks, to have the whole model for a while. A"
            " penalty on weights belongs into the optimizer (weight_decay), new values into setup() or"
            " configure_model(), and weights that a step uses besides the model's call into a layer of the module that"
            " is tied to them (self.head.weight = self.model.get_input_embeddings().weight)."
        )


class PlaceholderGradient(_Absent):
    """The gradient of a placeholder: there where the parameter has one on the ranks that hold it, without its numbers.

    What changes a gradient in place is done by the ranks that have the numbers, so it is let through.

    Args:
        placeholder: The parameter.
    """

    def __new__(cls, placeholder: Placeholder) -> "PlaceholderGradient":
        """Makes it without memory for the numbers."""
        empty = torch.empty(placeholder.shape, dtype=placeholder.dtype, device="meta")
        made: PlaceholderGradient = torch.Tensor._make_subclass(cls, empty, False)
        made.rank_device = placeholder.rank_device
        return made

    def detach(self) -> "PlaceholderGradient":
        """Itself: there is no graph."""
        return self

    @property
    def data(self) -> "PlaceholderGradient":  # type: ignore[override]
        """Itself."""
        return self

    @classmethod
    @override
    def refuse(cls, name: str) -> RuntimeError:
        return RuntimeError(
            f"{name}() was called on the gradient of a parameter that another rank of the pipeline holds. A rank has"
            " the gradients of its own stages only. For norms call `trainer.strategy.grad_norm(norm_type)`, to clip by"
            " a norm `trainer.strategy.clip_grad_norm(max_norm, norm_type)`, and to have all gradients for a while wrap"
            " the code in `with trainer.strategy.full_parameters(gradients=True):`, each on all ranks."
        )

    @classmethod
    @override
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lets through what needs no numbers, and what changes gradients in place.

        Raises:
            RuntimeError: Something else was asked.
        """
        name = getattr(func, "__name__", "")
        if name in _IN_PLACE and isinstance(args[0], PlaceholderGradient):
            return args[0]
        if name in ("_foreach_mul_", "_foreach_zero_") and not any(isinstance(arg, list) for arg in args[1:]):
            own = [gradient for gradient in args[0] if not gradient.is_meta]
            return func(own, *args[1:]) if own else None
        return super().__torch_function__(func, types, args, kwargs)
