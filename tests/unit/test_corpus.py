"""Corpora: the split into training and validation texts, and messages about what cannot be read."""

import builtins
import re

import pytest

from lightning_chimera.data import Corpus, HubText, PythonDocs, TextFolder
from lightning_chimera.data.corpus import column_texts, fingerprint, split_documents


class Rows:
    """Looks like a `datasets.Dataset`."""

    def __init__(self, **columns):
        self.column_names = list(columns)
        self.columns = columns

    def __getitem__(self, column):
        return self.columns[column]


def test_python_docs_hold_hundreds_of_thousands_of_characters_and_keep_a_tenth():
    texts = PythonDocs().load()
    train, validation = (sum(map(len, part)) for part in (texts.train, texts.validation))
    assert train > 300_000
    assert 0.05 < validation / (train + validation) < 0.15


def test_python_docs_do_not_train_on_a_validation_paragraph():
    texts = PythonDocs().load()
    train, validation = ({p for text in part for p in text.split("\n\n")} for part in (texts.train, texts.validation))
    assert not train & validation


def test_python_docs_are_the_same_at_each_call():
    assert PythonDocs().load() == PythonDocs().load()


def test_corpora_are_what_a_data_module_asks_for():
    for corpus in (PythonDocs(), TextFolder("anywhere"), HubText("anything")):
        assert isinstance(corpus, Corpus)


@pytest.mark.parametrize("fraction", [0, 1, -0.1, 10])
def test_a_validation_fraction_out_of_range_is_refused(fraction):
    with pytest.raises(ValueError, match=f"validation_fraction={fraction} must lie between 0 and 1"):
        PythonDocs(validation_fraction=fraction)


def test_split_keeps_whole_documents_within_the_fraction():
    documents = {f"document {i}": str(i) * 10 for i in range(10)}
    texts = split_documents(documents, 0.35)
    assert len(texts.validation) == 3
    assert sorted(texts.train + texts.validation) == sorted(documents.values())


def test_split_does_not_depend_on_the_order_of_the_documents():
    documents = {f"document {i}": "x" * i for i in range(1, 20)}
    assert split_documents(documents, 0.2) == split_documents(dict(reversed(documents.items())), 0.2)


def test_split_keeps_the_smallest_document_where_none_fits():
    texts = split_documents({"a": "x" * 100, "b": "y" * 90}, 0.1)
    assert texts.validation == ("y" * 90,)


def test_text_folder_reads_matching_files_below_it(tmp_path):
    (tmp_path / "deep").mkdir()
    for name in ("one.txt", "deep/two.txt", "deep/three.txt"):
        (tmp_path / name).write_text(f"text of {name}, with an umlaut: \u00fc", encoding="utf-8")
    (tmp_path / "notes.md").write_text("not this one")
    (tmp_path / "blank.txt").write_text(" \n")
    texts = TextFolder(str(tmp_path), validation_fraction=0.4).load()
    assert sorted(texts.train + texts.validation) == sorted(
        f"text of {name}, with an umlaut: \u00fc" for name in ("one.txt", "deep/two.txt", "deep/three.txt")
    )
    assert len(texts.validation) == 1


def test_text_folder_with_one_file_is_cut_at_a_blank_line(tmp_path):
    (tmp_path / "all.txt").write_text("\n\n".join(f"paragraph {i}" for i in range(10)))
    texts = TextFolder(str(tmp_path), validation_fraction=0.2).load()
    assert texts.train[0].endswith("paragraph 7")
    assert texts.validation == ("paragraph 8\n\nparagraph 9",)


def test_text_folder_with_one_paragraph_is_refused(tmp_path):
    (tmp_path / "all.txt").write_text("one paragraph")
    with pytest.raises(ValueError, match=re.escape("'all.txt' is the only document and has no blank line")):
        TextFolder(str(tmp_path)).load()


def test_text_folder_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere' is not a folder"):
        TextFolder(str(tmp_path / "nowhere")).load()


def test_text_folder_without_a_matching_file_names_the_pattern(tmp_path):
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(FileNotFoundError, match=re.escape("matches the pattern '*.rst'. Change `pattern`")):
        TextFolder(str(tmp_path), pattern="*.rst").load()


def test_hub_text_without_datasets_names_the_extra(monkeypatch):
    real_import = builtins.__import__

    def no_datasets(name, *args, **kwargs):
        if name == "datasets":
            raise ModuleNotFoundError(name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", no_datasets)
    with pytest.raises(ModuleNotFoundError, match=re.escape("pip install 'lightning-chimera[hub]'")):
        HubText("some/data").load()


def test_hub_text_loads_both_splits(monkeypatch):
    class Datasets:
        @staticmethod
        def load_dataset(path, name, split):
            return Rows(title=["t"], body=[f"{path} {name} {split}"])

    monkeypatch.setitem(__import__("sys").modules, "datasets", Datasets)
    texts = HubText("some/data", name="raw", column="body", validation_split="train[:5%]").load()
    assert (texts.train, texts.validation) == (("some/data raw train",), ("some/data raw train[:5%]",))


def test_column_texts_leave_empty_rows_out():
    assert column_texts(Rows(text=["a", "", None, " \n", "b"]), "text", "train") == ("a", "b")


def test_column_texts_name_the_columns_there_are():
    with pytest.raises(
        ValueError, match=re.escape("'train' has no column 'text'. Set `column` to one of: title, body.")
    ):
        column_texts(Rows(title=["t"], body=["b"]), "text", "train")


def test_column_texts_refuse_a_column_without_text():
    with pytest.raises(ValueError, match="holds no text"):
        column_texts(Rows(text=["", None]), "text", "train")


def test_fingerprint_tells_where_documents_end():
    assert fingerprint(["ab", "c"]) != fingerprint(["a", "bc"])
    assert fingerprint(["ab", "c"]) == fingerprint(("ab", "c"))
