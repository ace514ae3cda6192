"""Optimizers see the whole module on every rank, whenever and by whatever they were made."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .fidelity import Cell, check, make_trainer, snapshot, train
from .test_checkpoints import load, same_files
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

PLAIN = Cell("plain", 1)
CHIMERA = Cell("chimera", 4)
FEW = Cell("1f1b", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)


class MarksParameters(LanguageModule):
    """Gives its parameters attributes, by which it groups them."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            if parameter.ndim < 2:
                parameter.decays = False

    def configure_optimizers(self) -> Any:
        groups: dict[float, list[nn.Parameter]] = {0.1: [], 0.0: []}
        for parameter in self.parameters():
            groups[0.1 if getattr(parameter, "decays", True) else 0.0].append(parameter)
        return torch.optim.SGD(
            [{"params": params, "weight_decay": decay} for decay, params in groups.items()], lr=0.1, momentum=0.9
        )


class MadeBefore(LanguageModule):
    """Makes its optimizer when it is made itself."""

    def __init__(self) -> None:
        super().__init__()
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)

    def configure_optimizers(self) -> Any:
        return self.optimizer


MODULES = {"MarksParameters": MarksParameters, "MadeBefore": MadeBefore}


@pytest.mark.contract("The module", "parameter groups by names or attributes, with weight decay of their own")
@pytest.mark.parametrize("cell", [CHIMERA, FEW, REPLICAS], ids=str)
@pytest.mark.parametrize("module", MODULES.values())
def test_groups_by_attributes_and_optimizers_made_before_train_alike(
    world: World, cell: Cell, module: type[LanguageModule]
) -> None:
    check(world, cell, module)


def go_on(cell: Cell, name: str, read: str | None, write: str, steps: int) -> tuple[dict[str, Tensor], list[int]]:
    """Trains up to a number of steps, from where a checkpoint was written, and writes one."""
    torch.manual_seed(0 if read is None else 7)  # what is loaded replaces other weights
    module = MODULES[name]().double()
    trainer = make_trainer(cell, max_steps=steps, max_epochs=-1, precision="64-true")
    trainer.fit(module, make_loader(make_rows("gpt2", ROWS)), ckpt_path=read)
    trainer.save_checkpoint(write)
    return snapshot(module), [len(group["params"]) for group in trainer.optimizers[0].param_groups]


@pytest.mark.parametrize("name", MODULES)
def test_a_checkpoint_of_them_goes_from_layout_to_layout(world: World, tmp_path: Path, name: str) -> None:
    read, expected_read = None, None
    for number, cell in enumerate((CHIMERA, FEW, PLAIN, CHIMERA)):
        path, expected_path = str(tmp_path / f"{number}.ckpt"), str(tmp_path / f"expected-{number}.ckpt")
        steps = 2 + 2 * number
        ((expected, groups),) = world.run(go_on, PLAIN, name, expected_read, expected_path, steps, size=1)
        for after, own_groups in world.run(go_on, cell, name, read, path, steps, size=cell.size):
            torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-12)
            assert own_groups == groups
        same_files(load(Path(path)), load(Path(expected_path)))
        read, expected_read = path, expected_path


def fit_twice(cell: Cell, name: str) -> list[dict[str, Tensor]]:
    """Fits a module with a trainer, and again with another."""
    torch.manual_seed(0)
    module, seen = MODULES[name]().double(), []
    for _ in range(2):
        trainer = make_trainer(cell, max_steps=2, max_epochs=-1, precision="64-true")
        trainer.fit(module, make_loader(make_rows("gpt2", ROWS)))
        seen.append(snapshot(module))
    return seen


@pytest.mark.parametrize("name", MODULES)
def test_a_module_with_them_may_be_fitted_again(world: World, name: str) -> None:
    (plain,) = world.run(fit_twice, PLAIN, name, size=1)
    for seen in world.run(fit_twice, FEW, name, size=2):
        torch.testing.assert_close(seen, plain, rtol=1e-9, atol=1e-12)


class TrainsAStranger(LanguageModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), nn.Parameter(torch.zeros(3))], lr=0.1)


class TwoOptimizers(LanguageModule):
    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        halves = ([value for name, value in named if ("bias" in name) is bias] for bias in (True, False))
        return [torch.optim.SGD(half, lr=0.1) for half in halves]


class ManyEvaluations(LanguageModule):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters())


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (TrainsAStranger, r"ValueError: The optimizer has 1 parameters that are not the module's"),
        (TwoOptimizers, r"returned several optimizers\. A pipeline trains with one: give it several parameter groups"),
        (ManyEvaluations, r"LBFGS evaluates the step several times"),
    ],
)
def test_other_optimizers_are_refused(world: World, module: type[LanguageModule], message: str) -> None:
    with pytest.raises(RankFailed, match=message):
        world.run(train, FEW, module, size=2)
