"""Whatever a training step does in a plain Trainer, it does in a pipeline."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .fidelity import Cell, Experiment, check, train, usual_rows
from .users import LENGTH, LanguageModule, Row, make_loader
from .world import RankFailed, World

CHIMERA = Cell("chimera", 4, microbatches=4)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
BERT = Cell("gpipe", 4, microbatches=3, model="bert")


# ------------------------------------------------------------------------------------------------------------ results


class ReturnsDict(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return {"loss": self.model(**batch).loss, "note": torch.ones(3)}


class ReturnsOutput(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch)


class ReturnsFromTuple(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch, return_dict=False)[0]


class CallsItself(LanguageModule):
    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = self(**batch).loss
        self.log("train_loss", loss)
        return loss


class CatchesExceptions(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        try:
            return super().training_step(batch, batch_idx)
        except Exception:
            return None


class ComputesBefore(LanguageModule):
    """Draws random numbers before the model is called, on every stage."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        order = torch.randperm(LENGTH)
        assert sorted(order.tolist()) == list(range(LENGTH))
        return super().training_step(batch, batch_idx)


@pytest.mark.contract("Loss", "a loss returned as a tensor, in a dict, or as the model's output")
@pytest.mark.parametrize(
    "module", [ReturnsDict, ReturnsOutput, ReturnsFromTuple, CallsItself, CatchesExceptions, ComputesBefore]
)
def test_a_step_may_return_its_loss_in_any_form(world: World, module: type[LanguageModule]) -> None:
    check(world, CHIMERA, module)


# -------------------------------------------------------------------------------------------------------------- hooks


class Hooks(LanguageModule):
    """Notes the order of the hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[tuple[str, Any]] = []

    def on_train_batch_start(self, batch: Row, batch_idx: int) -> None:
        self.notes.append(("on_train_batch_start", batch["input_ids"].sum().item()))

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(("on_before_zero_grad", None))

    def on_before_backward(self, loss: Tensor) -> None:
        self.notes.append(("on_before_backward", round(float(loss), 9)))

    def on_after_backward(self) -> None:
        self.notes.append(("on_after_backward", None))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        bias = self.model.transformer.ln_f.bias  # every rank of the two with D = 2 in Chimera holds it
        self.notes.append(("on_before_optimizer_step", round(float(bias.grad.norm()), 9)))

    def configure_gradient_clipping(self, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        self.notes.append(("configure_gradient_clipping", None))
        super().configure_gradient_clipping(optimizer, *args, **kwargs)

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.notes.append(("on_train_batch_end", batch_idx))


@pytest.mark.contract(
    "Loop",
    "hooks run in the order, number and with the gradients of a plain run",
    reported="Lightning#7924, Lightning#4151",
)
def test_hooks_run_in_the_order_and_with_the_values_of_a_plain_training(world: World) -> None:
    plain, ranks = check(world, Cell("chimera", 2), Hooks)
    for seen in ranks:
        assert seen.notes == plain.notes


# -------------------------------------------------------------------------------------------------------------- errors


class TwoCalls(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch).loss + self.model(**batch).loss


class NoCall(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model.lm_head.weight.sum()


class ReturnsNone(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        super().training_step(batch, batch_idx)


class Barrier(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.trainer.strategy.barrier()
        return loss


class BarrierBefore(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        self.trainer.strategy.barrier()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize(
    ("module", "message"),
    [
        pytest.param(
            TwoCalls,
            "The model was called more than once in one step.*compute everything from one call",
            marks=pytest.mark.contract("The module", "two calls of the model in a training step", "refused"),
        ),
        pytest.param(
            NoCall,
            "The step returned without calling the GPT2Model 'model.transformer'.*calls the model exactly once",
            marks=pytest.mark.contract("The module", "a step that never calls the model", "refused"),
        ),
        pytest.param(
            ReturnsNone,
            "training_step returned NoneType without a loss.*must return the loss, as a tensor or under",
            marks=pytest.mark.contract(
                "Loss",
                "`None` returned to skip a batch, as for every strategy of several processes",
                "refused",
                "Lightning#5243, Lightning#12190",
            ),
        ),
        pytest.param(
            Barrier,
            r"strategy\.barrier\(\) was called inside a step",
            marks=pytest.mark.contract("The module", "`strategy.barrier()` inside a step", "refused"),
        ),
        (BarrierBefore, r"strategy\.barrier\(\) was called inside a step"),
    ],
)
def test_a_step_that_cannot_be_cut_is_an_error(world: World, module: type[LanguageModule], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        world.run(train, Cell("chimera", 2), module, size=2, limit=20)


class TwoCallsInValidation(LanguageModule):
    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.log("val_loss", self.model(**batch).loss + self.model(**batch).loss)


def two_calls_in_validation(cell: Cell) -> Experiment:
    loader = make_loader(usual_rows(cell))
    return Experiment(TwoCallsInValidation(), {"train_dataloaders": loader, "val_dataloaders": loader})


@pytest.mark.contract("The module", "two calls of the model in a validation, test or predict step", "refused")
def test_two_model_calls_in_validation_are_an_error(world: World) -> None:
    with pytest.raises(RankFailed, match="The model was called more than once in one step"):
        world.run(train, Cell("1f1b", 2), two_calls_in_validation, size=2, limit=20)
