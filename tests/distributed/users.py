"""What a user has: rows, loaders and LightningModules around HuggingFace models, written for a plain Trainer."""

from collections.abc import Sequence
from typing import Any

import lightning as L
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

VOCABULARY, LENGTH, WIDTH, BLOCKS = 101, 16, 32, 4
ROWS = 8
"""Rows of a batch."""

Row = dict[str, Tensor]


def make_rows(kind: str, count: int, *, padded: bool = True, length: int = LENGTH, seed: int = 0) -> list[Row]:
    """Rows for a causal (gpt2) or a masked (bert) language model; the padded ones are of uneven lengths.

    Every ninth row is so short that a causal model has nothing to predict in it, or has no masked token.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for number in range(count):
        ids = torch.randint(3, VOCABULARY, (length,), generator=generator)
        real = int(torch.randint(2, length + 1, (), generator=generator)) if padded else length
        if padded and number % 9 == 4:
            real = 1
        mask = (torch.arange(length) < real).long()
        labels = ids.clone()
        if kind == "bert":
            hidden = torch.rand(length, generator=generator) < 0.3
            hidden[0] = not padded
            labels[~hidden] = -100
            ids = torch.where(hidden, 1, ids)
        labels[mask == 0] = -100
        ids = torch.where(mask == 1, ids, 0)
        rows.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return rows


def causal_loss(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    """HuggingFace's loss of causal models, in the logits' own precision: theirs is computed in single."""
    return nn.functional.cross_entropy(logits[:, :-1].reshape(-1, vocab_size), labels[:, 1:].reshape(-1))


def make_model(
    kind: str,
    *,
    exact: bool = True,
    tied: bool = True,
    attention: str = "sdpa",
    dropout: float = 0.0,
    blocks: int = BLOCKS,
) -> PreTrainedModel:
    """A small GPT-2 or BERT with a language model head.

    Args:
        kind: ``gpt2`` or ``bert``.
        exact: Whether the loss is computed as precisely as all else, which HuggingFace's of GPT-2 is not.
        tied: Whether the embeddings are the head's weights.
        attention: HuggingFace's name of the implementation.
        dropout: Probability of every dropout.
        blocks: Number of blocks.
    """
    common: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "tie_word_embeddings": tied,
        "attn_implementation": attention,
    }
    if kind == "gpt2":
        model = GPT2LMHeadModel(
            GPT2Config(
                n_positions=32,
                n_embd=WIDTH,
                n_layer=blocks,
                n_head=2,
                resid_pdrop=dropout,
                embd_pdrop=dropout,
                attn_pdrop=dropout,
                bos_token_id=1,
                eos_token_id=2,
                **common,
            )
        )
        if exact:
            model.loss_function = causal_loss
        return model
    return BertForMaskedLM(
        BertConfig(
            hidden_size=WIDTH,
            num_hidden_layers=blocks,
            num_attention_heads=2,
            intermediate_size=64,
            max_position_embeddings=32,
            hidden_dropout_prob=dropout,
            attention_probs_dropout_prob=dropout,
            **common,
        )
    )


class LanguageModule(L.LightningModule):
    """The module most people write.

    Args:
        kind: ``gpt2`` or ``bert``.
        lr: Learning rate.
        **model: As :func:`make_model`.
    """

    def __init__(self, kind: str = "gpt2", lr: float = 1.0, **model: Any) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.model = make_model(kind, **model)
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log("train_loss", output.loss)
        return output.loss

    def validation_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("val_loss", self.model(**batch).loss)

    def test_step(self, batch: Any, batch_idx: int) -> Any:
        self.log("test_loss", self.model(**batch).loss)

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.model(**batch).logits

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def make_loader(rows: Sequence[Any], batch_size: int = ROWS, **options: Any) -> DataLoader:
    """A loader that keeps the rows' order."""
    return DataLoader(list(rows), batch_size=batch_size, **options)
