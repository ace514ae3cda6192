"""The Trainer's clipping of gradients, where each rank holds those of its own stages only."""

import torch
from lightning.pytorch.plugins.precision import Precision
from torch.optim import Optimizer

from lightning_chimera.engine import Engine


def route_clipping(plugin: Precision, engine: Engine) -> None:
    """Has a precision plugin clip through the engine until that is released.

    Args:
        plugin: The Trainer's.
        engine: The stages on this rank.
    """

    def clip_grad_by_norm(optimizer: Optimizer, clip_val: float) -> None:
        engine.clip_gradients(plugin.main_params(optimizer), clip_val)

    def clip_grad_by_value(optimizer: Optimizer, clip_val: float) -> None:
        held = [part for part in plugin.main_params(optimizer) if not part.is_meta]
        if any(parameter.grad is not None for parameter in held):  # torch's function fails where there is none
            torch.nn.utils.clip_grad_value_(held, clip_val)

    # On the instance: the plugin's class name is the key of its state in checkpoints.
    engine.shadow(plugin, clip_grad_by_norm=clip_grad_by_norm, clip_grad_by_value=clip_grad_by_value)
