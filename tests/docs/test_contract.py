"""The page "What works, what is refused" is what the markers of the tests say, and a wrong marker is named."""

import re
import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
builder = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "make_contract.py")))

TESTS = """\
import pytest

CASES = [
    pytest.param(1, marks=pytest.mark.contract("Data", "`a | b`", reported="HF#7, some/other#8")),
    pytest.param(2, marks=[pytest.mark.long, pytest.mark.contract("Data", "two")]),
]

@pytest.mark.parametrize("case", CASES)
def test_cases(case): ...

@pytest.mark.contract("Models", "Zebra")
@pytest.mark.contract("Models", "an antelope, "
                      "and a gnu", outcome="refused", reported="DS#1")
@pytest.mark.parametrize("x", [pytest.param(1, marks=pytest.mark.contract("Data", "three", "differs"))])
def test_animals(x): ...

class TestMore:
    @pytest.mark.contract("Models", "Zebra", "works", "DS#1, DS#2")
    def test_zebra(self): ...
"""
ROWS = """\
## Models

| what | outcome | shown by | reported in |
|---|---|---|---|
| Zebra | works | [`a/test_it.py::test_animals`](../tests/a/test_it.py)<br>[`a/test_it.py::TestMore::test_zebra`]\
(../tests/a/test_it.py) | [DS#1](https://github.com/deepspeedai/DeepSpeed/issues/1), \
[DS#2](https://github.com/deepspeedai/DeepSpeed/issues/2) |
| an antelope, and a gnu | **refused** | [`a/test_it.py::test_animals`](../tests/a/test_it.py) | \
[DS#1](https://github.com/deepspeedai/DeepSpeed/issues/1) |

## Data

| what | outcome | shown by | reported in |
|---|---|---|---|
| `a \\| b` | works | [`a/test_it.py::test_cases`](../tests/a/test_it.py) | \
[HF#7](https://github.com/huggingface/transformers/issues/7), [some/other#8](https://github.com/some/other/issues/8) |
| two | works | [`a/test_it.py::test_cases`](../tests/a/test_it.py) |  |
| three | *differs* | [`a/test_it.py::test_animals`](../tests/a/test_it.py) |  |
"""


def tree(tmp_path: Path, **files: str) -> Path:
    """A repository with some test files."""
    folder = tmp_path / "tests" / "a"
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
    return tmp_path


def test_the_page_is_what_the_markers_say() -> None:
    page = builder.render(builder.read_markers())
    assert (ROOT / "docs" / "contract.md").read_text() == page, "run python docs/make_contract.py"


def test_every_shown_test_exists() -> None:
    for path, name in re.findall(r"\[`([\w/]+\.py)::([\w:]+)`\]", builder.PAGE.read_text()):
        assert re.search(rf"^\s*def {name.rpartition('::')[2]}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE)


def test_every_fact_is_a_row_with_its_tests_and_threads(tmp_path: Path) -> None:
    page = builder.render(builder.read_markers(tree(tmp_path, test_it=TESTS)))
    assert page == f"{builder.INTRODUCTION}\n{ROWS}"


def test_a_table_of_one_file_may_be_used_in_another(tmp_path: Path) -> None:
    table = 'CASES: list = [pytest.param(1, marks=pytest.mark.contract("Loss", "fact"))]\n'
    user = '@pytest.mark.parametrize("case", zoo.CASES)\ndef test_it(case): ...\n'
    (marker,) = builder.read_markers(tree(tmp_path, zoo=table, test_user=user))
    assert (marker.path, marker.test) == ("tests/a/test_user.py", "test_it")
    assert marker.place == "tests/a/zoo.py:1"


@pytest.mark.parametrize(
    ("marker", "message"),
    [
        ('contract("Data", f"{1}")', "fact is f'{1}', but only a literal string can be read"),
        ('contract("Data", NAME)', "fact is NAME, but only"),
        ('contract("Data", *NAMES)', "fact is *NAMES, but only"),
        ("contract", "the marker has no arguments"),
        ('contract("Data")', "the marker has no fact"),
        ('contract("Data", " ")', "the marker has no fact"),
        ('contract("Date", "fact")', "'Date' is no area. Choose one of: Models, Data"),
        ('contract("Data", "fact", "broken")', "'broken' is no outcome. Choose one of: works, differs, refused"),
        ('contract("Data", "a\\nb")', "line break"),
        ('contract("Data", "fact", "works", "", "more")', "5 arguments, but contract takes area, fact"),
        ('contract("Data", "fact", areas="Loss")', "'areas' is given twice or unknown"),
        ('contract("Data", "fact", area="Loss")', "'area' is given twice or unknown"),
        ('contract("Data", "fact", reported="HF7")', "'HF7' is no thread. Write REPOSITORY#NUMBER"),
        ('contract("Data", "fact", reported="hf#7")', "'hf#7' is no thread"),
    ],
)
def test_a_malformed_marker_is_named_with_its_file_and_line(marker: str, message: str, tmp_path: Path) -> None:
    text = f"import pytest\n\n@pytest.mark.{marker}\ndef test_it(): ...\n"
    with pytest.raises(builder.MarkerError) as caught:
        builder.read_markers(tree(tmp_path, test_it=text))
    assert str(caught.value).startswith("tests/a/test_it.py:3: ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "text",
    [
        'CASES = [pytest.param(1, marks=pytest.mark.contract("Data", "fact"))]\n',
        'pytestmark = pytest.mark.contract("Data", "fact")\n',
        '@pytest.mark.contract("Data", "fact")\ndef helper(): ...\n',
    ],
)
def test_a_marker_without_a_test_is_named(text: str, tmp_path: Path) -> None:
    with pytest.raises(builder.MarkerError, match=r"^tests/a/test_it\.py:1: this marker belongs to no test"):
        builder.read_markers(tree(tmp_path, test_it=text))


def test_two_outcomes_of_one_fact_are_named(tmp_path: Path) -> None:
    text = "".join(
        f'@pytest.mark.contract("Data", "fact", "{outcome}")\ndef test_{outcome}(): ...\n'
        for outcome in ("works", "refused")
    )
    with pytest.raises(builder.MarkerError, match=r"test_it.py:3: 'refused', but tests/a/test_it.py:1 says 'works'"):
        builder.read_markers(tree(tmp_path, test_it=text))
