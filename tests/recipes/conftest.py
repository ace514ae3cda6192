"""Composes configs as `lightning-chimera-train` does."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hydra import compose, initialize_config_module
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, open_dict

from hydra_plugins.lightning_chimera import LightningChimeraSearchPathPlugin

Compose = Callable[..., DictConfig]


@pytest.fixture
def compose_run(tmp_path: Path) -> Iterator[Compose]:
    """A function from the name of a primary config and overrides to the config; the run's folder is the test's."""
    Plugins.instance().register(LightningChimeraSearchPathPlugin)

    def compose_run(name: str, *overrides: str) -> DictConfig:
        with initialize_config_module("lightning_chimera.conf", version_base="1.3"):
            config = compose(
                name,
                [f"hydra.runtime.output_dir={tmp_path}", f"paths.cache_dir={tmp_path}/cache", *overrides],
                return_hydra_config=True,
            )
        HydraConfig.instance().set_config(config)
        with open_dict(config):
            del config.hydra
        return config

    yield compose_run
    HydraConfig.instance().cfg = None
    GlobalHydra.instance().clear()
