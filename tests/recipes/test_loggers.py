"""Loggers are chosen by config; one whose package is missing is refused with the extra that brings it."""

import sys
import tomllib
from pathlib import Path

import lightning.pytorch.loggers.wandb
import pytest
from hydra.errors import CompactHydraException, InstantiationException
from lightning_utilities.core.imports import RequirementCache
from omegaconf import OmegaConf

from lightning_chimera.train import _LOGGER_EXTRAS, run

MISSING = RequirementCache("a-package-that-nobody-has")


@pytest.mark.contract("Loggers and profilers", "Weights & Biases by config where it is not installed", "refused")
def test_a_missing_wandb_is_refused_with_its_extra_before_anything_is_built(compose_run, monkeypatch) -> None:
    monkeypatch.setattr(lightning.pytorch.loggers.wandb, "_WANDB_AVAILABLE", MISSING)
    config = compose_run("gpt2_tiny", "logger=[csv,wandb]")
    with pytest.raises(CompactHydraException) as caught:
        run(config)
    assert str(caught.value) == (
        "The logger 'wandb' needs a package that is not installed. Install it with pip install"
        " 'lightning-chimera[wandb]', or choose another logger, such as logger=csv."
    )


def test_every_named_extra_exists() -> None:
    extras = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert set(_LOGGER_EXTRAS) <= set(extras)


def test_a_logger_that_fails_otherwise_keeps_its_message(compose_run) -> None:
    config = compose_run("gpt2_tiny")
    config.logger = {"wandb": {"_target_": "builtins.int", "_args_": ["seven"]}}
    with pytest.raises(InstantiationException, match="seven"):
        run(config)


def test_a_missing_package_of_a_users_own_logger_keeps_its_message(compose_run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "own_logger.py").write_text("def build(): raise ModuleNotFoundError('no module named other')")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    config = compose_run("gpt2_tiny")
    config.logger = OmegaConf.create({"own": {"_target_": "own_logger.build"}})
    with pytest.raises(InstantiationException, match="no module named other"):
        run(config)


def test_wandb_gets_the_folder_of_the_run_and_may_work_offline(compose_run, tmp_path: Path) -> None:
    logger = compose_run("gpt2_tiny", "logger=wandb", "logger.wandb.offline=true").logger.wandb
    assert logger.save_dir == str(tmp_path)
    assert logger.offline is True
