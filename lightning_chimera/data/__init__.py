"""Text, tokenizers and data modules for the recipes: nothing here is downloaded unless a hub data set is asked for."""

from lightning_chimera.data.corpus import Corpus, HubText, PythonDocs, TextFolder, Texts
from lightning_chimera.data.datamodule import CausalLMDataModule, LanguageModelingDataModule, MaskedLMDataModule
from lightning_chimera.data.tokenizer import SavedTokenizer, TokenizerSource, TrainedTokenizer

__all__ = [
    "CausalLMDataModule",
    "Corpus",
    "HubText",
    "LanguageModelingDataModule",
    "MaskedLMDataModule",
    "PythonDocs",
    "SavedTokenizer",
    "TextFolder",
    "Texts",
    "TokenizerSource",
    "TrainedTokenizer",
]
