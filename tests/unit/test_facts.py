"""What ranks compare before they train."""

import pytest
import torch

from lightning_chimera.facts import _of_checkpoint

VALUES = {
    "float8": torch.zeros(20).to(torch.float8_e4m3fn),
    "complex": torch.zeros(20, dtype=torch.complex64),
    "whole numbers": torch.zeros(20, dtype=torch.int4),
    "sparse": torch.zeros(4, 4).to_sparse(),
    "without numbers": torch.zeros(20, device="meta"),
    "no number": torch.zeros(0),
    "one number": torch.zeros(()),
    "a column": torch.zeros(4, 20).T,
    "a gradient's": torch.nn.Parameter(torch.zeros(20)),
    "no tensor": {"extra": 1},
}


@pytest.mark.parametrize("value", VALUES.values(), ids=VALUES)
def test_a_checkpoint_may_hold_values_of_any_kind(value: object) -> None:
    assert _of_checkpoint({"global_step": 3, "epoch": 1, "state_dict": {"value": value}}).startswith("step 3, epoch 1,")


def test_checkpoints_of_one_step_differ_by_their_numbers() -> None:
    first, again, second = (_of_checkpoint({"state_dict": {"value": torch.full((20,), n)}}) for n in (1.0, 1.0, 2.0))
    assert first == again != second
    assert _of_checkpoint({}) == "none"
