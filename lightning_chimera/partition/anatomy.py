"""What a HuggingFace model is made of, as a pipeline sees it.

A model is cut along one list of blocks. What runs before the list (embeddings) is the prologue and belongs to the first
stage; what runs after it (final norm, pooler, heads) is the epilogue and belongs to the last. In between they are
numbered as *layers*: 0 is the prologue, 1 .. num_blocks are the blocks, num_blocks + 1 is the epilogue.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from transformers import PreTrainedModel

from lightning_chimera.partition.heads import HeadLoss, head_loss_of

Found = tuple[str, PreTrainedModel]
"""A model by its name in the user's module."""


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

    @cached_property
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

    def around(self, module: nn.Module) -> list[tuple[str, nn.Module]]:
        """The parts of a user's module outside of the base model, by their names, in the order of the module."""
        found: list[tuple[str, nn.Module]] = []
        known: set[nn.Module] = {self.base}
        rest: list[tuple[str, nn.Module]] = [("", module)]
        while rest:
            name, part = rest.pop()
            if part in known:
                continue
            known.add(part)
            found.append((name, part))
            prefix = f"{name}." if name else ""
            rest += [(prefix + key, inner) for key, inner in reversed(part._modules.items()) if inner is not None]
        return found


def _below(name: str, prefix: str) -> str | None:
    """The rest of a dotted name under a prefix, or ``None`` where it is not under it."""
    if not prefix:
        return name
    return name[len(prefix) + 1 :] if name.startswith(prefix + ".") else None


def find_anatomy(module: nn.Module) -> Anatomy:
    """Finds the one HuggingFace model in a user's module that can be cut into stages.

    Others beside it may be frozen (a distillation's teacher, say): they are never cut.

    Raises:
        ValueError: There is none, or more than one that trains, or it can't be cut.
    """
    outer = [(name, part) for name, part in module.named_modules() if isinstance(part, PreTrainedModel)]
    found = [(name, part) for name, part in outer if type(part).__name__ in FAMILIES]
    if not found:
        raise ValueError(_why_none(module, outer))
    tops = {
        name: min(((n, part) for n, part in outer if _holds(n, name)), key=lambda item: len(item[0]))
        for name, _ in found
    }
    base_name, base = found[0] if len(found) == 1 else _the_trained(module, found, tops)
    top_name, top = tops[base_name]
    _check_can_be_cut(module, base_name, base, top)
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


def holds_a_model(module: nn.Module) -> bool:
    """Whether there is a HuggingFace model in a user's module already."""
    return any(isinstance(part, PreTrainedModel) for part in module.modules())


def _holds(outer: str, inner: str) -> bool:
    """Whether a module is another or holds it, by their names."""
    return outer == inner or _below(inner, outer) is not None


def _named(parts: Iterable[tuple[str, nn.Module]]) -> str:
    return ", ".join(f"{name!r} ({type(part).__name__})" for name, part in parts)


def _why_none(module: nn.Module, outer: Sequence[Found]) -> str:
    """Why there is nothing in a module that can be cut."""
    name, known = type(module).__name__, ", ".join(sorted(FAMILIES))
    if any(isinstance(part, torch.jit.ScriptModule) for part in module.modules()):
        return (
            f"{name} holds a scripted or traced module, whose forward can't be cut into stages. Use the HuggingFace"
            " model that it was made from."
        )
    pairs = [(name, part) for name, part in outer if getattr(part.config, "is_encoder_decoder", False)]
    if pairs:
        return (
            f"{name} holds an encoder-decoder, {_named(pairs[:1])}, which has two lists of blocks. A pipeline is cut"
            f" along one: use a model that is an encoder or a decoder alone. Known are: {known}."
        )
    models = sorted({type(part).__name__ for _, part in outer})
    inside = f"the HuggingFace models {', '.join(models)}, none of which" if models else "no HuggingFace model that"
    return (
        f"{name} holds {inside} can be cut into pipeline stages. It must contain exactly one of: {known};"
        " lightning_chimera.register_family makes another architecture known."
    )


def _the_trained(module: nn.Module, found: Sequence[Found], tops: Mapping[str, Found]) -> Found:
    """The one of several models that trains.

    Raises:
        ValueError: Not exactly one does, or they are parts of one model.
    """
    if len({name for name, _ in tops.values()}) < len(found):
        raise ValueError(
            f"{type(module).__name__} holds one model with {len(found)} lists of blocks: {_named(found)}. A pipeline is"
            " cut along one list: use a model that is an encoder or a decoder alone."
        )
    trained = [(name, part) for name, part in found if any(p.requires_grad for p in tops[name][1].parameters())]
    if len(trained) != 1:
        raise ValueError(
            f"{type(module).__name__} holds {len(found)} models that can be cut into pipeline stages: {_named(found)},"
            f" of which {len(trained)} train. A pipeline trains exactly one: freeze the others with"
            " requires_grad_(False) before fit, then every rank holds them whole; or keep them outside of the"
            " LightningModule."
        )
    return trained[0]


def _check_can_be_cut(module: nn.Module, base_name: str, base: PreTrainedModel, top: PreTrainedModel) -> None:
    """Refuses a model of a known family that can't be cut as it is.

    Raises:
        ValueError: It leaves out blocks at random, is compiled, or quantized.
    """
    layerdrop = getattr(base.config, "layerdrop", 0.0)
    if layerdrop:
        raise ValueError(
            f"{type(base).__name__} leaves out blocks at random (layerdrop={layerdrop}), and a stage can't leave out"
            " its end. Set layerdrop=0.0 in the model's config."
        )
    for name, part in module.named_modules():
        # By its name, since importing torch._dynamo takes seconds.
        if _holds(name, base_name) and (type(part).__name__ == "OptimizedModule" or part._compiled_call_impl):
            raise ValueError(
                f"{name or type(module).__name__!r} is compiled as a whole, so its forward can't be parted into stages."
                " Leave out torch.compile() and .compile() for whatever holds the model;"
                " ChimeraStrategy(compile_blocks=True) compiles its blocks one by one."
            )
    whole = [name for name, value in top.named_parameters() if not value.is_floating_point()]
    if getattr(top, "hf_quantizer", None) is not None or whole:
        raise ValueError(
            f"{type(top).__name__} is quantized ({whole[0] if whole else 'by its config'}), and the stages of a"
            " pipeline hold parameters of floating point only. Load it without quantization_config."
        )
