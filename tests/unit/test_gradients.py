import pytest
import torch

from lightning_chimera.runtime.gradients import _norms

GRADIENTS = [
    torch.linspace(-3, 5, 12, dtype=torch.float64).reshape(3, 4),
    torch.tensor(-2.5, dtype=torch.float64),
    torch.linspace(-1, 2, 7),
    torch.zeros(0),
    torch.full((3,), 1e200, dtype=torch.float64),
]


@pytest.mark.parametrize("order", [1.0, 2.0, 3.0, 0.5, float("inf")])
def test_norms_of_all_gradients_at_once_are_those_of_each(order: float) -> None:
    gradients = GRADIENTS if order < float("inf") else [each for each in GRADIENTS if each.numel()]
    each = [float(torch.linalg.vector_norm(gradient, order)) for gradient in gradients]
    found = _norms(gradients, order)
    assert found.dtype == torch.float64
    assert found.tolist() == each


def test_norms_of_no_gradients_are_none() -> None:
    assert _norms([], 2.0).tolist() == []


def test_a_sparse_gradient_has_the_norm_of_the_dense_one() -> None:
    embedding = torch.nn.Embedding(5, 3, sparse=True)
    embedding(torch.tensor([1, 1, 4])).sum().backward()
    gradient = embedding.weight.grad
    assert gradient is not None
    assert gradient.is_sparse
    for order in (1.0, 2.0, float("inf")):
        assert _norms([gradient], order).tolist() == [float(torch.linalg.vector_norm(gradient.to_dense(), order))]
