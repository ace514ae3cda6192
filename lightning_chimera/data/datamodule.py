"""Data modules for causal and for masked language modelling: rows of equal length, made once, in memory."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import DataCollatorForLanguageModeling, PreTrainedTokenizerBase

from lightning_chimera.data.corpus import Corpus
from lightning_chimera.data.tokenizer import TokenizerSource

# Validation rows are masked once, with this seed, so that the losses of a run, and of two runs, can be compared.
_VALIDATION_MASK_SEED = 0


class TokenRows(Dataset[dict[str, Tensor]]):
    """A data set of tensors by name; item i holds row i of each.

    Args:
        columns: Tensors of equal length.
    """

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


class LanguageModelingDataModule(L.LightningDataModule, ABC):
    """What both kinds of language modelling share: the corpus, its tokenizer, and the loaders.

    Training batches all have `batch_size` rows; the last validation batch may have fewer.

    Args:
        corpus: Where the text comes from.
        tokenizer: Where the tokenizer comes from.
        sequence_length: Tokens in a row.
        batch_size: Rows in a batch.
        num_workers: Processes that load ahead of the training; 0 loads in the training process.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: TokenizerSource,
        *,
        sequence_length: int,
        batch_size: int,
        num_workers: int = 0,
    ) -> None:
        super().__init__()
        for name, value in (("sequence_length", sequence_length), ("batch_size", batch_size)):
            if value < 1:
                raise ValueError(f"{name}={value} must be 1 or more.")
        self.corpus = corpus
        self.tokenizer_source = tokenizer
        self.sequence_length = sequence_length
        self.batch_size = batch_size
        self.num_workers = num_workers
        self.tokenizer: PreTrainedTokenizerBase | None = None
        self.train_rows: TokenRows | None = None
        self.validation_rows: TokenRows | None = None

    def prepare_data(self) -> None:
        """Fetches the text and trains the tokenizer, in one process of each machine, so that `setup` finds both."""
        self.tokenizer_source.build(self.corpus.load().train)

    def setup(self, stage: str) -> None:
        """Makes the rows, in every process.

        Args:
            stage: Which loop asks; all of them use the same rows.

        Raises:
            ValueError: If the corpus is smaller than a training batch, or than a validation row.
        """
        if self.train_rows is not None:
            return
        texts = self.corpus.load()
        self.tokenizer = self.tokenizer_source.build(texts.train)
        train = self.make_train_rows(self.tokenizer, texts.train)
        validation = self.make_validation_rows(self.tokenizer, texts.validation)
        for name, rows, needed in (("training", train, self.batch_size), ("validation", validation, 1)):
            if len(rows) < needed:
                raise ValueError(
                    f"The corpus gives {len(rows)} {name} rows of {self.sequence_length} tokens, but {needed} are"
                    " needed. Use more text, or lower sequence_length or batch_size."
                )
        self.train_rows, self.validation_rows = train, validation

    @abstractmethod
    def make_train_rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenRows:
        """Turns texts into training rows.

        Args:
            tokenizer: The tokenizer.
            texts: The documents.
        """

    def make_validation_rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenRows:
        """Turns texts into validation rows, which are the same ones in each epoch.

        Args:
            tokenizer: The tokenizer.
            texts: The documents.
        """
        return self.make_train_rows(tokenizer, texts)

    def train_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Returns shuffled batches."""
        assert self.train_rows is not None, "setup comes before the loaders"
        return self._loader(self.train_rows, shuffle=True, drop_last=True, collate_fn=self.train_collate())

    def val_dataloader(self) -> DataLoader[dict[str, Tensor]]:
        """Returns the validation rows in their order."""
        assert self.validation_rows is not None, "setup comes before the loaders"
        return self._loader(self.validation_rows)

    def train_collate(self) -> Callable[[list[Any]], Any] | None:
        """Returns what makes a batch of training rows; None stacks them."""
        return None

    def _loader(self, rows: TokenRows, **kwargs: Any) -> DataLoader[dict[str, Tensor]]:
        return DataLoader(
            rows,
            batch_size=self.batch_size,
            num_workers=self.num_workers,
            persistent_workers=self.num_workers > 0,
            **kwargs,
        )


class CausalLMDataModule(LanguageModelingDataModule):
    """Contiguous blocks of text; the labels are the inputs, which the model shifts by itself.

    Documents follow one another, each with an end-of-text token behind it; what does not fill the last block is left
    out. Batches hold `input_ids` and `labels`.
    """

    def make_train_rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenRows:
        """Cuts the texts into blocks of `sequence_length` tokens.

        Args:
            tokenizer: A tokenizer with an end-of-text token.
            texts: The documents.

        Returns:
            The blocks, as `input_ids` and `labels`.

        Raises:
            ValueError: If the tokenizer has no end-of-text token.
        """
        end = tokenizer.eos_token_id
        if end is None:
            raise ValueError(
                "The tokenizer has no eos_token, which separates documents. Use one made for causal models."
            )
        tokens = [token for text in texts for token in (*tokenizer(text)["input_ids"], end)]
        num_rows = len(tokens) // self.sequence_length
        blocks = torch.tensor(tokens[: num_rows * self.sequence_length]).view(num_rows, self.sequence_length)
        return TokenRows({"input_ids": blocks, "labels": blocks})


class MaskedLMDataModule(LanguageModelingDataModule):
    """Pieces of documents between `[CLS]` and `[SEP]`, padded to `sequence_length`, with some tokens masked.

    Training rows are masked anew each time they are drawn; validation rows are masked once. Batches hold `input_ids`,
    `attention_mask` and `labels`.

    Args:
        corpus: Where the text comes from.
        tokenizer: Where the tokenizer comes from.
        sequence_length: Tokens in a row.
        batch_size: Rows in a batch.
        mlm_probability: Share of the tokens that the model has to find.
        num_workers: Processes that load ahead of the training; 0 loads in the training process.

    Raises:
        ValueError: If a number is out of range.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: TokenizerSource,
        *,
        sequence_length: int,
        batch_size: int,
        mlm_probability: float = 0.15,
        num_workers: int = 0,
    ) -> None:
        super().__init__(
            corpus, tokenizer, sequence_length=sequence_length, batch_size=batch_size, num_workers=num_workers
        )
        if not 0 < mlm_probability < 1:
            raise ValueError(f"mlm_probability={mlm_probability} must lie between 0 and 1. BERT used 0.15.")
        self.mlm_probability = mlm_probability

    def make_train_rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenRows:
        """Cuts each text into pieces and pads the last one.

        Args:
            tokenizer: A tokenizer with a padding and a mask token.
            texts: The documents.

        Returns:
            The pieces, not masked yet, as `input_ids`, `attention_mask` and `special_tokens_mask`.
        """
        encoded = tokenizer(
            list(texts),
            truncation=True,
            max_length=self.sequence_length,
            return_overflowing_tokens=True,
            padding="max_length",
            return_special_tokens_mask=True,
            return_tensors="pt",
        )
        return TokenRows({name: encoded[name] for name in ("input_ids", "attention_mask", "special_tokens_mask")})

    def make_validation_rows(self, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> TokenRows:
        """Cuts the texts into pieces and masks them, always in the same places.

        Args:
            tokenizer: A tokenizer with a padding and a mask token.
            texts: The documents.

        Returns:
            The pieces, as `input_ids`, `attention_mask` and `labels`.
        """
        rows = self.make_train_rows(tokenizer, texts)
        mask = DataCollatorForLanguageModeling(tokenizer, mlm_probability=self.mlm_probability)
        with torch.random.fork_rng(devices=()):
            torch.manual_seed(_VALIDATION_MASK_SEED)
            return TokenRows(mask([rows[index] for index in range(len(rows))]))

    def train_collate(self) -> Callable[[list[Any]], Any]:
        """Returns HuggingFace's collator, which masks a batch."""
        assert self.tokenizer is not None, "setup comes before the loaders"
        return DataCollatorForLanguageModeling(self.tokenizer, mlm_probability=self.mlm_probability)
