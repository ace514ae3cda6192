"""What crosses the boundary of a stage, as both ends have to know it."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

MOST_DIMENSIONS = 4
"""Of a tensor that is described to the other end; hidden states have three."""

_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}


class Boundary(NamedTuple):
    """Shape and type of the tensors that cross the stage boundaries for one microbatch, both ways."""

    shape: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        """Return both, such as ``(4, 128, 768) torch.float32``."""
        return f"{tuple(self.shape)} {self.dtype}"

    def as_numbers(self) -> list[int]:
        """Both as they travel, always as many numbers."""
        return [_CODES[self.dtype], len(self.shape), *self.shape, *[0] * (MOST_DIMENSIONS - len(self.shape))]

    @classmethod
    def of_numbers(cls, numbers: Sequence[int]) -> "Boundary":
        """What another rank has sent."""
        code, dimensions, *shape = numbers
        return cls(torch.Size(shape[:dimensions]), _DTYPES[code])


NUM_NUMBERS = 2 + MOST_DIMENSIONS
"""Length of :meth:`Boundary.as_numbers`."""
