"""Stands for a parameter that another rank holds."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

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
} | {"__get__", "__set__", "__delete__", "__hash__", "__repr__", "__len__", "__reduce_ex__"}


class Placeholder(nn.Parameter):
    """A parameter on the meta device, under the name of one that this rank does not hold.

    Optimizers, summaries and checkpoints see its shape, its type and the attributes that the user has given it; its
    device is this rank's, so that code which sends a batch to a model's device works. It has no numbers, and says so.

    Args:
        original: What it stands for.
        device: This rank's device.
    """

    rank_device: torch.device

    def __new__(cls, original: nn.Parameter, device: torch.device) -> "Placeholder":
        """Makes it without memory for the numbers."""
        made: Placeholder = torch.Tensor._make_subclass(
            cls, torch.empty_like(original, device="meta"), original.requires_grad
        )
        made.__dict__.update(original.__dict__)
        made.rank_device = device
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        """This rank's device."""
        return self.rank_device

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

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Says what it is instead of numbers."""
        return f"Placeholder(shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Lets through what needs no numbers.

        Raises:
            RuntimeError: Something else was asked.
        """
        name = getattr(func, "__name__", "")
        if name not in _HARMLESS:
            raise RuntimeError(
                f"{name}() was called on a parameter that another rank of the pipeline holds. A rank has the parameters"
                " of its own stages only: use those for which `not parameter.is_meta`, or wrap the code in"
                " `with trainer.strategy.full_parameters():`, on all ranks, to have the whole model for a while. A"
                " penalty on weights belongs into the optimizer (weight_decay)."
            )
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))
