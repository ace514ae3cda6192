"""Whether a tensor is as it was, without a look at its numbers."""

from typing import Any

from torch import Tensor


def version_of(value: Any) -> int:
    """How often a tensor was changed in place; those of inference mode do not count, and nothing else has a version."""
    return value._version if isinstance(value, Tensor) and not value.is_inference() else 0
