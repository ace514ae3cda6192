"""The models of the recipes have the sizes that their names promise; nothing is allocated."""

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.balance import balance, layer_costs
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.schedules import get_family


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def norm(width: int) -> int:
    return 2 * width


def gpt2_parameters(config) -> int:
    width = config.n_embd
    attention = linear(width, 3 * width) + linear(width, width)
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    block = norm(width) + attention + norm(width) + mlp
    # The head is tied to the table of tokens.
    return (config.vocab_size + config.n_positions) * width + config.n_layer * block + norm(width)


def bert_parameters(config) -> int:
    width = config.hidden_size
    embeddings = (config.vocab_size + config.max_position_embeddings + config.type_vocab_size) * width + norm(width)
    attention = 4 * linear(width, width) + norm(width)
    mlp = linear(width, config.intermediate_size) + linear(config.intermediate_size, width) + norm(width)
    # The decoder is tied to the table of tokens; its bias is its own.
    head = linear(width, width) + norm(width) + config.vocab_size
    return embeddings + config.num_hidden_layers * (attention + mlp) + head


def count(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(
    ("recipe", "formula", "published"),
    [
        ("gpt2_tiny", gpt2_parameters, None),
        ("gpt2_small", gpt2_parameters, 124_439_808),
        ("bert_tiny", bert_parameters, None),
        ("bert_base", bert_parameters, 109_514_298),
    ],
)
def test_model_has_the_parameters_that_its_config_says(recipe, formula, published, compose_run):
    config = compose_run(recipe)
    with torch.device("meta"):
        module = instantiate(config.model, _convert_="all")
    assert count(module) == formula(module.model.config)
    assert published in (None, count(module))
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("recipe", ["gpt2_tiny", "gpt2_small", "bert_tiny", "bert_base"])
def test_rows_fit_the_table_of_positions(recipe, compose_run):
    config = compose_run(recipe)
    with torch.device("meta"):
        model = instantiate(config.model, _convert_="all").model
    assert config.data.sequence_length <= model.config.max_position_embeddings


@pytest.mark.parametrize("recipe", ["gpt2_small", "bert_base"])
@pytest.mark.parametrize(("schedule", "num_stages"), [("chimera", 2), ("chimera", 8), ("1f1b", 4), ("1f1b", 8)])
def test_the_model_of_a_recipe_is_cut_into_even_stages(recipe: str, schedule: str, num_stages: int, compose_run):
    with torch.device("meta"):
        module = instantiate(compose_run(recipe).model, _convert_="all")
    anatomy = find_anatomy(module)
    costs = layer_costs(module, anatomy)
    placement = get_family(schedule).build(num_stages, num_stages).placement
    runner = StageRunner(anatomy, balance(costs, num_stages, paired=placement.num_pipes > 1))
    work = [0] * num_stages
    for layer, cost in enumerate(costs):
        for pipe in placement.ranks:
            work[pipe[runner.stage_of(layer)]] += cost
    # Nothing smaller than a block, or than the head, can be moved.
    assert max(work) - min(work) <= 2 * max(costs)
    assert [runner.blocks_of(stage).stop for stage in range(num_stages)][-1] == anatomy.num_blocks
