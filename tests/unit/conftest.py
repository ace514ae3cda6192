"""Models without weights, for what only looks at shapes."""

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel


class Module(nn.Module):
    """A user's module around a model, with a parameter of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.scale = nn.Parameter(torch.empty(()))


@pytest.fixture(scope="session")
def gpt2_small() -> nn.Module:
    with torch.device("meta"):
        return Module(GPT2LMHeadModel(GPT2Config()))


@pytest.fixture(scope="session")
def gpt2_small_untied() -> nn.Module:
    with torch.device("meta"):
        return Module(GPT2LMHeadModel(GPT2Config(tie_word_embeddings=False)))


@pytest.fixture(scope="session")
def bert_base() -> nn.Module:
    with torch.device("meta"):
        return Module(BertForMaskedLM(BertConfig()))
