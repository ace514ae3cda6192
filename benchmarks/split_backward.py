"""What a split backward costs: both of its parts, against a full backward.

Two blocks of GPT-2 or BERT run on one thread, 2 rows of 128 tokens. A full backward and a split one of the same blocks
follow each other, in turns which first; the ratio is the median over the pairs, so what else the machine does falls on
both. The gradients of both are compared first. While times are taken, gradients are added to those that are there, as
for all microbatches of a step but the first.
"""

import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, GPT2Config, GPT2LMHeadModel

from benchmarks.report import Bar, Report, arguments
from lightning_chimera.partition.deferral import Splitter, WeightGradients

LIMIT = 1.03
"""The most that I and W together may take, in full backwards."""

DIFFERENCE = 1e-5
"""The most that their gradients may differ, by the norm of all: both sum up the same in single precision."""

BLOCKS, ROWS, LENGTH = 2, 2, 128


class Pass(NamedTuple):
    """Seconds of one forward and backward; the second part of a full backward is 0."""

    forward: float
    first: float
    second: float

    @property
    def backward(self) -> float:
        """Both parts."""
        return self.first + self.second


def blocks_of(model: str, width: int) -> nn.ModuleList:
    """The blocks of a transformer without dropout."""
    heads = max(1, width // 64)
    if model == "gpt2":
        gpt2 = GPT2Config(
            n_layer=BLOCKS,
            n_embd=width,
            n_head=heads,
            vocab_size=64,
            bos_token_id=0,
            eos_token_id=0,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
        )
        blocks = GPT2LMHeadModel(gpt2).transformer.h
    else:
        bert = BertConfig(
            num_hidden_layers=BLOCKS,
            hidden_size=width,
            intermediate_size=4 * width,
            num_attention_heads=heads,
            vocab_size=64,
            hidden_dropout_prob=0,
            attention_probs_dropout_prob=0,
        )
        blocks = BertModel(bert).encoder.layer
    assert isinstance(blocks, nn.ModuleList)
    return blocks


class Stage:
    """Blocks to run forward and backward, whole and split.

    Args:
        blocks: The blocks.
        width: Size of the hidden states.
    """

    def __init__(self, blocks: nn.ModuleList, width: int) -> None:
        self._blocks = blocks
        self._splitter = Splitter([blocks])
        self._entered, self._gradient = torch.randn(2, ROWS, LENGTH, width)

    def full(self) -> Pass:
        """Runs a full backward."""
        start = time.perf_counter()
        left = self._forward()
        middle = time.perf_counter()
        torch.autograd.backward(left, self._gradient)
        return Pass(middle - start, time.perf_counter() - middle, 0.0)

    def split(self) -> Pass:
        """Runs both parts, one directly after the other."""
        later = WeightGradients()
        start = time.perf_counter()
        with self._splitter.into(later):
            left = self._forward()
        middle = time.perf_counter()
        with self._splitter.into(later):
            torch.autograd.backward(left, self._gradient)
        end = time.perf_counter()
        later.accumulate()
        return Pass(middle - start, end - middle, time.perf_counter() - end)

    def gradients(self, run: Callable[[], Pass]) -> Tensor:
        """All gradients after one forward and backward, as one vector."""
        self._blocks.zero_grad()
        run()
        return torch.cat(
            [parameter.grad.flatten() for parameter in self._blocks.parameters() if parameter.grad is not None]
        )

    def _forward(self) -> Tensor:
        hidden: Tensor = self._entered.clone().requires_grad_()
        for block in self._blocks:
            left = block(hidden)
            hidden = left[0] if isinstance(left, tuple) else left
        return hidden


def pairs(full: Callable[[], Pass], split: Callable[[], Pass], count: int) -> Iterator[tuple[Pass, Pass]]:
    """Runs both in turns, the one and the other first; yields what they took, the full one first."""
    for number in range(count):
        if number % 2:
            second, first = split(), full()
        else:
            first, second = full(), split()
        yield first, second


def judge(report: Report, model: str, width: int, num_pairs: int, limit: float | None) -> None:
    """Measures the blocks of a model and adds their row and bar."""
    stage = Stage(blocks_of(model, width), width)
    whole, parts = stage.gradients(stage.full), stage.gradients(stage.split)
    error = ((parts - whole).norm() / whole.norm()).item()
    report.bars.append(Bar(f"{model}, width {width}: difference of the gradients", error, DIFFERENCE))
    for _ in pairs(stage.full, stage.split, 4):  # the first passes make the gradients and fill the caches
        pass
    measured = list(pairs(stage.full, stage.split, num_pairs))

    def median(values: Iterable[float]) -> float:
        return statistics.median(values)

    report.rows.append(
        {
            "model": model,
            "width": width,
            "full_ms": median(full.backward * 1e3 for full, _ in measured),
            "ratio": median(split.backward / full.backward for full, split in measured),
            "I_share": median(split.first / split.backward for _, split in measured),
            "gradient_difference": error,
            "forward_ratio": median(split.forward / full.forward for full, split in measured),
        }
    )
    if limit is not None:
        report.bars.append(
            Bar(f"{model}, width {width}: I + W against a full backward", report.rows[-1]["ratio"], limit)
        )


def main() -> int:
    """Measures GPT-2 and BERT at several widths."""
    parser = arguments(__doc__)
    parser.add_argument("--pairs", type=int, default=60, help="pairs of a full and a split backward")
    given = parser.parse_args()
    if given.pairs < 1:
        parser.error("one pair or more is measured")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    widths, num_pairs = ((64,), 4) if given.quick else ((256, 512, 768), given.pairs)
    report = Report(
        "A split backward against a full one",
        {"pairs": num_pairs, "blocks": BLOCKS, "rows": ROWS, "length": LENGTH, "threads": 1},
    )
    for model in ("gpt2", "bert"):
        for width in widths:
            judge(report, model, width, num_pairs, None if given.quick else LIMIT)
    return report.finish(given.json)


if __name__ == "__main__":
    sys.exit(main())
