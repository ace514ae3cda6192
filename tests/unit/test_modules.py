"""The LightningModules of the recipes: built offline, saved as plain values, no weight decay on biases and norms."""

from functools import partial

import lightning as L
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BertConfig, GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

from lightning_chimera.data.datamodule import TokenRows
from lightning_chimera.modules import CausalLanguageModel, MaskedLanguageModel

GPT2 = {"n_layer": 2, "n_embd": 8, "n_head": 2, "n_positions": 8, "vocab_size": 20}
GPT2_CONFIG = GPT2Config(**GPT2, bos_token_id=0, eos_token_id=0)
BERT_CONFIG = BertConfig(
    num_hidden_layers=2,
    hidden_size=8,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=8,
    vocab_size=20,
)


def loader():
    ids = torch.arange(32).view(4, 8) % 20
    return DataLoader(TokenRows({"input_ids": ids, "labels": ids}), batch_size=2)


def trainer(tmp_path, **kwargs):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return L.Trainer(accelerator="cpu", devices=1, default_root_dir=tmp_path, **{**quiet, **kwargs})


@pytest.mark.parametrize(
    ("module", "config"), [(CausalLanguageModel, GPT2_CONFIG), (MaskedLanguageModel, BERT_CONFIG)], ids=["gpt2", "bert"]
)
def test_module_trains_in_a_plain_trainer_and_logs_both_losses(module, config, tmp_path):
    fit = trainer(tmp_path, max_epochs=1, enable_checkpointing=False)
    fit.fit(module(config), loader(), loader())
    assert {"train/loss", "val/loss"} <= set(fit.callback_metrics)


def test_biases_and_norms_do_not_decay():
    module = CausalLanguageModel(GPT2_CONFIG, optimizer=partial(torch.optim.AdamW, weight_decay=0.1))
    decayed, plain = module.configure_optimizers().param_groups
    assert (decayed["weight_decay"], plain["weight_decay"]) == (0.1, 0.0)
    assert all(parameter.dim() > 1 for parameter in decayed["params"])
    assert all(parameter.dim() == 1 for parameter in plain["params"])
    assert len(decayed["params"]) + len(plain["params"]) == len(list(module.parameters()))


def test_the_scheduler_is_stepped_after_each_step(tmp_path):
    module = CausalLanguageModel(
        GPT2_CONFIG,
        optimizer=partial(torch.optim.SGD, lr=1.0),
        scheduler=partial(get_linear_schedule_with_warmup, num_warmup_steps=0, num_training_steps=4),
    )
    trainer(tmp_path, max_steps=2, enable_checkpointing=False).fit(module, loader())
    assert module.lr_schedulers().get_last_lr() == [0.5, 0.5]


def test_a_checkpoint_loads_without_its_config_and_with_plain_values_only(tmp_path):
    module = CausalLanguageModel(GPT2_CONFIG, optimizer=partial(torch.optim.SGD, lr=1.0))
    fit = trainer(tmp_path, max_steps=1)
    fit.fit(module, loader())
    path = fit.checkpoint_callback.best_model_path
    assert torch.load(path, weights_only=True)["hyper_parameters"]["config"]["n_layer"] == 2
    loaded = CausalLanguageModel.load_from_checkpoint(path)
    assert isinstance(loaded.model, GPT2LMHeadModel)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), loaded.parameters(), strict=True))


def test_a_config_may_be_a_dictionary():
    module = CausalLanguageModel({"model_type": "gpt2", **GPT2})
    assert module.model.config.n_embd == 8


def test_a_dictionary_without_a_model_type_is_refused():
    with pytest.raises(ValueError, match="needs the key model_type, such as 'gpt2'"):
        CausalLanguageModel(GPT2)


def test_a_module_can_start_from_a_saved_model(tmp_path):
    saved = GPT2LMHeadModel(GPT2_CONFIG)
    saved.save_pretrained(tmp_path)
    module = CausalLanguageModel(pretrained=str(tmp_path))
    assert torch.equal(module.model.transformer.wte.weight, saved.transformer.wte.weight)


@pytest.mark.parametrize("arguments", [{}, {"config": GPT2_CONFIG, "pretrained": "somewhere"}], ids=["none", "both"])
def test_exactly_one_origin_is_needed(arguments):
    with pytest.raises(ValueError, match="Give either config or pretrained, not both or none"):
        CausalLanguageModel(**arguments)
