"""Text to train on: where it comes from, and which part of it is kept for validation.

Every corpus has one method, `load`, which returns the same texts at each call and in each process.
"""

import hashlib
import importlib
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable


@dataclass(frozen=True)
class Texts:
    """The documents of a corpus.

    Attributes:
        train: Documents to train on.
        validation: Documents that are never trained on.
    """

    train: tuple[str, ...]
    validation: tuple[str, ...]


@runtime_checkable
class Corpus(Protocol):
    """What a data module asks of a corpus."""

    def load(self) -> Texts:
        """Returns the texts, the same ones at each call and in each process."""


class PythonDocs:
    """The reference of the Python language, which every CPython carries: about 460,000 characters of English prose.

    Whole topics are kept for validation. Topics quote one another (the page on compound statements contains those on
    `with` and `try`), so paragraphs that occur in a validation topic are left out of the training topics.

    Args:
        validation_fraction: Share of the characters that is kept for validation, between 0 and 1.

    Raises:
        ValueError: If the fraction is not between 0 and 1.
    """

    def __init__(self, validation_fraction: float = 0.1) -> None:
        self.validation_fraction = _checked_fraction(validation_fraction)

    def load(self) -> Texts:
        """Returns the topics, in one fixed order."""
        topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
        texts = split_documents(topics, self.validation_fraction)
        held_out = {paragraph for text in texts.validation for paragraph in _paragraphs(text)}
        train = ("\n\n".join(p for p in _paragraphs(text) if p not in held_out) for text in texts.train)
        return Texts(tuple(text for text in train if text), texts.validation)


class TextFolder:
    """The text files of a local folder, in UTF-8; whole files are kept for validation.

    A folder with a single file is cut at a blank line instead: its end is kept for validation.

    Args:
        path: The folder.
        pattern: Which files of the folder to read, as `pathlib.Path.glob` understands it.
        validation_fraction: Share of the characters that is kept for validation, between 0 and 1.

    Raises:
        ValueError: If the fraction is not between 0 and 1.
    """

    def __init__(self, path: str, pattern: str = "**/*.txt", validation_fraction: float = 0.1) -> None:
        self.path = path
        self.pattern = pattern
        self.validation_fraction = _checked_fraction(validation_fraction)

    def load(self) -> Texts:
        """Reads the files.

        Returns:
            Their texts.

        Raises:
            FileNotFoundError: If the folder does not exist, or none of its files matches and holds text.
            ValueError: If there is too little text to keep some for validation.
        """
        folder = Path(self.path).expanduser()
        if not folder.is_dir():
            raise FileNotFoundError(
                f"The corpus {self.path!r} is not a folder. Give the path of a folder of text files."
            )
        documents = {
            path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8")
            for path in sorted(folder.glob(self.pattern))
            if path.is_file()
        }
        documents = {name: text for name, text in documents.items() if text.strip()}
        if not documents:
            raise FileNotFoundError(
                f"No file with text in {self.path!r} matches the pattern {self.pattern!r}."
                " Change `pattern`, for example to '**/*.md'."
            )
        return split_documents(documents, self.validation_fraction)


class HubText:
    """One text column of a data set from the HuggingFace hub, or of a local one that `datasets` can read.

    Args:
        path: Name or path, as `datasets.load_dataset` takes it.
        name: Configuration of the data set.
        column: The column with the text.
        train_split: Rows to train on; slices such as `train[5%:]` are understood.
        validation_split: Rows that are kept for validation, such as `train[:5%]` where the data set has no such split.
    """

    def __init__(
        self,
        path: str,
        name: str | None = None,
        column: str = "text",
        train_split: str = "train",
        validation_split: str = "validation",
    ) -> None:
        self.path = path
        self.name = name
        self.column = column
        self.train_split = train_split
        self.validation_split = validation_split

    def load(self) -> Texts:
        """Loads both splits, downloading what the cache of `datasets` does not hold.

        Returns:
            The rows that hold text.

        Raises:
            ModuleNotFoundError: If `datasets` is not installed.
            ValueError: If the column does not exist, or a split holds no text.
        """
        try:
            import datasets
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"The corpus {self.path!r} is a hub data set, which needs the package `datasets`."
                " Install it with: pip install 'lightning-chimera[hub]'"
            ) from error
        splits = (self.train_split, self.validation_split)
        train, validation = (
            column_texts(datasets.load_dataset(self.path, self.name, split=split), self.column, split)
            for split in splits
        )
        return Texts(train, validation)


def column_texts(rows: Any, column: str, split: str) -> tuple[str, ...]:
    """Returns the texts of one column, without the empty ones.

    Args:
        rows: A `datasets.Dataset`, or what looks like one: `column_names`, and a column by its name.
        column: The column with the text.
        split: Name of the split, for messages.

    Raises:
        ValueError: If the column does not exist or holds no text.
    """
    if column not in rows.column_names:
        raise ValueError(
            f"The split {split!r} has no column {column!r}. Set `column` to one of: {', '.join(rows.column_names)}."
        )
    texts = tuple(text for text in rows[column] if text and text.strip())
    if not texts:
        raise ValueError(f"The column {column!r} of the split {split!r} holds no text. Choose another split or column.")
    return texts


def split_documents(documents: Mapping[str, str], validation_fraction: float) -> Texts:
    """Keeps whole documents for validation, the same ones whatever the order in which they were found.

    Args:
        documents: Texts by name. A single document is cut at a blank line.
        validation_fraction: Share of the characters that the kept documents have at most, unless the smallest has more.

    Raises:
        ValueError: If there is only one document and it has no blank line to be cut at.
    """
    if len(documents) == 1:
        [(name, text)] = documents.items()
        return _cut_document(name, text, validation_fraction)
    room = validation_fraction * sum(map(len, documents.values()))
    kept = set()
    for name in sorted(documents, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(documents[name]) <= room:
            kept.add(name)
            room -= len(documents[name])
    if not kept:
        kept.add(min(documents, key=lambda name: (len(documents[name]), name)))
    return Texts(
        tuple(documents[name] for name in sorted(documents) if name not in kept),
        tuple(documents[name] for name in sorted(kept)),
    )


def fingerprint(texts: Iterable[str]) -> str:
    """Returns a hash of the texts, which tells one corpus from another in names of cached files."""
    digest = hashlib.sha256()
    for text in texts:
        data = text.encode()
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.hexdigest()[:16]


def _cut_document(name: str, text: str, validation_fraction: float) -> Texts:
    paragraphs = _paragraphs(text)
    if len(paragraphs) < 2:
        raise ValueError(
            f"{name!r} is the only document and has no blank line, so none of it can be kept for validation."
            " Split the file in two."
        )
    sizes_from_the_end = itertools.accumulate(len(paragraph) for paragraph in reversed(paragraphs))
    kept = sum(size <= validation_fraction * len(text) for size in sizes_from_the_end)
    cut = len(paragraphs) - max(1, kept)
    return Texts(("\n\n".join(paragraphs[:cut]),), ("\n\n".join(paragraphs[cut:]),))


def _paragraphs(text: str) -> list[str]:
    return [paragraph for paragraph in text.split("\n\n") if paragraph.strip()]


def _checked_fraction(fraction: float) -> float:
    if not 0 < fraction < 1:
        raise ValueError(
            f"validation_fraction={fraction} must lie between 0 and 1, both excluded. 0.1 is a usual choice."
        )
    return fraction
