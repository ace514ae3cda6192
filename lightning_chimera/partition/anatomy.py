"""What a HuggingFace model is made of, as a pipeline sees it.

A model is cut along one list of blocks. What runs before the list (embeddings) is the prologue and belongs to the first
stage; what runs after it (final norm, pooler, heads) is the epilogue and belongs to the last. In between they are
numbered as *layers*: 0 is the prologue, 1 .. num_blocks are the blocks, num_blocks + 1 is the epilogue.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_chimera.partition.heads import HeadLoss, head_loss_of


@dataclass(frozen=True)
class Family:
    """How one HuggingFace architecture is cut: one entry a family, under the class name of its base model.

    Attributes:
        blocks: Path from the base model to the list of blocks.
        prologue: Paths from the base model to the modules that run before the blocks and hold parameters or draw random
            numbers: embeddings, their norms, projections and dropouts. On later stages, where their parameters are
            missing, each gives zeros of the hidden states' shape, thrown away where the first own block is entered.
    """

    blocks: str
    prologue: tuple[str, ...]


_BERT = Family("encoder.layer", prologue=("embeddings",))
_LLAMA = Family("layers", prologue=("embed_tokens",))

FAMILIES: dict[str, Family] = {
    "GPT2Model": Family("h", prologue=("wte", "wpe", "drop")),
    "BertModel": _BERT,
    "RobertaModel": _BERT,
    "DistilBertModel": Family("transformer.layer", prologue=("embeddings",)),
    "OPTDecoder": Family("layers", prologue=("embed_tokens", "embed_positions", "project_in")),
    "GPTNeoXModel": Family("layers", prologue=("embed_in", "emb_dropout")),
    "LlamaModel": _LLAMA,
    "Qwen2Model": _LLAMA,
}


def register_family(base_model: str, family: Family) -> None:
    """Makes models of another architecture known.

    Args:
        base_model: Class name of its base model, the one whose ``forward`` walks through the blocks.
        family: How it is cut.
    """
    FAMILIES[base_model] = family


@dataclass(frozen=True)
class Anatomy:
    """Where the parts of the one HuggingFace model inside a user's module are.

    Attributes:
        base: The base model, whose ``forward`` walks through the blocks.
        base_name: Its path in the user's module.
        top: The outermost HuggingFace model around it (the base itself where there is no head).
        top_name: Its path in the user's module.
        family: How it is cut.
        num_blocks: Length of its list of blocks.
    """

    base: PreTrainedModel
    base_name: str
    top: PreTrainedModel
    top_name: str
    family: Family
    num_blocks: int

    @property
    def num_layers(self) -> int:
        """Blocks, prologue and epilogue."""
        return self.num_blocks + 2

    @property
    def hidden_size(self) -> int:
        """Width of the tensor that crosses a stage boundary."""
        return int(self.base.config.hidden_size)

    @property
    def dtype(self) -> torch.dtype:
        """Data type of the tensor that crosses a stage boundary: the residual stream has that of the parameters."""
        return next(self.base.parameters()).dtype

    @property
    def head_loss(self) -> HeadLoss | None:
        """How the head's own loss normalises; ``None`` for a head that the table does not know."""
        return head_loss_of(self.top)

    def container(self) -> tuple[nn.Module, str]:
        """The module that holds the list of blocks, and the attribute under which it does."""
        path, _, attribute = self.family.blocks.rpartition(".")
        return self.base.get_submodule(path), attribute

    def blocks(self) -> list[nn.Module]:
        """The blocks, in order."""
        container, attribute = self.container()
        return list(getattr(container, attribute))

    def layer_of(self, parameter: str) -> int | None:
        """The layer that uses a parameter, by its name in the user's module.

        Returns:
            The layer's number, or ``None`` for a parameter outside the HuggingFace model, which is the user's own and
            may be used anywhere.
        """
        inside_base = _below(parameter, self.base_name)
        if inside_base is not None:
            index = _below(inside_base, self.family.blocks)
            if index is not None:
                return 1 + int(index.split(".")[0])
            if any(_below(inside_base, name) is not None for name in self.family.prologue):
                return 0
            return self.num_blocks + 1
        return self.num_blocks + 1 if _below(parameter, self.top_name) is not None else None


def _below(name: str, prefix: str) -> str | None:
    """The rest of a dotted name under a prefix, or ``None`` where it is not under it."""
    if not prefix:
        return name
    return name[len(prefix) + 1 :] if name.startswith(prefix + ".") else None


def find_anatomy(module: nn.Module) -> Anatomy:
    """Finds the one HuggingFace model in a user's module that can be cut into stages.

    Raises:
        ValueError: There is none, or more than one, or it is of a family that is not known.
    """
    known = ", ".join(sorted(FAMILIES))
    found = [(name, part) for name, part in module.named_modules() if type(part).__name__ in FAMILIES]
    if not found:
        models = sorted({type(part).__name__ for part in module.modules() if isinstance(part, PreTrainedModel)})
        inside = f"the HuggingFace models {', '.join(models)}, none of which" if models else "no HuggingFace model that"
        raise ValueError(
            f"{type(module).__name__} holds {inside} can be cut into pipeline stages. It must contain exactly one of:"
            f" {known}; lightning_chimera.register_family makes another architecture known."
        )
    if len(found) > 1:
        names = ", ".join(f"{name!r} ({type(part).__name__})" for name, part in found)
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} models that can be cut into pipeline stages: {names}."
            " A pipeline has exactly one; keep the others outside of the LightningModule."
        )
    base_name, base = found[0]
    layerdrop = getattr(base.config, "layerdrop", 0.0)
    if layerdrop:
        raise ValueError(
            f"{type(base).__name__} leaves out blocks at random (layerdrop={layerdrop}), and a stage can't leave out"
            " its end. Set layerdrop=0.0 in the model's config."
        )
    outer = [
        (name, part)
        for name, part in module.named_modules()
        if isinstance(part, PreTrainedModel) and (base_name == name or _below(base_name, name) is not None)
    ]
    top_name, top = min(outer, key=lambda item: len(item[0]))
    family = FAMILIES[type(base).__name__]
    path, _, attribute = family.blocks.rpartition(".")
    return Anatomy(
        base=base,
        base_name=base_name,
        top=top,
        top_name=top_name,
        family=family,
        num_blocks=len(getattr(base.get_submodule(path), attribute)),
    )
