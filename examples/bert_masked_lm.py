"""BERT learns to fill in words of Python's own reference. Plain Lightning but for the two numbered lines.

python examples/bert_masked_lm.py
"""

from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForMaskedLM, DataCollatorForLanguageModeling

import lightning_chimera  # noqa: F401  1. registers the strategies
from lightning_chimera.data import TrainedTokenizer


class MaskedLanguageModel(L.LightningModule):
    def __init__(self, vocab_size):
        super().__init__()
        self.model = BertForMaskedLM(
            BertConfig(
                vocab_size=vocab_size, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256
            )
        )

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(**batch).loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(1)
    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 80]
    tokenizer = TrainedTokenizer("wordpiece", vocab_size=2048).build(paragraphs)
    rows = [tokenizer(text, truncation=True, max_length=64) for text in paragraphs]
    collate = DataCollatorForLanguageModeling(tokenizer)  # pads, and masks 15 % of the words
    trainer = L.Trainer(
        strategy="chimera",  # 2. runs the module as a pipeline
        accelerator="cpu",
        devices=2,
        max_steps=60,
        log_every_n_steps=1,
        logger=CSVLogger("."),
    )
    trainer.fit(
        MaskedLanguageModel(len(tokenizer)),
        DataLoader(rows[200:], batch_size=16, shuffle=True, collate_fn=collate),
        DataLoader(rows[:200], batch_size=16, collate_fn=collate),
    )


if __name__ == "__main__":
    main()
