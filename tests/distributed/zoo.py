"""Small HuggingFace models of many kinds, and rows for them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers as hf
from torch import Tensor, nn

from .users import LENGTH, VOCABULARY, Row, causal_loss

WIDTH, BLOCKS, CLASSES, CHOICES = 32, 4, 3, 2

_COMMON: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_labels": CLASSES,
}
_BERT: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}
_LLAMA: dict[str, Any] = {
    "hidden_size": WIDTH,
    "num_hidden_layers": BLOCKS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 32,
    "attention_dropout": 0.0,
    "classifier_dropout": 0.0,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "GPT2": {
        "n_positions": 32,
        "n_embd": WIDTH,
        "n_layer": BLOCKS,
        "n_head": 2,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
        "classifier_dropout": 0.0,
    },
    "Bert": _BERT,
    "Roberta": _BERT,
    "Electra": {**_BERT, "embedding_size": 24, "summary_last_dropout": 0.0},
    "DistilBert": {
        "dim": WIDTH,
        "n_layers": BLOCKS,
        "n_heads": 2,
        "hidden_dim": 48,
        "max_position_embeddings": 32,
        "dropout": 0.0,
        "attention_dropout": 0.0,
        "qa_dropout": 0.0,
        "seq_classif_dropout": 0.0,
    },
    "OPT": {
        "hidden_size": WIDTH,
        "word_embed_proj_dim": 24,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 2,
        "ffn_dim": 48,
        "max_position_embeddings": 32,
        "dropout": 0.0,
    },
    "GPTNeoX": {
        "hidden_size": WIDTH,
        "num_hidden_layers": BLOCKS,
        "num_attention_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.0,
    },
    "GPTNeo": {
        "hidden_size": WIDTH,
        "num_layers": BLOCKS,
        "attention_types": [[["global", "local"], BLOCKS // 2]],
        "window_size": 4,
        "num_heads": 2,
        "intermediate_size": 48,
        "max_position_embeddings": 32,
        "resid_dropout": 0.0,
        "embed_dropout": 0.0,
        "attention_dropout": 0.0,
        "classifier_dropout": 0.0,
    },
    "Llama": _LLAMA,
    "Qwen2": _LLAMA,
}


def _token_loss(logits: Tensor, labels: Tensor, _config: Any) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


def family_of(name: str) -> str:
    """The family of a HuggingFace class, which the class of its config is named after."""
    return max((family for family in _CONFIGS if name.startswith(family)), key=len)


def sizes_of(name: str, *, blocks: int, dropout: float) -> dict[str, Any]:
    """Arguments of a class's config for another depth, and another probability of every dropout."""
    known = _CONFIGS[family_of(name)]
    depth = next(key for key in ("n_layer", "n_layers", "num_hidden_layers", "num_layers") if key in known)
    return {depth: blocks, **{key: dropout for key in known if "drop" in key}}


def make_model(name: str, **options: Any) -> hf.PreTrainedModel:
    """A small model of a HuggingFace class, as precise as its parameters.

    HuggingFace computes some losses and norms in single precision, whatever the parameters have.

    Args:
        name: The class.
        **options: Further arguments of its config.
    """
    family = family_of(name)
    given = {key: list(value) if isinstance(value, tuple) else value for key, value in options.items()}
    config = getattr(hf, family + "Config")(**{**_COMMON, **_CONFIGS[family], **given})
    model: hf.PreTrainedModel = getattr(hf, name)._from_config(
        config, attn_implementation=options.get("attn_implementation", "sdpa")
    )
    if name.endswith(("LMHeadModel", "ForCausalLM")):
        model.loss_function = causal_loss
    elif name.endswith("ForTokenClassification"):
        model.loss_function = _token_loss
    for module in list(model.modules()):
        for key, child in module.named_children():
            if type(child).__name__.endswith("RMSNorm"):
                setattr(module, key, nn.RMSNorm(WIDTH, eps=1e-6))
    return model


def make_rows(task: str, count: int, *, padding: str = "right") -> list[Row]:
    """Rows of uneven lengths whose labels are unevenly spread.

    Of eight rows the third and fourth have no label of the first kind, and the last two none of the second.

    Args:
        task: What they are for.
        count: How many.
        padding: On which side, or ``none``.
    """
    generator = torch.Generator().manual_seed(0)
    return [_TASKS[task](_Draw(generator, number, padding)) for number in range(count)]


@dataclass
class _Draw:
    """Draws one row."""

    generator: torch.Generator
    number: int
    padding: str
    text: Row = field(init=False)

    def __post_init__(self) -> None:
        self.text = self.make_text()

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def make_text(self) -> Row:
        real = int(self.integers(2, LENGTH + 1)) if self.padding != "none" else LENGTH
        mask = (torch.arange(LENGTH) < real).long()
        if self.padding == "left":
            mask = mask.flip(0)
        return {"input_ids": self.integers(3, VOCABULARY, LENGTH) * mask, "attention_mask": mask}

    @property
    def has_first(self) -> bool:
        return self.number % 8 not in (2, 3)

    @property
    def has_second(self) -> bool:
        return self.number % 8 not in (6, 7)

    def labels(self, text: Row, share: float = 1.0) -> Tensor:
        """The ids of some tokens."""
        chosen = (torch.rand(LENGTH, generator=self.generator) < share) & text["attention_mask"].bool()
        return text["input_ids"].where(chosen & self.has_first, -100)

    def one_of(self, count: int, has: bool) -> Tensor:
        """A class, or none."""
        return self.integers(0, count, 1)[0] if has else torch.tensor(-100)


def _causal(draw: _Draw) -> Row:
    return draw.text | {"labels": draw.labels(draw.text)}


def _masked(draw: _Draw) -> Row:
    labels = draw.labels(draw.text, 0.4)
    return draw.text | {"input_ids": draw.text["input_ids"].masked_fill(labels >= 0, 1), "labels": labels}


def _pretraining(draw: _Draw) -> Row:
    types = (torch.arange(LENGTH) > draw.number % LENGTH).long()
    return _masked(draw) | {"token_type_ids": types, "next_sentence_label": draw.one_of(2, draw.has_second)}


def _next_sentence(draw: _Draw) -> Row:
    return draw.text | {"labels": draw.one_of(2, draw.has_first)}


def _classes(draw: _Draw) -> Row:
    return draw.text | {"labels": draw.one_of(CLASSES, draw.has_first)}


def _scores(draw: _Draw) -> Row:
    return draw.text | {"labels": torch.rand((), generator=draw.generator, dtype=torch.float64)}


def _several(draw: _Draw) -> Row:
    return draw.text | {"labels": draw.integers(0, 2, CLASSES).double()}


def _tokens(draw: _Draw) -> Row:
    return draw.text | {"labels": draw.labels(draw.text, 0.7).clamp(max=2)}


def _texts(draw: _Draw) -> Row:
    return {key: torch.stack(values) for key, values in _paired(draw.text, draw.make_text()).items()}


def _paired(first: Row, second: Row) -> dict[str, list[Tensor]]:
    return {key: [value, second[key]] for key, value in first.items()}


def _choice(draw: _Draw) -> Row:
    return _texts(draw) | {"labels": draw.one_of(CHOICES, draw.has_first)}


def _double(draw: _Draw) -> Row:
    texts = [draw.text, draw.make_text()]
    return {
        **{key: torch.stack(values) for key, values in _paired(*texts).items()},
        "labels": torch.stack([draw.labels(text) for text in texts]),
        "mc_token_ids": torch.stack([text["attention_mask"].sum() - 1 for text in texts]),
        "mc_labels": draw.one_of(CHOICES, draw.has_second),
    }


def _answers(draw: _Draw) -> Row:
    start, end = (draw.integers(0, LENGTH, 1)[0] + (0 if has else LENGTH) for has in (draw.has_first, draw.has_second))
    return draw.text | {"start_positions": start, "end_positions": end}


_TASKS: dict[str, Callable[[_Draw], Row]] = {
    "causal": _causal,
    "masked": _masked,
    "pretraining": _pretraining,
    "next_sentence": _next_sentence,
    "classes": _classes,
    "scores": _scores,
    "several": _several,
    "tokens": _tokens,
    "choice": _choice,
    "double": _double,
    "answers": _answers,
}
