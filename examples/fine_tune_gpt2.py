"""Fine-tunes GPT-2 as HuggingFace's run_clm does: padded rows, warm-up, clipping, bfloat16, accumulation.

Plain Lightning but for the two numbered lines. With no model to start from, a small one learns Python's own reference.

python examples/fine_tune_gpt2.py [FOLDER_OF_A_SAVED_MODEL]
"""

import sys
from pydoc_data.topics import topics

import lightning as L
import torch
from lightning.pytorch.loggers import CSVLogger
from torch.utils.data import DataLoader
from torchmetrics.text import Perplexity
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    GPT2Config,
    GPT2LMHeadModel,
    get_linear_schedule_with_warmup,
)

import lightning_chimera  # noqa: F401  1. registers the strategies
from lightning_chimera.data import TrainedTokenizer

LENGTH = 64


class FineTuning(L.LightningModule):
    def __init__(self, model, lr):
        super().__init__()
        self.model = model
        self.lr = lr
        self.perplexity = Perplexity(ignore_index=-100)

    def training_step(self, batch, batch_idx):
        loss = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.perplexity(output.logits[:, :-1], batch["labels"][:, 1:])
        self.log("val/loss", output.loss)
        self.log("val/perplexity", self.perplexity, prog_bar=True)

    def configure_optimizers(self):
        parameters = [parameter for parameter in self.parameters() if parameter.requires_grad]
        groups = [
            {"params": [parameter for parameter in parameters if parameter.ndim > 1], "weight_decay": 0.1},
            {"params": [parameter for parameter in parameters if parameter.ndim <= 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=self.lr)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def start(folder, paragraphs):
    """The tokenizer, the model and its learning rate: a saved one, or a new and small one."""
    if folder is not None:
        return AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder), 5e-5
    tokenizer = TrainedTokenizer("byte_bpe", vocab_size=2048).build(paragraphs)
    config = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=LENGTH,
        n_embd=64,
        n_layer=4,
        n_head=4,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        resid_pdrop=0.0,  # so short a training needs no dropout, and without it equals that of a plain Trainer
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return tokenizer, GPT2LMHeadModel(config), 3e-3


def main(folder=None):
    L.seed_everything(1)
    paragraphs = [text for topic in topics.values() for text in topic.split("\n\n") if len(text) > 80]
    tokenizer, model, lr = start(folder, paragraphs)
    tokenizer.pad_token = tokenizer.eos_token  # GPT-2 has none
    rows = [tokenizer(text, truncation=True, max_length=LENGTH) for text in paragraphs]
    collate = DataCollatorForLanguageModeling(tokenizer, mlm=False)  # pads, and labels what it pads -100
    module = FineTuning(model, lr)
    trainer = L.Trainer(
        strategy="chimera",  # 2. runs the module as a pipeline
        accelerator="cpu",
        devices=2,
        precision="bf16-mixed",
        max_steps=50,
        accumulate_grad_batches=4,
        gradient_clip_val=1.0,
        val_check_interval=100,  # batches
        log_every_n_steps=1,
        logger=CSVLogger("."),
    )
    trainer.fit(
        module,
        DataLoader(rows[200:], batch_size=8, shuffle=True, collate_fn=collate),
        DataLoader(rows[:200], batch_size=8, collate_fn=collate),
    )
    if trainer.is_global_zero:
        module.model.save_pretrained("fine_tuned")
        tokenizer.save_pretrained("fine_tuned")


if __name__ == "__main__":
    main(*sys.argv[1:])
