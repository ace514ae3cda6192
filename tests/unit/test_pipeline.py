import weakref

import torch

from lightning_chimera.runtime.pipeline import _Root


def test_the_end_of_a_graph_does_not_keep_the_activation_that_left_there() -> None:
    entered = torch.randn(3, 4, requires_grad=True)
    left = 2 * entered
    storage = weakref.ref(left.untyped_storage())
    root = _Root(left)
    del left
    assert storage() is None
    gradient = torch.randn(3, 4)
    root.backward(gradient)
    assert torch.equal(entered.grad, 2 * gradient)


def test_there_is_nothing_to_do_where_all_before_is_frozen() -> None:
    entered = torch.randn(3, requires_grad=True)
    _Root(entered.detach()).backward(torch.ones(3))
    assert entered.grad is None
