"""Every shipped YAML composes, and every target takes the keys that stand beside it."""

import inspect
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from hydra.utils import get_object
from omegaconf import OmegaConf

CONF = Path(str(files("lightning_chimera.conf")))
RECIPES = sorted(path.stem for path in Path(str(files("lightning_chimera.recipes"))).glob("*.yaml"))
OPTIONS = sorted(path.relative_to(CONF) for path in CONF.glob("*/*.yaml"))
# Where a group is placed, if not under its own name.
PLACED = {
    "corpus": "corpus@data.corpus",
    "strategy": "strategy@trainer.strategy",
    "tokenizer": "tokenizer@data.tokenizer",
}
# What only the user knows.
REQUIRED = {
    "corpus/hub_text": ["data.corpus.path=some/data"],
    "corpus/text_folder": ["data.corpus.path=somewhere"],
    "tokenizer/saved": ["data.tokenizer.path=somewhere", "data.tokenizer.vocab_size=100"],
}


def targets(node: Any, key: str = "config") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every dictionary with a `_target_`, with its place."""
    if isinstance(node, dict):
        if "_target_" in node:
            yield key, node
        for name, child in node.items():
            yield from targets(child, f"{key}.{name}")
    elif isinstance(node, list):
        for index, child in enumerate(node):
            yield from targets(child, f"{key}[{index}]")


def check_targets(config: Any) -> int:
    found = list(targets(OmegaConf.to_container(config, resolve=True, throw_on_missing=True)))
    for key, node in found:
        signature = inspect.signature(get_object(node["_target_"]))
        given = {name: value for name, value in node.items() if not name.startswith("_")}
        named = {name for name, parameter in signature.parameters.items() if parameter.kind != parameter.VAR_KEYWORD}
        assert set(given) <= named, f"{key}: {node['_target_']} does not take {sorted(set(given) - named)}"
        # Raises TypeError where a required argument is missing.
        (signature.bind_partial if node.get("_partial_") else signature.bind)(**given)
    return len(found)


def test_there_are_recipes_and_options():
    assert {"gpt2_tiny", "bert_tiny", "gpt2_small", "bert_base", "gpt2_1b", "bert_48"} <= set(RECIPES)
    assert len(OPTIONS) > 20


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_composes_and_its_targets_take_their_keys(recipe, compose_run):
    assert check_targets(compose_run(recipe)) >= 8


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_starts_with_what_it_is(recipe):
    first = files("lightning_chimera.recipes").joinpath(f"{recipe}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert len(first) > 30


# What who starts the processes tells them.
LAUNCHED = {
    "slurm": {"SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "SLURM_PROCID": "0"},
    "torchrun": {"LOCAL_WORLD_SIZE": "2", "GROUP_WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "7", "RANK": "0"},
}


@pytest.mark.parametrize("option", OPTIONS, ids=str)
def test_option_composes_and_its_targets_take_their_keys(option, compose_run, monkeypatch):
    group, name = option.parent.name, option.stem
    if name == "submitit":
        pytest.importorskip("hydra_plugins.hydra_submitit_launcher", reason="the extra `slurm` is not installed")
    for variable, value in LAUNCHED.get(name, {}).items():
        monkeypatch.setenv(variable, value)
    override = f"{PLACED.get(group, group)}={name}"
    assert check_targets(compose_run("train", override, *REQUIRED.get(f"{group}/{name}", ()))) >= 6


@pytest.mark.parametrize("path", [*OPTIONS, Path("train.yaml")], ids=str)
def test_option_says_what_it_is(path):
    lines = (CONF / path).read_text().splitlines()
    assert any(line.startswith("# ") and "@package" not in line for line in lines[:2])


def test_option_names_do_not_clash_in_other_peoples_apps():
    # The groups are on the search path of every Hydra app of the environment.
    assert "default" not in {path.stem for path in OPTIONS}


def test_interpolations_lead_somewhere_in_every_recipe(compose_run):
    for recipe in RECIPES:
        config = compose_run(recipe)
        assert config.model.config.vocab_size == config.data.tokenizer.vocab_size
        assert config.model.scheduler.num_training_steps == config.trainer.max_steps


def test_none_switches_a_group_off(compose_run):
    config = compose_run("train", "scheduler=none", "callbacks=none", "logger=none")
    assert config.scheduler is None
    assert config.model.scheduler is None
    assert config.callbacks == {}
    assert config.logger == {}


def test_loggers_are_any_number_of_options(compose_run):
    assert list(compose_run("gpt2_tiny", "logger=[csv,tensorboard,wandb]").logger) == ["csv", "tensorboard", "wandb"]
    assert list(compose_run("gpt2_tiny", "logger=tensorboard").logger) == ["tensorboard"]


def test_callbacks_are_any_number_of_options(compose_run):
    config = compose_run("gpt2_tiny", "callbacks=[checkpoint,progress_rich]")
    assert set(config.callbacks) == {"checkpoint", "progress_bar"}
