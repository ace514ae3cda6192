"""Tokenizers: trained on the corpus once and cached, or read from a folder."""

import hashlib
import json
import os
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from lightning_chimera.data.corpus import fingerprint

# Part of every cache key: raise it when the training below changes, so that no old file is taken for a new one.
_TRAINING_VERSION = 1
_END_OF_TEXT = "<|endoftext|>"
_BERT_TOKENS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


@runtime_checkable
class TokenizerSource(Protocol):
    """What a data module asks for a tokenizer.

    Attributes:
        vocab_size: Size of the embedding table that the tokenizer needs at most.
    """

    vocab_size: int

    def build(self, texts: Sequence[str]) -> PreTrainedTokenizerBase:
        """Returns the tokenizer.

        Args:
            texts: The training texts.
        """


class TrainedTokenizer:
    """Trains a tokenizer on the training texts, and keeps it in a folder for the next time.

    Special tokens have the smallest ids: `<|endoftext|>` is 0 for `byte_bpe`, `[PAD]` is 0 for `wordpiece`.

    Args:
        kind: `byte_bpe`, as GPT-2 uses it, or `wordpiece` in lower case, as BERT uses it.
        vocab_size: Number of entries to train. A small corpus may give fewer.
        cache_dir: Where trained tokenizers are kept. By default `lightning_chimera` in `$XDG_CACHE_HOME` or `~/.cache`.

    Raises:
        ValueError: If the kind is unknown.
    """

    def __init__(self, kind: str, vocab_size: int, cache_dir: str | None = None) -> None:
        if kind not in _KINDS:
            raise ValueError(f"kind={kind!r} is not a kind of tokenizer. Choose one of: {', '.join(_KINDS)}.")
        self.kind = kind
        self.vocab_size = vocab_size
        self.cache_dir = Path(cache_dir).expanduser() if cache_dir else default_cache_dir()

    def build(self, texts: Sequence[str]) -> PreTrainedTokenizerFast:
        """Reads the tokenizer from the cache, or trains it and puts it there.

        Args:
            texts: The training texts.

        Returns:
            The tokenizer, with the special tokens that its kind of model expects.

        Raises:
            ValueError: If the characters and special tokens alone are more than the vocabulary may hold.
        """
        path = self.cached_file(texts)
        if not path.exists():
            _write_whole(path, self._train(texts).to_str())
        # The classes GPT2TokenizerFast and BertTokenizerFast of transformers 5 raise nothing and come up empty when
        # they are given files, so the trained object is handed over as it is.
        tokenizer = Tokenizer.from_file(str(path))
        return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_KINDS[self.kind].special_tokens)

    def cached_file(self, texts: Sequence[str]) -> Path:
        """Returns where the tokenizer for these texts is kept, whether it was trained yet or not.

        Args:
            texts: The training texts.
        """
        key = json.dumps([_TRAINING_VERSION, self.kind, self.vocab_size, fingerprint(texts)])
        digest = hashlib.sha256(key.encode()).hexdigest()[:16]
        return self.cache_dir / "tokenizers" / f"{self.kind}-{self.vocab_size}-{digest}" / "tokenizer.json"

    def _train(self, texts: Sequence[str]) -> Tokenizer:
        tokenizer = _KINDS[self.kind].train(texts, self.vocab_size)
        entries = tokenizer.get_vocab_size()
        if entries > self.vocab_size:
            raise ValueError(
                f"vocab_size={self.vocab_size} is too small: the characters of the corpus and the special tokens alone"
                f" take {entries} entries of a {self.kind!r} tokenizer. Set it to {entries} or more."
            )
        return tokenizer


class SavedTokenizer:
    """Reads a tokenizer that was saved with `save_pretrained`.

    Args:
        path: The folder, or a hub name where the hub can be reached.
        vocab_size: Size of the embedding table of the model, which the tokenizer has to fit into.
    """

    def __init__(self, path: str, vocab_size: int) -> None:
        self.path = path
        self.vocab_size = vocab_size

    def build(self, texts: Sequence[str]) -> PreTrainedTokenizerBase:
        """Reads the tokenizer.

        Args:
            texts: Not needed.

        Returns:
            The tokenizer.

        Raises:
            ValueError: If it has more entries than the model's table.
        """
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(self.path)
        if len(tokenizer) > self.vocab_size:
            raise ValueError(
                f"The tokenizer in {self.path!r} has {len(tokenizer)} entries, but the model's table has"
                f" vocab_size={self.vocab_size}. Set vocab_size to {len(tokenizer)} or more."
            )
        return tokenizer


def default_cache_dir() -> Path:
    """Returns the folder for what is made once and kept, as the XDG base directory specification places it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_chimera"


def _train_byte_bpe(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def _train_wordpiece(texts: Sequence[str], vocab_size: int) -> Tokenizer:
    special_tokens = list(_BERT_TOKENS.values())
    normalizer = normalizers.BertNormalizer(lowercase=True)
    # The trainer numbers characters inside words ("##a") in the order of a hash table, another one in each process, and
    # breaks ties by these numbers. Naming them as special tokens fixes the numbers, and so the whole vocabulary.
    characters = {character for text in texts for character in normalizer.normalize_str(text)}
    inside = [f"##{character}" for character in sorted(characters) if not character.isspace()]
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size, special_tokens=special_tokens + inside, show_progress=False
    )
    trained = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    trained.normalizer = normalizer
    trained.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trained.train_from_iterator(texts, trainer)

    tokenizer = Tokenizer(models.WordPiece(trained.get_vocab(), unk_token="[UNK]"))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = trained.pre_tokenizer
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(special_tokens)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")],
    )
    return tokenizer


class _Kind(NamedTuple):
    """How one kind of tokenizer is trained, and what its special tokens are."""

    train: Callable[[Sequence[str], int], Tokenizer]
    special_tokens: dict[str, str]


_KINDS = {
    "byte_bpe": _Kind(_train_byte_bpe, dict.fromkeys(("bos_token", "eos_token", "unk_token"), _END_OF_TEXT)),
    "wordpiece": _Kind(_train_wordpiece, _BERT_TOKENS),
}


def _write_whole(path: Path, text: str) -> None:
    """Writes a file that other processes see complete or not at all: several ranks may train at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{uuid.uuid4().hex}")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
