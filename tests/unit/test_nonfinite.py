import math

import pytest
import torch

from lightning_chimera.nonfinite import _are_finite


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("entry", [0.0, 1.0, "largest", math.inf, -math.inf, math.nan])
def test_gradients_are_finite_where_each_entry_is(entry: float | str, dtype: torch.dtype) -> None:
    gradients = [torch.ones(3, 5, dtype=dtype), torch.ones(7, dtype=dtype)]
    value = torch.finfo(dtype).max if entry == "largest" else float(entry)
    gradients[1][2:4] = value
    assert _are_finite(gradients) is math.isfinite(value)


def test_no_gradients_are_finite() -> None:
    assert _are_finite([])
