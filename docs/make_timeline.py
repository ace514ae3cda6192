"""Makes docs/images/timeline.png: one step of Chimera as the product measured it, beside the simulator's.

A rank's device is emulated: each block sleeps 20 ms in its forward and 40 ms in its backward, so four ranks work at
their own pace on two cores. Everything else is the product as a user runs it.

python docs/make_timeline.py
"""

import time
from pathlib import Path

import lightning as L
import torch
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

from lightning_chimera import ChimeraStrategy
from lightning_chimera.callbacks import PipelineTrace

BLOCKS, MICROBATCHES, LENGTH = 4, 8, 16


class SleepingModel(L.LightningModule):
    def __init__(self):
        super().__init__()
        config = GPT2Config(
            vocab_size=64, n_positions=LENGTH, n_embd=32, n_layer=BLOCKS, n_head=2, bos_token_id=0, eos_token_id=0
        )
        self.model = GPT2LMHeadModel(config)
        for block in self.model.transformer.h:
            block.register_forward_pre_hook(lambda *_: time.sleep(0.02))
            block.register_full_backward_hook(lambda *_: time.sleep(0.04))

    def training_step(self, batch, batch_idx):
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def main():
    torch.set_num_threads(1)
    trainer = L.Trainer(
        strategy=ChimeraStrategy(num_microbatches=MICROBATCHES),
        accelerator="cpu",
        devices=BLOCKS,
        max_steps=4,
        callbacks=[PipelineTrace(dirpath=Path(__file__).parent / "images", at_step=4)],
        logger=False,
        enable_checkpointing=False,
    )
    rows = torch.randint(0, 64, (MICROBATCHES * 4, LENGTH))
    trainer.fit(SleepingModel(), DataLoader(rows, batch_size=MICROBATCHES))


if __name__ == "__main__":
    main()
