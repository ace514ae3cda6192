"""The example that fine-tunes GPT-2 trains as a pipeline as it does in a plain Trainer: the same script, run twice."""

import functools
import os
import runpy
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import lightning as L
import pytest
import torch
from torch import Tensor
from transformers import GPT2LMHeadModel
from transformers.modeling_outputs import CausalLMOutputWithCrossAttentions

from .fidelity import SILENT, Spy, Trained, same_changes, same_copies, same_losses, snapshot
from .world import World

SCRIPT = Path(__file__).parents[2] / "examples" / "fine_tune_gpt2.py"
PLAIN = {"strategy": "auto", "devices": 1}
LIMIT = 300.0
"""Seconds for 50 steps on a busy machine."""


def in_parts(model: GPT2LMHeadModel, labels: Tensor, parts: int, **batch: Tensor) -> CausalLMOutputWithCrossAttentions:
    """What the model gives for a batch, computed part by part: equal but for rounding."""
    total, loss, logits = (labels[:, 1:] != -100).sum(), torch.zeros(()), []
    for rows in torch.arange(len(labels)).tensor_split(min(parts, len(labels))):
        output = whole_forward(model, labels=labels[rows], **{name: value[rows] for name, value in batch.items()})
        loss = loss + output.loss * ((labels[rows, 1:] != -100).sum() / total)
        logits.append(output.logits)
    return CausalLMOutputWithCrossAttentions(loss=loss, logits=torch.cat(logits))


whole_forward = GPT2LMHeadModel.forward


def run_script(folder: str, overrides: dict[str, Any], sgd: float | None = None, parts: int = 1) -> Trained:
    """Runs the script in a folder, with other arguments for its Trainer.

    Args:
        folder: Where the script writes.
        overrides: Arguments that replace the script's own.
        sgd: Learning rate of SGD, which then trains instead of AdamW.
        parts: Into how many parts the model cuts a batch.
    """
    spy = Spy()

    class Watched(L.Trainer):
        def __init__(self, **options: Any) -> None:
            super().__init__(**{**options, **SILENT, "limit_val_batches": 2, **overrides, "callbacks": [spy]})

        def fit(self, module: L.LightningModule, *loaders: Any) -> None:
            spy.seen.before = snapshot(module)
            super().fit(module, *loaders)
            spy.seen.after = snapshot(module)
            spy.seen.notes = {name: float(value) for name, value in self.callback_metrics.items()}

    def make_sgd(groups: Any, **_: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(groups, lr=sgd)

    os.chdir(folder)
    main = runpy.run_path(str(SCRIPT))["main"]
    with ExitStack() as stack:
        stack.enter_context(patch.object(L, "Trainer", Watched))
        if sgd is not None:
            stack.enter_context(patch.object(torch.optim, "AdamW", make_sgd))
        if parts > 1:
            stack.enter_context(
                patch.object(GPT2LMHeadModel, "forward", functools.partialmethod(in_parts, parts=parts))
            )
        main()
    return spy.seen


def steps(losses: list[float]) -> Tensor:
    """The mean loss of every four batches; Lightning hands out a fourth of each batch's."""
    return torch.tensor(losses)[: len(losses) // 4 * 4].view(-1, 4).sum(dim=1)


# A step is four batches, each of which runs through the pipeline by itself.
@pytest.mark.contract("Loop", "a run_clm-like fine-tuning script gives a plain Trainer's weights by SGD")
@pytest.mark.parametrize("devices", [2, pytest.param(4, marks=pytest.mark.long)])
def test_the_script_changes_every_parameter_by_sgd_as_a_plain_trainer_does(
    world: World, devices: int, tmp_path: Path
) -> None:
    options = {"precision": "32-true", "max_steps": 5}
    (plain,) = world.run(run_script, str(tmp_path), {**options, **PLAIN}, 0.1, size=1)
    ranks = world.run(run_script, str(tmp_path), {**options, "devices": devices}, 0.1, size=devices)
    assert min(plain.norms) < 1.0 < max(plain.norms), "some steps are clipped"
    for seen in ranks:
        same_changes(seen, plain, "32-true")
        assert seen.notes == pytest.approx(plain.notes, rel=1e-5)
    same_losses(ranks, plain, "32-true")
    same_copies(ranks)
    saved = GPT2LMHeadModel.from_pretrained(tmp_path / "fine_tuned")
    for name, value in saved.named_parameters():
        assert torch.equal(value.double(), ranks[0].after[f"model.{name}"])


def compare_curves(world: World, folder: Path, max_steps: int) -> None:
    """Checks that a pipeline's losses in bfloat16 are off by no more than rounding makes plain runs differ."""
    options = {"max_steps": max_steps, "val_check_interval": 20}
    plain, halves = (
        steps(world.run(run_script, str(folder), {**options, **PLAIN}, None, parts, size=1, limit=LIMIT)[0].losses)
        for parts in (1, 2)
    )
    piped = steps(world.run(run_script, str(folder), options, size=2, limit=LIMIT)[0].losses)
    rounding, error = float((halves - plain).abs().max()), float((piped - plain).abs().max())
    assert len(plain) == len(piped) >= max_steps - 1
    assert plain[-1] < plain[0]
    # One draw of the rounding errors is compared with another one.
    assert 0 < error <= 2 * rounding, f"{plain[0]:.3f} -> {plain[-1]:.3f}: {rounding:.2e} by rounding, {error:.2e}"


def test_the_scripts_losses_in_bfloat16_are_those_of_a_plain_trainer(world: World, tmp_path: Path) -> None:
    compare_curves(world, tmp_path, 3)


@pytest.mark.long
@pytest.mark.timeout(3 * LIMIT)
@pytest.mark.contract(
    "Loop", "a run_clm-like fine-tuning script in bf16-mixed has a plain Trainer's losses over 50 steps"
)
def test_the_scripts_losses_in_bfloat16_are_those_of_a_plain_trainer_over_50_steps(
    world: World, tmp_path: Path
) -> None:
    compare_curves(world, tmp_path, 50)
