"""LightningModules around HuggingFace language models, written as for any plain Trainer: they know of no pipeline."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import lightning as L
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LRScheduler
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedConfig

OptimizerFactory = Callable[..., Optimizer]
SchedulerFactory = Callable[[Optimizer], LRScheduler]


class LanguageModel(L.LightningModule):
    """A HuggingFace model that returns its own loss when it is given labels.

    Args:
        config: Configuration of a new model, as an object or as its dictionary. Not needed with `pretrained`.
        pretrained: A folder made by `save_pretrained`, or a hub name where the hub can be reached, to start from.
        optimizer: Makes the optimizer of a list of parameter groups.
        scheduler: Makes the learning rate scheduler, which is stepped after each optimizer step.

    Raises:
        ValueError: Unless exactly one of `config` and `pretrained` is given.
    """

    auto_model: Any
    """The class that picks the HuggingFace model for a configuration."""

    def __init__(
        self,
        config: PreTrainedConfig | Mapping[str, Any] | None = None,
        pretrained: str | None = None,
        optimizer: OptimizerFactory = AdamW,
        scheduler: SchedulerFactory | None = None,
    ) -> None:
        super().__init__()
        if (config is None) == (pretrained is None):
            raise ValueError(f"Give either config or pretrained, not both or none: {config=}, {pretrained=}.")
        if pretrained is not None:
            self.model = self.auto_model.from_pretrained(pretrained)
        else:
            self.model = self.auto_model.from_config(_as_config(config))
        self.optimizer = optimizer
        self.scheduler = scheduler
        # Plain values only: a checkpoint that holds anything else does not load with weights_only=True.
        self.save_hyperparameters({"config": self.model.config.to_dict()})

    def training_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> Tensor:
        """Returns the loss of a batch.

        Args:
            batch: Arguments of the model, with labels.
            batch_idx: Place of the batch in the epoch.
        """
        loss: Tensor = self.model(**batch).loss
        self.log("train/loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch: Mapping[str, Tensor], batch_idx: int) -> None:
        """Logs the loss of a batch.

        Args:
            batch: Arguments of the model, with labels.
            batch_idx: Place of the batch in the loader.
        """
        self.log("val/loss", self.model(**batch).loss, prog_bar=True, sync_dist=True)

    def configure_optimizers(self) -> Any:
        """Returns the optimizer, with weight decay for matrices only, and its scheduler."""
        optimizer = self.optimizer(list(_decay_groups(self)))
        if self.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": self.scheduler(optimizer), "interval": "step"}}


class CausalLanguageModel(LanguageModel):
    """A model such as GPT-2, which predicts the next token."""

    auto_model = AutoModelForCausalLM


class MaskedLanguageModel(LanguageModel):
    """A model such as BERT, which finds masked tokens."""

    auto_model = AutoModelForMaskedLM


def _as_config(config: Any) -> PreTrainedConfig:
    if isinstance(config, PreTrainedConfig):
        return config
    if "model_type" not in config:
        raise ValueError("A config that is a dictionary needs the key model_type, such as 'gpt2'.")
    loaded: PreTrainedConfig = AutoConfig.for_model(**config)
    return loaded


def _decay_groups(module: nn.Module) -> Iterator[dict[str, Any]]:
    """Splits the parameters: matrices decay as the optimizer says, biases and norms never do."""
    parameters = [parameter for parameter in module.parameters() if parameter.requires_grad]
    yield {"params": [parameter for parameter in parameters if parameter.dim() > 1]}
    yield {"params": [parameter for parameter in parameters if parameter.dim() <= 1], "weight_decay": 0.0}
