"""Cuts a model into stages of equal cost, exactly.

Costs are whole numbers per layer (see :mod:`lightning_chimera.partition.anatomy` for the numbering), so that the bounds
below are found by bisection without rounding.
"""

from collections.abc import Callable, Sequence
from functools import cache
from itertools import accumulate

from torch import nn

from lightning_chimera.partition.anatomy import Anatomy

# A table of embeddings is not multiplied but looked up; what it costs is its dense gradient, written and added once a
# microbatch. Measured on GPT-2 (8 blocks of width 256, vocabulary 8192): about a tenth of a matrix of its size.
_EMBEDDING_DIVISOR = 10


def layer_costs(module: nn.Module, anatomy: Anatomy) -> tuple[int, ...]:
    """Estimates what each layer costs for one token, in multiply-adds.

    A matrix of a block or of the epilogue is multiplied once per token, so it costs its number of elements; a tied head
    costs as much as one of its own. The head of GPT-2 small comes out as 5.4 blocks.

    Returns:
        ``anatomy.num_layers`` positive numbers: prologue, blocks, epilogue.
    """
    costs = [0] * anatomy.num_layers
    for name, parameter in module.named_parameters(remove_duplicate=False):
        layer = anatomy.layer_of(name)
        if layer is not None and parameter.ndim >= 2:
            costs[layer] += parameter.numel()
    costs[0] //= _EMBEDDING_DIVISOR
    return tuple(max(cost, 1) for cost in costs)


def balance(costs: Sequence[int], num_stages: int, *, paired: bool = False) -> tuple[int, ...]:
    """Chooses the cuts that keep the busiest rank's work smallest.

    Args:
        costs: Cost of prologue, blocks and epilogue.
        num_stages: Number of stages, each of which gets at least one block.
        paired: Whether a rank holds the stages s and ``num_stages`` - 1 - s, as in Chimera: then the sum of a pair is
            what counts, and the largest stage breaks ties.

    Returns:
        The first block of each stage but the first: ``num_stages`` - 1 ascending numbers.

    Raises:
        ValueError: There are fewer blocks than stages.
    """
    num_blocks = len(costs) - 2
    if not 1 <= num_stages <= num_blocks:
        raise ValueError(
            f"{num_blocks} block{'s' * (num_blocks != 1)} can't be cut into {num_stages} stages: each stage needs at"
            f" least one block. Use at most {num_blocks} stages (devices x num_nodes, or num_stages)."
        )
    blocks = list(costs[1:-1])
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    sums = [0, *accumulate(blocks)]
    return _balance_pairs(sums, num_stages) if paired and num_stages > 1 else _balance_chain(sums, num_stages)


def _balance_chain(sums: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Smallest largest stage, then the most even stages (least sum of squares)."""
    bound = _smallest(sums[-1], lambda bound: _even_chain(sums, num_stages, bound) is not None)
    cuts = _even_chain(sums, num_stages, bound)
    assert cuts is not None
    return cuts


def _even_chain(sums: Sequence[int], num_stages: int, max_stage: int) -> tuple[int, ...] | None:
    """The most even cuts whose stages keep to a bound, by dynamic programming; ``None`` where there are none."""
    count = len(sums) - 1
    # best[end] = (sum of squares, cuts) over the ways to cut the blocks before `end` into `stage` stages
    best: dict[int, tuple[int, tuple[int, ...]]] = {
        end: (sums[end] ** 2, ()) for end in range(1, count + 1) if sums[end] <= max_stage
    }
    for _ in range(1, num_stages):
        longer: dict[int, tuple[int, tuple[int, ...]]] = {}
        for cut, (squares, cuts) in best.items():
            for end in range(cut + 1, count + 1):
                stage = sums[end] - sums[cut]
                if stage > max_stage:
                    break
                candidate = (squares + stage**2, (*cuts, cut))
                if end not in longer or candidate < longer[end]:
                    longer[end] = candidate
        best = longer
    return best[count][1] if count in best else None


def _balance_pairs(sums: Sequence[int], num_stages: int) -> tuple[int, ...]:
    """Smallest largest pair, then smallest largest stage."""
    total = sums[-1]
    pair = _smallest(total, lambda bound: _cut_pairs(sums, num_stages, bound, total) is not None)
    stage = _smallest(total, lambda bound: _cut_pairs(sums, num_stages, pair, bound) is not None)
    cuts = _cut_pairs(sums, num_stages, pair, stage)
    assert cuts is not None
    return cuts


def _smallest(upper: int, holds: Callable[[int], bool]) -> int:
    """The smallest number for which a monotone condition holds, given that it holds for ``upper``; by bisection."""
    lower = 0
    while lower < upper:
        middle = (lower + upper) // 2
        if holds(middle):
            upper = middle
        else:
            lower = middle + 1
    return lower


def _cut_pairs(sums: Sequence[int], num_stages: int, max_pair: int, max_stage: int) -> tuple[int, ...] | None:
    """Cuts whose pairs and stages keep to two bounds, or ``None``: a search from both ends towards the middle."""

    @cache
    def search(left: int, right: int, pairs: int) -> tuple[int, ...] | None:
        """Cuts the blocks left .. right - 1 into 2 * pairs stages."""
        if sums[right] - sums[left] > pairs * max_pair or right - left < 2 * pairs:
            return None
        if pairs == 1:
            middle = min(range(left + 1, right), key=lambda cut: max(sums[cut] - sums[left], sums[right] - sums[cut]))
            fits = max(sums[middle] - sums[left], sums[right] - sums[middle]) <= max_stage
            return (middle,) if fits else None
        outer = [
            (abs(low - high), new_left, new_right)
            for new_left in range(left + 1, right)
            for new_right in range(right - 1, new_left, -1)
            if max(low := sums[new_left] - sums[left], high := sums[right] - sums[new_right]) <= max_stage
            and low + high <= max_pair
        ]
        for _, new_left, new_right in sorted(outer):  # the more even pairs first
            inner = search(new_left, new_right, pairs - 1)
            if inner is not None:
                return (new_left, *inner, new_right)
        return None

    return search(0, len(sums) - 1, num_stages // 2)


def check_cuts(cuts: Sequence[int], num_blocks: int, num_stages: int) -> tuple[int, ...]:
    """Checks a user's own cuts.

    Raises:
        ValueError: They are not ``num_stages`` - 1 ascending block numbers in 1 .. ``num_blocks`` - 1.
    """
    chosen = tuple(cuts)
    ascending = all(low < high for low, high in zip((0, *chosen), (*chosen, num_blocks), strict=True))
    if len(chosen) != num_stages - 1 or not ascending:
        raise ValueError(
            f"cuts={list(chosen)} do not cut {num_blocks} blocks into {num_stages} stages: give the first block of each"
            f" stage but the first, that is {num_stages - 1} ascending numbers between 1 and {num_blocks - 1}."
        )
    return chosen
