"""What a module asks of the whole model while a rank holds a part of it."""

from typing import Any

import pytest
import torch
from torch import Tensor

from .fidelity import Cell, Experiment, Make, check, label, make_trainer, train, usual, usual_rows
from .users import LENGTH, VOCABULARY, LanguageModule, Row, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2)
CHIMERA = Cell("chimera", 4)
REPLICAS = Cell("gpipe", 2, replicas=2, microbatches=3)


# ------------------------------------------------------------------------------------------------------------- devices


class AsksTheModelsDevice(LanguageModule):
    """Sends its batch where the model is, and makes positions there."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        batch = {name: value.to(self.model.device) for name, value in batch.items()}
        batch["position_ids"] = torch.arange(LENGTH, device=self.model.device)[None]
        return super().training_step(batch, batch_idx)


class AsksAParametersDevice(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        device = next(self.parameters()).device
        return super().training_step({name: value.to(device) for name, value in batch.items()}, batch_idx)


@pytest.mark.parametrize(
    ("cell", "module"),
    [(FEW, AsksTheModelsDevice), (CHIMERA, AsksTheModelsDevice), (CHIMERA, AsksAParametersDevice)],
    ids=label,
)
def test_the_device_of_a_part_elsewhere_is_that_of_the_rank(world: World, cell: Cell, module: Make) -> None:
    check(world, cell, module)


# ------------------------------------------------------------------------------------------------------------- numbers


class Penalizes(LanguageModule):
    """Adds a penalty on all weights to the loss."""

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        return self.model(**batch).loss + 0.01 * sum(parameter.pow(2).sum() for parameter in self.parameters())


class AveragesWeights(LanguageModule):
    """Keeps a moving average of all weights."""

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.average = [parameter.detach().cpu() * 0.5 for parameter in self.parameters()]


def penalizes(cell: Cell) -> Experiment:
    return usual(cell, Penalizes(), usual_rows(cell, padded=False))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (penalizes, r"pow\(\) was called on a parameter that another rank.*full_parameters\(\).*weight_decay"),
        (
            AveragesWeights,
            r"cpu\(\) was called on a parameter that another rank.*trainer\.strategy\.full_parameters\(\)",
        ),
    ],
)
def test_numbers_of_a_part_elsewhere_are_an_error_that_names_the_way(world: World, make: Make, message: str) -> None:
    with pytest.raises(RankFailed, match=f"RuntimeError: {message}"):
        world.run(train, FEW, make, size=2)


class LooksAtAll(LanguageModule):
    """After each batch notes numbers of the whole model, and what it generates."""

    def __init__(self) -> None:
        super().__init__(lr=0.5)
        self.notes: list[Any] = []

    def look(self) -> None:
        assert not any(parameter.is_meta for parameter in self.parameters())
        numbers = {name: parameter.detach().clone() for name, parameter in self.named_parameters()}
        ids = make_rows("gpt2", 1, padded=False)[0]["input_ids"][None, :5]
        self.eval()
        with torch.no_grad():
            logits = self.model(ids).logits
            tokens = self.model.generate(ids, max_new_tokens=2, do_sample=False, pad_token_id=0)
        self.train()
        self.notes.append((numbers, logits, tokens))

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if hasattr(strategy, "full_parameters"):
            with strategy.full_parameters():
                self.look()
        else:
            self.look()


@pytest.mark.parametrize("cell", [FEW, CHIMERA, REPLICAS], ids=str)
def test_full_parameters_are_those_of_one_process_and_training_goes_on(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, LooksAtAll)
    assert len(plain.notes) == 10
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=1e-8, atol=1e-10)


class LooksInTheStep(LanguageModule):
    def training_step(self, batch: Row, batch_idx: int) -> Any:
        with self.trainer.strategy.full_parameters():
            return super().training_step(batch, batch_idx)


def test_full_parameters_inside_a_step_are_an_error(world: World) -> None:
    with pytest.raises(RankFailed, match=r"strategy\.full_parameters\(\) was called inside a step"):
        world.run(train, FEW, LooksInTheStep, size=2)


# ------------------------------------------------------------------------------------------------------------- example


class HasAnExample(LanguageModule):
    """A module summary would run the whole model on its example."""

    def __init__(self) -> None:
        super().__init__()
        self.example_input_array = {"input_ids": torch.randint(VOCABULARY, (2, LENGTH))}
        self.example = self.example_input_array

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.model(input_ids).logits


def has_an_example(cell: Cell) -> Experiment:
    return usual(cell, HasAnExample(), enable_model_summary=True)


@pytest.mark.parametrize("cell", [FEW, CHIMERA], ids=str)
def test_a_summary_with_an_example_leaves_the_training_alone(world: World, cell: Cell) -> None:
    check(world, cell, has_an_example)


def example_after_fit(cell: Cell) -> bool:
    experiment = has_an_example(cell)
    make_trainer(cell, max_steps=1).fit(experiment.module, experiment.loader)
    return experiment.module.example_input_array is experiment.module.example


def test_the_example_is_there_again_after_a_fit(world: World) -> None:
    assert world.run(example_after_fit, FEW, size=2) == [True, True]
