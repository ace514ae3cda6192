"""Makes docs/contract.md, "What works, what is refused", from the `contract` markers of the tests.

The markers are read from the sources, so nothing has to be imported or run, and all they say is literal.

python docs/make_contract.py
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "contract.md"

AREAS = (
    "Models",
    "Data",
    "Loss",
    "Loop",
    "Logging and metrics",
    "Callbacks",
    "Loggers and profilers",
    "Precision",
    "Launch",
    "Faults",
    "The module",
)
# How an outcome is shown, in the order of a table's rows.
OUTCOMES = {"works": "works", "differs": "*differs*", "refused": "**refused**"}
# Short names of repositories in `reported`; any other is given as owner/name.
REPOSITORIES = {
    "DS": "deepspeedai/DeepSpeed",
    "HF": "huggingface/transformers",
    "Lightning": "Lightning-AI/pytorch-lightning",
    "MLM": "NVIDIA/Megatron-LM",
    "NeMo": "NVIDIA-NeMo/NeMo",
    "PT": "pytorch/pytorch",
    "TT": "pytorch/torchtitan",
    "torchmetrics": "Lightning-AI/torchmetrics",
}
FIELDS = ("area", "fact", "outcome", "reported")
INTRODUCTION = """\
# What works, what is refused

What a person who knows a plain Trainer or DDP may ask, and the test that shows the answer. *Differs* works, but not as
in DDP; **refused** ends with an error that says what was given, the rule, and the way out, before training or in its
first step. Each line is read from a marker of the test beside it: `python docs/make_contract.py` writes this page.
"""


class MarkerError(ValueError):
    """A marker that can't become a line of the page; the message starts with its file and line."""


@dataclass(frozen=True)
class Marker:
    """One marker of one test.

    Attributes:
        area: Heading of its table.
        fact: What a user may ask.
        outcome: One of `OUTCOMES`.
        reported: Public threads about it, each as repository#number.
        test: The test's name, with its class.
        path: The test's file, from the root of the repository.
        place: Where the marker stands, for messages.
    """

    area: str
    fact: str
    outcome: str
    reported: tuple[str, ...]
    test: str
    path: str
    place: str


def read_markers(root: Path = ROOT) -> list[Marker]:
    """Reads the markers of all tests.

    Args:
        root: The repository; what lies in its `tests` is read.

    Raises:
        MarkerError: A marker is malformed, belongs to no test, or contradicts another one.
    """
    paths = sorted((root / "tests").rglob("*.py"))
    trees = {path.relative_to(root).as_posix(): ast.parse(path.read_text()) for path in paths}
    tests = [(path, name, test) for path, tree in trees.items() for name, test in _tests(tree)]
    markers = []
    for path, name, test in tests:
        markers += [_marker(call, path, path, name) for decorator in test.decorator_list for call in _calls(decorator)]
    for path, tree in trees.items():
        own = {id(call) for _, _, test in tests for decorator in test.decorator_list for call in _calls(decorator)}
        for call, table in _tables(tree, own):
            users = [user for user in tests if any(_mentions(decorator, table) for decorator in user[2].decorator_list)]
            users = [user for user in users if user[0] == path] or users
            if not users:
                raise MarkerError(
                    f"{path}:{call.lineno}: this marker belongs to no test. Put it on a test function, on a"
                    " pytest.param of its parametrize, or in a list at the top of a file that a parametrize names."
                )
            markers += [_marker(call, path, user, name) for user, name, _ in users]
    _check_agreement(markers)
    return markers


def _tests(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef]]:
    """The test functions of a file, with the names that pytest gives them."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _tests(node, f"{prefix}{node.name}::")
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test"):
            yield prefix + node.name, node


def _calls(tree: ast.AST) -> Iterator[ast.Attribute | ast.Call]:
    """Every use of the marker, in the order of the lines: calls of it, and bare ones, which are mistakes."""
    found: dict[int, ast.Attribute | ast.Call] = {}
    for node in ast.walk(tree):
        use = node.func if isinstance(node, ast.Call) else node
        if isinstance(use, ast.Attribute) and use.attr == "contract" and ast.unparse(use.value).endswith("mark"):
            found.setdefault(id(use), node)  # a call is walked before the attribute in it
    yield from sorted(found.values(), key=lambda node: (node.lineno, node.col_offset))


def _tables(tree: ast.Module, own: set[int]) -> Iterator[tuple[ast.Attribute | ast.Call, str | None]]:
    """The markers that do not stand on a test, with the name of the list at the top of the file that they stand in."""
    for statement in tree.body:
        name = None
        if isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            name = statement.targets[0].id
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            name = statement.target.id
        for call in _calls(statement):
            if id(call) not in own:
                yield call, name


def _mentions(tree: ast.AST, name: str | None) -> bool:
    return any(
        (isinstance(node, ast.Name) and node.id == name) or (isinstance(node, ast.Attribute) and node.attr == name)
        for node in ast.walk(tree)
    )


def _marker(call: ast.Attribute | ast.Call, written_in: str, path: str, test: str) -> Marker:
    """Checks one marker."""
    place = f"{written_in}:{call.lineno}"
    given = _arguments(call, place)
    for name in ("area", "fact"):
        if not given.get(name, "").strip():
            raise MarkerError(f"{place}: the marker has no {name}. Write contract(area, fact, outcome, reported).")
    outcome = given.get("outcome", "works")
    for name, value, known in (("area", given["area"], AREAS), ("outcome", outcome, OUTCOMES)):
        if value not in known:
            raise MarkerError(f"{place}: {value!r} is no {name}. Choose one of: {', '.join(known)}.")
    if "\n" in given["fact"]:
        raise MarkerError(f"{place}: the fact has a line break. It is one line of a table.")
    reported = tuple(thread.strip() for thread in given.get("reported", "").split(",") if thread.strip())
    for thread in reported:
        _address(thread, place)
    return Marker(given["area"], given["fact"], outcome, reported, test, path, place)


def _arguments(call: ast.Attribute | ast.Call, place: str) -> dict[str, str]:
    """The arguments by name, all of them literal strings."""
    if isinstance(call, ast.Attribute):
        raise MarkerError(f"{place}: the marker has no arguments. Write contract(area, fact, outcome, reported).")
    if len(call.args) > len(FIELDS):
        raise MarkerError(f"{place}: {len(call.args)} arguments, but contract takes {', '.join(FIELDS)}.")
    positional = zip(FIELDS, call.args, strict=False)
    given: dict[str, str] = {}
    for name, value in (*positional, *((keyword.arg, keyword.value) for keyword in call.keywords)):
        if name not in FIELDS or name in given:
            raise MarkerError(f"{place}: {name!r} is given twice or unknown; contract takes {', '.join(FIELDS)}.")
        if not isinstance(value, ast.Constant) or not isinstance(value.value, str):
            raise MarkerError(f"{place}: {name} is {ast.unparse(value)}, but only a literal string can be read.")
        given[name] = value.value
    return given


def _address(thread: str, place: str) -> str:
    """The address of a thread such as HF#1 or owner/name#1; GitHub leads from an issue's to a pull request's."""
    repository, _, number = thread.partition("#")
    repository = REPOSITORIES.get(repository, repository)
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repository) or not number.isdecimal():
        raise MarkerError(
            f"{place}: {thread!r} is no thread. Write REPOSITORY#NUMBER, separated by commas, with one of"
            f" {', '.join(REPOSITORIES)}, or owner/name."
        )
    return f"https://github.com/{repository}/issues/{number}"


def _check_agreement(markers: list[Marker]) -> None:
    """One fact has one outcome."""
    first: dict[tuple[str, str], Marker] = {}
    for marker in markers:
        other = first.setdefault((marker.area, marker.fact), marker)
        if other.outcome != marker.outcome:
            raise MarkerError(f"{marker.place}: {marker.outcome!r}, but {other.place} says {other.outcome!r} of that.")


def render(markers: list[Marker]) -> str:
    """Writes the page: a table for each area, a row for each fact.

    Args:
        markers: As read from the tests.
    """
    parts = [INTRODUCTION]
    for area in AREAS:
        facts: dict[str, list[Marker]] = {}
        for marker in markers:
            if marker.area == area:
                facts.setdefault(marker.fact, []).append(marker)
        if facts:
            ordered = sorted(facts.values(), key=lambda same: _order(same[0]))
            rows = "\n".join(map(_row, ordered))
            parts.append(f"## {area}\n\n| what | outcome | shown by | reported in |\n|---|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def _order(marker: Marker) -> tuple[int, str, str]:
    """What works comes first; then by the letters of the fact, whatever the marks around them."""
    return list(OUTCOMES).index(marker.outcome), re.sub(r"\W", "", marker.fact).lower(), marker.fact


def _row(same: list[Marker]) -> str:
    """The row of a fact, with every test that shows it."""
    tests = dict.fromkeys(
        f"[`{marker.path.removeprefix('tests/')}::{marker.test}`](../{marker.path})" for marker in same
    )
    threads = dict.fromkeys(
        f"[{thread}]({_address(thread, marker.place)})" for marker in same for thread in marker.reported
    )
    fact = same[0].fact.replace("|", "\\|")
    return f"| {fact} | {OUTCOMES[same[0].outcome]} | {'<br>'.join(tests)} | {', '.join(threads)} |"


def main() -> None:
    PAGE.write_text(render(read_markers()))


if __name__ == "__main__":
    main()
