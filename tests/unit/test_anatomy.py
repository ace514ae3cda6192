import pytest
import torch
from torch import nn
from transformers import AlbertConfig, AlbertModel, GPT2Config, GPT2Model, OPTConfig, OPTForCausalLM

from lightning_chimera.partition.anatomy import find_anatomy
from lightning_chimera.partition.heads import LabelCount


def test_the_parts_of_gpt2_are_layers_in_order(gpt2_small) -> None:
    anatomy = find_anatomy(gpt2_small)
    assert (anatomy.base_name, anatomy.top_name, anatomy.num_blocks) == ("model.transformer", "model", 12)
    layers = {
        "model.transformer.wte.weight": 0,
        "model.transformer.wpe.weight": 0,
        "model.transformer.h.0.ln_1.weight": 1,
        "model.transformer.h.11.mlp.c_proj.bias": 12,
        "model.transformer.ln_f.weight": 13,
        "model.lm_head.weight": 13,
        "scale": None,
    }
    assert {name: anatomy.layer_of(name) for name in layers} == layers


def test_the_parts_of_bert_are_layers_in_order(bert_base) -> None:
    anatomy = find_anatomy(bert_base)
    assert (anatomy.base_name, anatomy.top_name, anatomy.num_blocks) == ("model.bert", "model", 12)
    layers = {
        "model.bert.embeddings.LayerNorm.weight": 0,
        "model.bert.encoder.layer.3.attention.self.query.weight": 4,
        "model.cls.predictions.decoder.weight": 13,
    }
    assert {name: anatomy.layer_of(name) for name in layers} == layers


def test_every_parameter_of_a_model_belongs_to_a_layer(gpt2_small, bert_base) -> None:
    for module in (gpt2_small, bert_base):
        anatomy = find_anatomy(module)
        found = {anatomy.layer_of(name) for name, _ in module.named_parameters(remove_duplicate=False)}
        assert found == {None, *range(anatomy.num_layers)}


def test_a_module_without_a_model_that_can_be_cut_is_refused_with_the_known_ones() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": AlbertModel(AlbertConfig(num_hidden_layers=1))})
    with pytest.raises(ValueError, match=r"HuggingFace models AlbertModel, none of which can be cut.*BertModel.*GPT2"):
        find_anatomy(module)
    with pytest.raises(ValueError, match="holds no HuggingFace model"):
        find_anatomy(nn.Linear(1, 1))


def test_blocks_left_out_at_random_are_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": OPTForCausalLM(OPTConfig(num_hidden_layers=1, layerdrop=0.1))})
    with pytest.raises(ValueError, match=r"leaves out blocks at random \(layerdrop=0.1\).*Set layerdrop=0.0"):
        find_anatomy(module)


def test_two_models_are_refused_by_their_names() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({name: GPT2Model(GPT2Config(n_layer=1)) for name in ("student", "teacher")})
    with pytest.raises(ValueError, match=r"2 models.*'student' \(GPT2Model\), 'teacher' \(GPT2Model\)"):
        find_anatomy(module)


def test_a_causal_loss_does_not_count_the_first_position_and_no_loss_counts_ignored_labels() -> None:
    labels = torch.tensor([[1, 2, -100, 3], [-100, 4, -100, -100]])
    assert LabelCount(shift=1)({"labels": labels}) == 3
    assert LabelCount()({"labels": labels}) == 4
    assert LabelCount("mc_labels")({"labels": labels}) is None
