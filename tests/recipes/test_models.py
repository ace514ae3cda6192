"""The models of the recipes have the sizes that their names promise; nothing is allocated."""

import pytest
import torch
from hydra.utils import instantiate
from torch import nn

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.balance import balance, layer_costs
from lightning_chimera.partition.stage import StageRunner
from lightning_chimera.plan import plan_table
from lightning_chimera.runtime.topology import Topology
from lightning_chimera.schedules import get_family

# The numbers of parameters in the Chimera paper.
CHIMERA_GPT2, CHIMERA_BERT_48 = 1_389_327_360, 669_790_012
# What the paper's Bert-48 has besides: a table of its own in the head, and the head for next sentences behind a pooler.
OWN_TABLE = 30_522 * 1024
NEXT_SENTENCE = (1024 * 1024 + 1024) + (1024 * 2 + 2)


def linear(inputs: int, outputs: int) -> int:
    return inputs * outputs + outputs


def norm(width: int) -> int:
    return 2 * width


def gpt2_parameters(config) -> int:
    width = config.n_embd
    attention = linear(width, 3 * width) + linear(width, width)
    mlp = linear(width, 4 * width) + linear(4 * width, width)
    block = norm(width) + attention + norm(width) + mlp
    # Where it is tied, the head is the table of tokens.
    tables = config.vocab_size * (1 if config.tie_word_embeddings else 2) + config.n_positions
    return tables * width + config.n_layer * block + norm(width)


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
        ("gpt2_1b", gpt2_parameters, CHIMERA_GPT2),
        ("bert_tiny", bert_parameters, None),
        ("bert_base", bert_parameters, 109_514_298),
        ("bert_48", bert_parameters, CHIMERA_BERT_48 - OWN_TABLE - NEXT_SENTENCE),
    ],
)
def test_model_has_the_parameters_that_its_config_says(recipe, formula, published, compose_run):
    config = compose_run(recipe)
    with torch.device("meta"):
        module = instantiate(config.model, _convert_="all")
    assert count(module) == formula(module.model.config)
    assert published in (None, count(module))
    assert all(parameter.is_meta for parameter in module.parameters())


@pytest.mark.parametrize("recipe", ["gpt2_tiny", "gpt2_small", "gpt2_1b", "bert_tiny", "bert_base", "bert_48"])
def test_rows_fit_the_table_of_positions(recipe, compose_run):
    config = compose_run(recipe)
    with torch.device("meta"):
        model = instantiate(config.model, _convert_="all").model
    assert config.data.sequence_length <= model.config.max_position_embeddings


@pytest.mark.parametrize("recipe", ["gpt2_small", "gpt2_1b", "bert_base", "bert_48"])
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


@pytest.mark.parametrize(("recipe", "layers", "length", "rows"), [("gpt2_1b", 64, 632, 512), ("bert_48", 48, 128, 256)])
def test_a_recipe_of_the_paper_takes_its_steps(recipe: str, layers: int, length: int, rows: int, compose_run) -> None:
    config = compose_run(recipe)
    with torch.device("meta"):
        model = instantiate(config.model, _convert_="all").model
    assert model.config.num_hidden_layers == layers
    assert config.data.sequence_length == length
    assert config.data.batch_size * config.trainer.accumulate_grad_batches == rows


# The paper measures GPT-2 over 32 ranks and Bert-48 over 4; the recipes are for the 8 devices of one machine.
@pytest.mark.parametrize(
    ("recipe", "num_stages", "busiest"),
    [("gpt2_1b", 8, "25%"), ("gpt2_1b", 32, "8%"), ("bert_48", 4, "51%"), ("bert_48", 8, "26%")],
)
def test_the_plan_of_a_recipe_of_the_paper_holds_each_parameter_twice(
    recipe: str, num_stages: int, busiest: str, compose_run
) -> None:
    with torch.device("meta"):
        module = instantiate(compose_run(recipe).model, _convert_="all")
    anatomy = find_anatomy(module)
    runner = StageRunner(anatomy, balance(layer_costs(module, anatomy), num_stages, paired=True))
    schedule = get_family("chimera").build(num_stages, num_stages)
    table = plan_table(module, runner, Topology.of_world(num_stages, num_stages, 0), schedule)
    columns = {str(column.header): [str(cell) for cell in column.cells] for column in table.columns}
    assert columns["global rank"] == [str(rank) for rank in range(num_stages)]
    assert sum(float(text.removesuffix(" M")) for text in columns["params"]) == pytest.approx(
        2 * count(module) / 1e6, rel=1e-3
    )
    # Of both directions' work, 200 %. Over 32 ranks GPT-2's head alone, with the two blocks it must go with, is 8 %.
    assert max(columns["cost"], key=lambda text: int(text.removesuffix("%"))) == busiest
