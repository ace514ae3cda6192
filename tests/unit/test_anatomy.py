import pytest
import torch
from torch import nn
from transformers import (
    AlbertConfig,
    AlbertModel,
    BertConfig,
    BertLMHeadModel,
    BertModel,
    EncoderDecoderModel,
    GPT2Config,
    GPT2LMHeadModel,
    OPTConfig,
    OPTForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

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


@pytest.mark.contract("Models", "a module without a HuggingFace model of a known family", "refused")
def test_a_module_without_a_model_that_can_be_cut_is_refused_with_the_known_ones() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": AlbertModel(AlbertConfig(num_hidden_layers=1))})
    with pytest.raises(ValueError, match=r"HuggingFace models AlbertModel, none of which can be cut.*BertModel.*GPT2"):
        find_anatomy(module)
    with pytest.raises(ValueError, match="holds no HuggingFace model"):
        find_anatomy(nn.Linear(1, 1))


@pytest.mark.contract("Models", "layerdrop", "refused")
def test_blocks_left_out_at_random_are_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": OPTForCausalLM(OPTConfig(num_hidden_layers=1, layerdrop=0.1))})
    with pytest.raises(ValueError, match=r"leaves out blocks at random \(layerdrop=0.1\).*Set layerdrop=0.0"):
        find_anatomy(module)


def two_models(frozen: str = "") -> nn.ModuleDict:
    with torch.device("meta"):
        module = nn.ModuleDict({name: GPT2LMHeadModel(GPT2Config(n_layer=1)) for name in ("student", "teacher")})
    if frozen:
        module[frozen].requires_grad_(False)
    return module


@pytest.mark.contract("Models", "two HuggingFace models that both train in one module", "refused")
def test_two_models_that_train_are_refused_by_their_names() -> None:
    names = r"2 models.*'student.transformer' \(GPT2Model\), 'teacher.transformer' \(GPT2Model\)"
    with pytest.raises(ValueError, match=names + r", of which 2 train.*trains exactly one.*requires_grad_\(False\)"):
        find_anatomy(two_models())
    frozen = two_models().requires_grad_(False)
    with pytest.raises(ValueError, match=names + ", of which 0 train"):
        find_anatomy(frozen)


@pytest.mark.parametrize(("frozen", "cut"), [("teacher", "student"), ("student", "teacher")])
def test_a_frozen_model_beside_one_that_trains_is_nobodys(frozen: str, cut: str) -> None:
    anatomy = find_anatomy(two_models(frozen))
    assert (anatomy.base_name, anatomy.top_name) == (f"{cut}.transformer", cut)
    assert anatomy.layer_of(f"{frozen}.transformer.h.0.ln_1.weight") is None


@pytest.mark.contract("Models", "encoder-decoders, and other models with two lists of blocks", "refused")
def test_an_encoder_decoder_is_refused() -> None:
    with torch.device("meta"):
        t5 = T5ForConditionalGeneration(T5Config(num_layers=1, num_decoder_layers=1))
        pair = EncoderDecoderModel(
            encoder=BertModel(BertConfig(num_hidden_layers=1)),
            decoder=BertLMHeadModel(BertConfig(num_hidden_layers=1, is_decoder=True, add_cross_attention=True)),
        )
    with pytest.raises(
        ValueError, match=r"encoder-decoder, 'model' \(T5.*two lists of blocks.*an encoder or a decoder"
    ):
        find_anatomy(nn.ModuleDict({"model": t5}))
    for frozen in (False, True):
        pair.encoder.requires_grad_(not frozen)
        with pytest.raises(
            ValueError, match=r"one model with 2 lists of blocks: 'model.encoder' .*encoder or a decoder"
        ):
            find_anatomy(nn.ModuleDict({"model": pair}))


@pytest.mark.contract("Models", "a model or a LightningModule compiled by `torch.compile`", "refused")
@pytest.mark.parametrize("how", ["around", "in place", "base", "the whole module"])
def test_a_compiled_model_is_refused(how: str) -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": GPT2LMHeadModel(GPT2Config(n_layer=1))})
    if how == "around":
        module["model"] = torch.compile(module["model"])
    elif how == "in place":
        module["model"].compile()
    elif how == "base":
        module["model"].transformer.compile()
    else:
        module.compile()
    with pytest.raises(ValueError, match=r"is compiled as a whole.*can't be parted.*Leave out torch.compile\(\)"):
        find_anatomy(module)


@pytest.mark.contract("Models", "scripted and traced models", "refused")
def test_a_scripted_model_is_refused() -> None:
    with pytest.raises(ValueError, match=r"scripted or traced module, whose forward can't be cut.*Use the HuggingFace"):
        find_anatomy(nn.ModuleDict({"model": torch.jit.script(nn.Linear(2, 2))}))


@pytest.mark.contract("Models", "quantized models", "refused")
def test_a_quantized_model_is_refused() -> None:
    with torch.device("meta"):
        module = nn.ModuleDict({"model": GPT2LMHeadModel(GPT2Config(n_layer=1))})
    weight = torch.zeros(3, dtype=torch.uint8, device="meta")
    module["model"].transformer.h[0].mlp.c_fc.weight = nn.Parameter(weight, requires_grad=False)
    named = r"GPT2LMHeadModel is quantized \(transformer.h.0.mlp.c_fc.weight\).*floating point only.*Load it without"
    with pytest.raises(ValueError, match=named):
        find_anatomy(module)


def test_a_causal_loss_does_not_count_the_first_position_and_no_loss_counts_ignored_labels() -> None:
    labels = torch.tensor([[1, 2, -100, 3], [-100, 4, -100, -100]])
    assert LabelCount(shift=1)({"labels": labels}) == 3
    assert LabelCount()({"labels": labels}) == 4
    assert LabelCount("mc_labels")({"labels": labels}) is None
