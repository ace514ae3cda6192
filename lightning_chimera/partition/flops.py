"""How much a model has to compute, whoever does it and how."""

from collections.abc import Iterable
from time import perf_counter

import torch
from torch import nn

from lightning_chimera.partition.anatomy import Anatomy


def training_flops(module: nn.Module, anatomy: Anatomy, hidden: Iterable[torch.Size]) -> float:
    """Floating point operations of a forward and a backward: what is recomputed or padded counts once, as all else.

    A token takes two operations for each element of a matrix in the forward, two in the backward for the gradient of
    its input, and two for that of the matrix if it is trained. Scores and sums of attention take as much as two
    matrices of a text's length for each block. What is looked up, added or normalized is not counted.

    Args:
        module: The user's module; the shapes of its parameters are enough.
        anatomy: What it is made of.
        hidden: The shapes of the hidden states: texts, length, width.
    """
    shapes = [tuple(shape) for shape in hidden]
    tokens = sum(texts * length for texts, length, *_ in shapes)
    per_token = sum(
        parameter.numel() * (6 if parameter.requires_grad else 4)
        for name, parameter in module.named_parameters(remove_duplicate=False)
        if parameter.ndim >= 2 and anatomy.layer_of(name)  # neither the prologue nor what is outside of the model
    )
    attention = sum(texts * length**2 * width for texts, length, width in shapes)
    return float(tokens * per_token + 12 * anatomy.num_blocks * attention)


def matmul_rate(dtype: torch.dtype, size: int = 512, repeats: int = 5) -> float:
    """Floating point operations in a second of square matrices on the CPU: the best of a few products.

    Args:
        dtype: Type of the matrices.
        size: Their rows and columns.
        repeats: Number of products.
    """
    left, right = torch.ones(2, size, size, dtype=dtype)
    out = torch.empty_like(left)
    times = []
    for _ in range(repeats):
        start = perf_counter()
        torch.mm(left, right, out=out)
        times.append(perf_counter() - start)
    return 2 * size**3 / min(times)
