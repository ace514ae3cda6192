import math

import pytest
import torch

from lightning_chimera.reporting import reduce

CASES = {
    "usual": ([0.25, 0.5, 0.25], [1.5, -2.25, 1e10]),
    "without weight": ([0.0, 0.0], [3.0, 5.0]),
    "a part without weight is not looked at": ([0.0, 0.75], [math.nan, 5.0]),
    "no number": ([0.5, 0.5], [math.nan, 5.0]),
    "the last is no number": ([0.5, 0.5], [5.0, math.nan]),
    "infinite": ([0.5, 0.5], [math.inf, -math.inf]),
    "one": ([0.3], [0.1]),
}


@pytest.mark.parametrize("reduce_fx", ["mean", "sum", "min", "max"])
@pytest.mark.parametrize("name", CASES)
def test_numbers_are_reduced_as_torch_reduces_tensors(name: str, reduce_fx: str) -> None:
    shares, values = CASES[name]
    of_tensors = reduce(reduce_fx, shares, [torch.tensor([value], dtype=torch.float64) for value in values])
    assert isinstance(of_tensors, torch.Tensor)
    torch.testing.assert_close(reduce(reduce_fx, shares, values), of_tensors.item(), rtol=1e-15, atol=0, equal_nan=True)
