"""Checkpoints are those of one process, whatever layout writes or reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from transformers import AutoModelForCausalLM

from .fidelity import CLIP, Cell, make_trainer, snapshot
from .users import ROWS, LanguageModule, make_loader, make_rows
from .world import RankFailed, World

PLAIN = Cell("plain", 1)
CHIMERA = Cell("chimera", 4, model="gpt2")
INTERLEAVED = Cell("1f1b", 2, microbatches=3)
REPLICAS = Cell("1f1b", 2, replicas=2)
NEIGHBOURS = replace(REPLICAS, strategy=(("innermost", "replicas"),))
V = Cell("zb_v", 2)
SEVERAL_STAGES = Cell("interleaved", 2)
BATCHES = 3
"""Batches of an epoch, which are steps."""


class Adam(LanguageModule):
    """Weight decay by name, and a learning rate that changes with every step."""

    def configure_optimizers(self) -> Any:
        named = list(self.named_parameters())
        groups = [
            {"params": [value for name, value in named if "bias" in name or "ln_" in name], "weight_decay": 0.0},
            {"params": [value for name, value in named if not ("bias" in name or "ln_" in name)], "lr": 0.02},
        ]
        # A larger epsilon than usual: else the gradients that are nothing but rounding become steps.
        optimizer = torch.optim.AdamW(groups, lr=0.01, eps=1e-4, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def make_module(seed: int = 0) -> Adam:
    torch.manual_seed(seed)
    return Adam("gpt2").double()


def loader_for(cell: Cell, replicas: int | None = None) -> Any:
    """An epoch; one process takes the batches of as many replicas together."""
    union = (replicas or cell.replicas) if cell.schedule == "plain" else cell.replicas
    batch = ROWS * union if cell.schedule == "plain" else ROWS
    return make_loader(make_rows("gpt2", BATCHES * ROWS * union), batch)


def trainer_for(cell: Cell, **options: Any) -> L.Trainer:
    return make_trainer(cell, **{"precision": "64-true", "gradient_clip_val": CLIP, **options})


def save(cell: Cell, path: str, replicas: int = 1, steps: int = BATCHES) -> None:
    """Trains for some steps and saves during the training."""
    saver = ModelCheckpoint(Path(path).parent, Path(path).stem, every_n_train_steps=steps, save_top_k=-1)
    trainer = trainer_for(cell, max_steps=steps, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(make_module(), loader_for(cell, replicas))


def resume(cell: Cell, path: str, replicas: int = 1, epochs: int = 2) -> tuple[dict[str, Tensor], Any]:
    """Goes on where a checkpoint was saved, with a module that had other weights before."""
    module = make_module(seed=7)
    trainer = trainer_for(cell, max_epochs=epochs)
    trainer.fit(module, loader_for(cell, replicas), ckpt_path=path)
    return snapshot(module), (trainer.global_step, trainer.current_epoch, trainer.optimizers[0].param_groups[0]["lr"])


def load(path: Path) -> dict[str, Any]:
    return dict(torch.load(path, weights_only=True))


def same_changes(after: dict[str, Tensor], expected: dict[str, Tensor], before: dict[str, Tensor]) -> None:
    """Checks the change of each parameter since a checkpoint."""
    for name, value in expected.items():
        change = value - before[name]
        assert (after[name] - value).norm() <= 1e-9 * change.norm(), name
        assert change.norm() > 0


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (PLAIN, CHIMERA),
        (CHIMERA, PLAIN),
        (CHIMERA, INTERLEAVED),
        (REPLICAS, replace(REPLICAS, replicas=1)),
        (INTERLEAVED, REPLICAS),
        (NEIGHBOURS, REPLICAS),
        (V, SEVERAL_STAGES),
        (SEVERAL_STAGES, V),
    ],
    ids=str,
)
def test_a_run_goes_on_in_any_layout(world: World, tmp_path: Path, first: Cell, second: Cell) -> None:
    plain, piped = tmp_path / "plain.ckpt", tmp_path / "piped.ckpt"
    world.run(save, PLAIN, str(plain), first.replicas, size=1)
    world.run(save, first, str(piped), size=first.size)
    ((expected, progress),) = world.run(resume, PLAIN, str(plain), second.replicas, size=1)
    assert progress[:2] == (2 * BATCHES, 2)
    for after, reached in world.run(resume, second, str(piped), size=second.size):
        same_changes(after, expected, load(plain)["state_dict"])
        assert reached == progress


def test_a_run_goes_on_in_the_middle_of_an_epoch(world: World, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    world.run(save, PLAIN, str(path), 1, 2, size=1)
    ((expected, progress),) = world.run(resume, PLAIN, str(path), size=1)
    for after, reached in world.run(resume, CHIMERA, str(path), size=4):
        same_changes(after, expected, load(path)["state_dict"])
        assert reached == progress


def same_files(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Checks that two checkpoints hold the same things in the same order, and nearly the same numbers."""
    assert list(found) == list(expected)
    assert list(found["state_dict"]) == list(expected["state_dict"])
    for mine, theirs in zip(found["optimizer_states"], expected["optimizer_states"], strict=True):
        assert list(mine["state"]) == list(theirs["state"])
        assert mine["param_groups"] == theirs["param_groups"]
    numbers = {"state_dict", "optimizer_states", "lr_schedulers"}
    for name in numbers:
        torch.testing.assert_close(found[name], expected[name], rtol=1e-7, atol=1e-12)
    for name in set(expected) - numbers - {"callbacks"}:  # which hold the paths of files
        assert found[name] == expected[name]


@pytest.mark.parametrize("cell", [CHIMERA, INTERLEAVED, REPLICAS], ids=str)
def test_a_checkpoint_is_the_file_that_one_process_writes(world: World, tmp_path: Path, cell: Cell) -> None:
    plain, piped = tmp_path / "plain.ckpt", tmp_path / "piped.ckpt"
    world.run(save, PLAIN, str(plain), cell.replicas, size=1)
    world.run(save, cell, str(piped), size=cell.size)
    same_files(load(piped), load(plain))
    module = Adam.load_from_checkpoint(piped)
    assert module.model.lm_head.weight is module.model.transformer.wte.weight
    torch.testing.assert_close(dict(module.state_dict()), load(piped)["state_dict"], check_dtype=False)


def save_at_the_end(cell: Cell, folder: str) -> list[str]:
    """Saves in the last step, and again when the training is over; then weights only."""
    saver = ModelCheckpoint(folder, "during", every_n_train_steps=BATCHES)
    trainer = trainer_for(cell, max_epochs=1, callbacks=[saver], enable_checkpointing=True)
    trainer.fit(make_module(), loader_for(cell))
    trainer.save_checkpoint(f"{folder}/after.ckpt")
    trainer.save_checkpoint(f"{folder}/weights.ckpt", weights_only=True)
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.mark.parametrize("cell", [PLAIN, CHIMERA, REPLICAS], ids=str)
def test_a_trainer_saves_after_a_fit_too(world: World, tmp_path: Path, cell: Cell) -> None:
    for names in world.run(save_at_the_end, cell, str(tmp_path), size=cell.size):
        assert names == ["after.ckpt", "during.ckpt", "weights.ckpt"]
    during, after, weights = (load(tmp_path / f"{name}.ckpt") for name in ("during", "after", "weights"))
    for name in ("state_dict", "optimizer_states", "lr_schedulers", "global_step"):
        torch.testing.assert_close(after[name], during[name], rtol=0.0, atol=0.0)
    torch.testing.assert_close(weights["state_dict"], during["state_dict"], rtol=0.0, atol=0.0)
    assert "optimizer_states" not in weights


def fit_again(cell: Cell, replicas: int, other_trainer: bool) -> list[dict[str, Tensor]]:
    """Fits, looks at the module, and goes on."""
    module, loader = make_module(), loader_for(cell, replicas)
    trainer = trainer_for(cell, max_epochs=1)
    trainer.fit(module, loader)
    seen = snapshot(module)
    if other_trainer:
        trainer = trainer_for(cell, max_epochs=2)
    else:
        trainer.fit_loop.max_epochs = 3
    trainer.fit(module, loader)
    return [seen, snapshot(module)]


@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
@pytest.mark.parametrize("other_trainer", [False, True])
def test_a_module_may_be_fitted_again(world: World, cell: Cell, other_trainer: bool) -> None:
    (plain,) = world.run(fit_again, PLAIN, cell.replicas, other_trainer, size=1)
    for seen in world.run(fit_again, cell, cell.replicas, other_trainer, size=cell.size):
        same_changes(seen[0], plain[0], snapshot(make_module()))
        same_changes(seen[1], plain[1], plain[0])


def use_afterwards(cell: Cell, folder: str) -> Any:
    """Fits and then uses the module as people do."""
    module = make_module()
    trainer = trainer_for(cell, max_epochs=1)
    trainer.fit(module, loader_for(cell))
    devices = {value.device.type for value in module.state_dict().values()}
    if trainer.is_global_zero:
        module.model.save_pretrained(folder)
    ids = make_rows("gpt2", 2, padded=False)[0]["input_ids"][None]
    with torch.no_grad():
        logits = module.model(ids).logits
    text = module.model.generate(ids[:, :4], max_new_tokens=3, do_sample=False, pad_token_id=0)
    grads = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}
    return devices, logits, text, grads, module.model.lm_head.weight is module.model.transformer.wte.weight


@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_the_module_is_whole_on_every_rank_after_a_fit(world: World, tmp_path: Path, cell: Cell) -> None:
    ranks = world.run(use_afterwards, cell, str(tmp_path), size=cell.size)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float64)
    ids = make_rows("gpt2", 2, padded=False)[0]["input_ids"][None]
    for devices, logits, text, frozen, is_tied in ranks:
        assert (devices, frozen, is_tied) == ({"cpu"}, set(), True)
        torch.testing.assert_close(logits, saved(ids).logits.detach(), rtol=1e-12, atol=1e-12)
        assert torch.equal(text, ranks[0][2])


def validate_the_best(cell: Cell, folder: str) -> Any:
    module = make_module()
    saver = ModelCheckpoint(folder, monitor="val_loss", mode="max")  # the worst, so that it is not the last
    trainer = trainer_for(cell, max_epochs=3, callbacks=[saver], enable_checkpointing=True)
    rows = make_loader(make_rows("gpt2", 12), ROWS)
    trainer.fit(module, loader_for(cell), rows)
    last = trainer.callback_metrics["val_loss"].item()
    best = trainer.validate(module, rows, ckpt_path="best", verbose=False)[0]["val_loss"]
    predictions = trainer.predict(module, rows, ckpt_path="best")
    return last, best, predictions[0][0, 0]


def test_evaluation_loads_the_best_checkpoint(world: World, tmp_path: Path) -> None:
    (plain,) = world.run(validate_the_best, PLAIN, str(tmp_path / "plain"), size=1)
    assert plain[0] != pytest.approx(plain[1], rel=1e-4)
    for seen in world.run(validate_the_best, CHIMERA, str(tmp_path / "piped"), size=4):
        torch.testing.assert_close(seen, plain, rtol=1e-6, atol=1e-9)


def resume_other(cell: Cell, path: str) -> None:
    torch.manual_seed(0)
    trainer_for(cell, max_epochs=2).fit(Adam("gpt2", blocks=5).double(), loader_for(cell), ckpt_path=path)


def test_a_checkpoint_of_another_model_is_refused_by_its_names(world: World, tmp_path: Path) -> None:
    path = tmp_path / "plain.ckpt"
    world.run(save, PLAIN, str(path), size=1)
    with pytest.raises(RankFailed, match=r"(?s)Missing key.*transformer\.h\.4\.ln_1\.weight"):
        world.run(resume_other, Cell("1f1b", 2), str(path), size=2)


class LeavesOut(LanguageModule):
    """Keeps a frozen table out of checkpoints, halves the rest, and saves numbers of its own."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        del state["model.transformer.wpe.weight"]
        checkpoint["state_dict"] = {name: value.half() for name, value in state.items()}
        checkpoint["numbers"] = sum(value.numel() for value in state.values())
        checkpoint["optimizer_states"][0].pop("state")


def save_what_is_left(cell: Cell, path: str) -> None:
    torch.manual_seed(0)
    trainer = trainer_for(cell, max_steps=2)
    trainer.fit(LeavesOut().double(), loader_for(cell))
    trainer.save_checkpoint(path)


@pytest.mark.contract("The module", "`on_save_checkpoint` takes entries out of the checkpoint, or changes them")
@pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)
def test_a_hook_may_change_what_is_saved(world: World, tmp_path: Path, cell: Cell) -> None:
    plain, piped = tmp_path / "plain.ckpt", tmp_path / "piped.ckpt"
    world.run(save_what_is_left, replace(PLAIN, replicas=cell.replicas), str(plain), size=1)
    world.run(save_what_is_left, cell, str(piped), size=cell.size)
    expected, found = load(plain), load(piped)
    assert found["numbers"] == expected["numbers"] > 0
    assert found["state_dict"].keys() == expected["state_dict"].keys()
    torch.testing.assert_close(found["state_dict"], expected["state_dict"])
