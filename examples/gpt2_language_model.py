"""GPT-2 learns Python's own reference, byte by byte. Plain Lightning but for the two numbered lines.

python examples/gpt2_language_model.py
"""

from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

import lightning_chimera  # noqa: F401  1. registers the strategies

LENGTH = 128


class LanguageModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=256, n_positions=LENGTH, n_embd=64, n_layer=4, n_head=4, bos_token_id=0, eos_token_id=0
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch, batch_idx):
        loss = self.model(input_ids=batch, labels=batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val/loss", self.model(input_ids=batch, labels=batch).loss, prog_bar=True)

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def main():
    L.seed_everything(1)
    text = torch.tensor(bytearray("".join(topics.values()), "utf-8"), dtype=torch.long)
    rows = text[: len(text) // LENGTH * LENGTH].view(-1, LENGTH)
    trainer = L.Trainer(
        strategy="chimera",  # 2. runs the module as a pipeline
        accelerator="cpu",
        devices=2,
        max_steps=60,
        log_every_n_steps=1,
        logger=CSVLogger("."),
    )
    trainer.fit(
        LanguageModel(), DataLoader(rows[200:], batch_size=16, shuffle=True), DataLoader(rows[:200], batch_size=16)
    )


if __name__ == "__main__":
    main()
