"""Losses and gradients that are not finite: as in one process, or skipped or refused on all ranks alike."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_chimera import ChimeraStrategy

from .fidelity import Cell, Experiment, Make, check, make_trainer, usual, usual_rows
from .users import LanguageModule, Row
from .world import World

FEW = Cell("1f1b", 2)
CHIMERA = Cell("chimera", 2, replicas=2, clip=False, accumulate=1)
SPLIT = Cell("zb_v", 2, microbatches=5, accumulate=1)


def skipping(cell: Cell) -> Cell:
    return replace(cell, strategy=(("nonfinite", "skip"),))


class Spoils(LanguageModule):
    """One gradient of one stage is infinite in the third step; a plain training leaves out such a step by itself."""

    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(lr=lr)
        self.double()
        self.model.transformer.h[0].mlp.c_fc.weight.register_hook(self.spoil)

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient + torch.inf if self.trainer.global_step == 2 else gradient

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        if not isinstance(self.trainer.strategy, ChimeraStrategy):
            gradients = [parameter.grad for parameter in self.parameters() if parameter.grad is not None]
            if not all(bool(gradient.isfinite().all()) for gradient in gradients):
                optimizer.zero_grad()
        super().configure_gradient_clipping(optimizer, *args, **kwargs)


class SpoilsForGood(Spoils):
    """The same, where a plain training does nothing about it."""

    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        LanguageModule.configure_gradient_clipping(self, *args, **kwargs)


class SpoilsTheLoss(Spoils):
    """The loss is infinite in the third step."""

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return loss * (torch.inf if self.trainer.global_step == 2 else 1.0)


def spoils_the_loss(cell: Cell) -> Experiment:
    return usual(cell, SpoilsTheLoss(), usual_rows(cell, padded=False))


class SpoilsWithMomentum(Spoils):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.3, momentum=0.9, weight_decay=0.01)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


@pytest.mark.contract(
    "Faults",
    "a loss or gradient that is not finite: all ranks skip the step (`nonfinite='skip'`), as one process that does so",
    "works",
    "Lightning#21929, facebookresearch/fairseq2#1374",
)
@pytest.mark.parametrize(
    ("cell", "make"),
    [(FEW, Spoils), (CHIMERA, Spoils), (FEW, spoils_the_loss), (SPLIT, SpoilsWithMomentum)],
    ids=lambda value: str(value) if isinstance(value, Cell) else value.__name__,
)
def test_all_ranks_skip_a_step_alike(world: World, cell: Cell, make: Make) -> None:
    plain, ranks = check(world, skipping(cell), make)
    for seen in (plain, *ranks):
        steps = [set(step.items()) for step in seen.hashes]
        assert [before == after for before, after in pairwise(steps)] == [False, True, False, False]


@pytest.mark.contract("Faults", "a loss or gradient that is not finite spreads, as in one process, by default")
def test_training_goes_on_by_default(world: World) -> None:
    (plain,) = world.run(losses, Cell("plain", 1), SpoilsForGood, "ignore", size=1)
    for seen in world.run(losses, replace(FEW, accumulate=1), SpoilsForGood, "ignore", size=2):
        assert [loss == loss for loss in seen] == [loss == loss for loss in plain] == [True, True, True, False, False]


def losses(cell: Cell, make: Make, mode: str) -> list[float]:
    torch.manual_seed(0)
    cell = replace(cell, strategy=(("nonfinite", mode),))
    seen: list[float] = []

    class Notes(make):  # type: ignore[misc,valid-type]
        def on_train_batch_end(self, outputs: Any, *_: Any) -> None:
            seen.append(float(outputs["loss"]))

    experiment = usual(replace(cell, accumulate=1), Notes())
    make_trainer(cell, precision="64-true", max_epochs=1).fit(experiment.module, experiment.loader)
    return seen


# --------------------------------------------------------------------------------------------------------------- raise


class SpoilsARow(LanguageModule):
    """What leaves block 1 is no number where a text starts with a certain token, from the third step on."""

    block = 1

    def __init__(self) -> None:
        super().__init__()
        self.bad = False
        self.model.transformer.h[self.block].register_forward_hook(self.spoil)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.bad = self.trainer.global_step >= 2 and bool((batch["input_ids"][:, 0] == 2).any())
        return super().training_step(batch, batch_idx)

    def spoil(self, block: Any, args: Any, output: Any) -> Any:
        if isinstance(output, tuple):
            return (output[0] * (torch.nan if self.bad else 1.0), *output[1:])
        return output * (torch.nan if self.bad else 1.0)


class SpoilsAGradient(SpoilsARow):
    """What goes back from the third block is infinite there."""

    block = 2

    def spoil(self, block: Any, args: Any, output: Any) -> None:
        hidden = output[0] if isinstance(output, tuple) else output
        if self.bad and hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / 0.0)


class SpoilsAWeight(SpoilsARow):
    """A weight's own gradient is infinite."""

    def __init__(self) -> None:
        super().__init__()
        self.model.transformer.h[3].mlp.c_fc.weight.register_hook(self.spoil_weight)

    def spoil_weight(self, gradient: Tensor) -> Tensor:
        return gradient / 0.0 if self.bad else gradient

    def spoil(self, block: Any, args: Any, output: Any) -> None:
        """Nothing."""


class RepairsAWeight(SpoilsAWeight):
    def on_after_backward(self) -> None:
        weight = self.model.transformer.h[3].mlp.c_fc.weight
        if not weight.is_meta:
            weight.grad.nan_to_num_(0.0, 0.0, 0.0)


def error_of(cell: Cell, make: Make) -> str:
    torch.manual_seed(0)
    cell = replace(cell, strategy=(("nonfinite", "raise"),), padded=False)
    experiment: Experiment = usual(cell, make())  # type: ignore[call-arg]
    rows = experiment.loader.dataset
    # Row 5 of a batch of 8 is in microbatch 2 of 4; in a window of two batches it is in the second one.
    for start in range(0, len(rows), 2 * 8 * cell.replicas):
        rows[start + 8 * cell.replicas * (cell.accumulate - 1) + 5]["input_ids"][0] = 2
    try:
        options = {"accumulate_grad_batches": cell.accumulate, "gradient_clip_val": 1.0, "max_epochs": 1}
        make_trainer(cell, precision="64-true", **options).fit(experiment.module, experiment.loader)
    except FloatingPointError as error:
        return str(error)
    return "none"


@pytest.mark.contract(
    "Faults",
    "a loss or gradient that is not finite: all ranks raise, and name the stage and microbatch where it began"
    " (`nonfinite='raise'`)",
    "works",
    "Lightning#21929",
)
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (
            SpoilsARow,
            "The loss of a batch after step 2 is nan. It began in what left stage 0 (global rank 1) for microbatch 2 of"
            " replica 0, in batch 1 of those of this step.",
        ),
        (
            SpoilsAGradient,
            "not finite. It began in the gradient that left stage 1 (global rank 0) for microbatch 2 of replica 0, in"
            " batch 1 of those of this step.",
        ),
        (
            SpoilsAWeight,
            "not finite. What left the stages was finite; the gradient of 'model.transformer.h.3.mlp.c_fc.weight'"
            " (global rank 0) is not.",
        ),
        (RepairsAWeight, "none"),
    ],
)
def test_all_ranks_raise_alike_and_say_where_it_began(world: World, make: Make, said: str) -> None:
    errors = world.run(error_of, FEW, make, size=2)
    assert len(set(errors)) == 1
    assert said in errors[0]


def test_replicas_raise_alike(world: World) -> None:
    errors = world.run(error_of, Cell("chimera", 2, replicas=2, accumulate=1), SpoilsARow, size=4)
    assert len(set(errors)) == 1
    assert "It began in what left stage 0 (global rank" in errors[0]
    assert "for microbatch 2 of replica 0" in errors[0]
