"""What a module asks of the whole model while a rank holds a part of it."""

import io
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import BackboneFinetuning, BaseFinetuning, Callback
from torch import Tensor, nn

from .fidelity import Cell, Experiment, Make, check, label, make_trainer, snapshot, train, usual, usual_rows
from .test_checkpoints import load, same_files
from .users import LENGTH, ROWS, VOCABULARY, WIDTH, LanguageModule, Row, make_loader, make_model, make_rows
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
        assert self.device == device
        return super().training_step({name: value.to(device) for name, value in batch.items()}, batch_idx)


class Positions(L.LightningModule):
    """A part that knows a device of its own."""

    def forward(self, length: int) -> Tensor:
        return torch.arange(length, device=self.device)[None]


class AsksItsOwnDevice(LanguageModule):
    """Makes a part in a hook that is on no CPU before it is trained, as none is where the run is on an accelerator."""

    def __init__(self) -> None:
        super().__init__(tied=False)

    def setup(self, stage: str) -> None:
        with torch.device("meta"):
            self.positions = Positions()

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        zeros = torch.zeros(1, LENGTH, dtype=torch.int64, device=self.device)
        return super().training_step({**batch, "position_ids": zeros + self.positions(LENGTH)}, batch_idx)


@pytest.mark.contract(
    "The module", "`self.device`, `self.model.device` and `next(self.parameters()).device` on every rank"
)
@pytest.mark.parametrize(
    ("cell", "module"),
    [
        (FEW, AsksTheModelsDevice),
        (CHIMERA, AsksTheModelsDevice),
        (CHIMERA, AsksAParametersDevice),
        (FEW, AsksItsOwnDevice),
    ],
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


class SavesWeights(LanguageModule):
    """Saves the model by itself in mid-run."""

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        if self.trainer.is_global_zero:
            torch.save(self.model.state_dict(), io.BytesIO())


def penalizes(cell: Cell) -> Experiment:
    return usual(cell, Penalizes(), usual_rows(cell, padded=False))


@pytest.mark.contract(
    "The module",
    "numbers of weights that another rank has (a penalty over `self.parameters()`) name `strategy.full_parameters`",
    "refused",
)
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (penalizes, r"pow\(\) was called on a parameter that another rank.*full_parameters\(\).*weight_decay"),
        (
            AveragesWeights,
            r"cpu\(\) was called on a parameter that another rank.*trainer\.strategy\.full_parameters\(\)",
        ),
        (SavesWeights, r"torch\.save\(\) was called on a parameter that another rank.*full_parameters\(\)"),
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


@pytest.mark.contract(
    "The module",
    "`with strategy.full_parameters()` every rank has the whole model for a while (histograms, `generate`)",
)
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


@pytest.mark.contract("The module", "`strategy.full_parameters()` inside a step", "refused")
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


@pytest.mark.contract(
    "The module", "`example_input_array` is kept, and not run through a part of the model by the summary", "differs"
)
@pytest.mark.parametrize("cell", [FEW, CHIMERA], ids=str)
def test_a_summary_with_an_example_leaves_the_training_alone(world: World, cell: Cell) -> None:
    check(world, cell, has_an_example)


def example_after_fit(cell: Cell) -> bool:
    experiment = has_an_example(cell)
    make_trainer(cell, max_steps=1).fit(experiment.module, experiment.loader)
    return experiment.module.example_input_array is experiment.module.example


def test_the_example_is_there_again_after_a_fit(world: World) -> None:
    assert world.run(example_after_fit, FEW, size=2) == [True, True]


# ---------------------------------------------------------------------------------------------------------- finetuning


class HeadOnBackbone(L.LightningModule):
    """A head of its own on a bare model, as ``BackboneFinetuning`` asks for; trained weights, so none are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = make_model("gpt2").transformer
        self.head = nn.Linear(WIDTH, 2)
        for parameter in self.parameters():
            nn.init.normal_(parameter, std=0.1)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        hidden = self.backbone(batch["input_ids"], attention_mask=batch["attention_mask"]).last_hidden_state
        loss = nn.functional.cross_entropy(self.head(hidden[:, 0]), batch["input_ids"][:, 0] % 2)
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        return torch.optim.SGD(trained, lr=0.5, momentum=0.9, weight_decay=0.01)

    def microbatch_weight(self, batch: Row) -> int:
        return len(batch["input_ids"])


class Thaws(BaseFinetuning):
    """Trains the head, then the last two blocks as well, then all."""

    def freeze_before_training(self, pl_module: L.LightningModule) -> None:
        self.freeze(pl_module.backbone)

    def finetune_function(self, pl_module: L.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.backbone.h[2:], optimizer, lr=0.2)
        if epoch == 2:
            self.unfreeze_and_add_param_group([pl_module.backbone], optimizer, lr=0.1)


class AddsAGroup(LanguageModule):
    """Keeps parameters of its own from before the fit, and gives them to the optimizer in mid-run."""

    def __init__(self) -> None:
        super().__init__(lr=0.1)
        self.late = list(self.model.transformer.h.parameters())

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([value for name, value in self.named_parameters() if ".h." not in name], lr=0.1)

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            optimizer: Any = self.optimizers()
            optimizer.add_param_group({"params": self.late, "lr": 0.2})


def thawing(cell: Cell, callback: Callback) -> Experiment:
    rows = make_rows("gpt2", 2 * cell.accumulate * cell.replicas * ROWS, padded=False)
    options = {"callbacks": [callback], "max_epochs": 4, "max_steps": -1, "gradient_clip_val": None}
    return usual(cell, HeadOnBackbone(), rows, **options)


def thaws(cell: Cell) -> Experiment:
    return thawing(cell, Thaws())


def backbone_finetuning(cell: Cell) -> Experiment:
    return thawing(cell, BackboneFinetuning(unfreeze_backbone_at_epoch=1, backbone_initial_lr=0.05))


@pytest.mark.contract("Callbacks", "`BackboneFinetuning` and `BaseFinetuning` unfreeze every stage in mid-run")
@pytest.mark.parametrize("cell", [FEW, CHIMERA, REPLICAS], ids=str)
@pytest.mark.parametrize("make", [thaws, backbone_finetuning])
def test_what_is_frozen_may_be_thawed_in_mid_run(world: World, cell: Cell, make: Make) -> None:
    check(world, replace(cell, clip=False), make)


def add_a_group(cell: Cell) -> tuple[dict[str, Tensor], list[int]]:
    torch.manual_seed(0)
    module = AddsAGroup().double()
    trainer = make_trainer(cell, max_epochs=3, precision="64-true")
    trainer.fit(module, make_loader(make_rows("gpt2", 2 * ROWS)))
    return snapshot(module), [len(group["params"]) for group in trainer.optimizers[0].param_groups]


@pytest.mark.contract("The module", "a group of parameters that is added to the optimizer in mid-run")
def test_a_group_of_parameters_may_be_added_in_mid_run(world: World) -> None:
    ((plain, groups),) = world.run(add_a_group, Cell("plain", 1), size=1)
    for seen, own_groups in world.run(add_a_group, FEW, size=2):
        torch.testing.assert_close(seen, plain, rtol=1e-9, atol=1e-12)
        assert own_groups == groups


class ComparesParameters(AddsAGroup):
    def configure_optimizers(self) -> Any:
        late = set(self.late)
        return torch.optim.SGD([parameter for parameter in self.parameters() if parameter not in late], lr=0.1)


@pytest.mark.contract(
    "The module",
    "an optimizer whose parameters are chosen by comparing them with some kept from before the fit",
    "refused",
)
def test_groups_of_other_parameters_on_each_rank_are_an_error(world: World) -> None:
    with pytest.raises(
        RankFailed, match=r"The groups of the optimizer have other parameters on rank 1.*choose .* by name"
    ):
        world.run(train, FEW, ComparesParameters, size=2)


def thaw_and_go_on(cell: Cell, read: str | None, write: str, epochs: int) -> dict[str, Tensor]:
    torch.manual_seed(0 if read is None else 7)  # what is loaded replaces other weights
    module = HeadOnBackbone().double()
    trainer = make_trainer(cell, max_epochs=epochs, precision="64-true", callbacks=[Thaws()])
    trainer.fit(module, make_loader(make_rows("gpt2", 2 * ROWS, padded=False)), ckpt_path=read)
    trainer.save_checkpoint(write)
    return snapshot(module)


@pytest.mark.contract("Callbacks", "checkpoints written after a thaw by `BaseFinetuning` load in any layout")
def test_a_checkpoint_after_a_thaw_goes_from_layout_to_layout(world: World, tmp_path: Path) -> None:
    read, expected_read = None, None
    for number, cell in enumerate((CHIMERA, FEW, Cell("plain", 1))):
        path, expected_path = str(tmp_path / f"{number}.ckpt"), str(tmp_path / f"expected-{number}.ckpt")
        (expected,) = world.run(thaw_and_go_on, Cell("plain", 1), expected_read, expected_path, 2 + number, size=1)
        for after in world.run(thaw_and_go_on, cell, read, path, 2 + number, size=cell.size):
            torch.testing.assert_close(after, expected, rtol=1e-9, atol=1e-12)
        same_files(load(Path(path)), load(Path(expected_path)))
        read, expected_read = path, expected_path
