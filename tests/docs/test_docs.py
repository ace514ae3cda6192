"""Everything that the documents show is tried: commands are run, code is executed, links and tables are compared."""

import csv
import inspect
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple
from urllib.parse import urlparse

import lightning as L
import pytest
from lightning.pytorch.strategies import StrategyRegistry
from typer.testing import CliRunner

import lightning_chimera
from lightning_chimera.cli import app
from lightning_chimera.schedules import SCHEDULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
USAGE = (ROOT / "docs/usage.md").read_text()


class Block(NamedTuple):
    page: Path
    language: str
    text: str


def blocks(language: str) -> list[Block]:
    found = []
    for page in PAGES:
        for match in re.finditer(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            found.append(Block(page, language, match[1]))
    return found


def commands() -> list[str]:
    """Each line of each console block, and each command in the README's table."""
    lines = [line for block in blocks("console") for line in block.text.splitlines()]
    lines += re.findall(r"`(lightning-chimera[^`]*)`", (ROOT / "README.md").read_text())
    return list(dict.fromkeys(line.partition("  #")[0].strip() for line in lines if line.strip()))


CHIMERA_COMMANDS = [line for line in commands() if line.startswith("lightning-chimera ")]
TRAIN_COMMANDS = [line for line in commands() if line.startswith("lightning-chimera-train ")]
MAKE_COMMANDS = [line for line in commands() if line.startswith("make ")]
SLURM_COMMANDS = [line for line in commands() if "sbatch " in line or "launch=submitit" in line]
BENCHMARK_COMMANDS = [line for line in commands() if line.startswith("python -m benchmarks.")]


def test_every_shown_command_is_tried_somewhere() -> None:
    tried = [*CHIMERA_COMMANDS, *TRAIN_COMMANDS, *MAKE_COMMANDS, *BENCHMARK_COMMANDS, *SLURM_COMMANDS]
    assert [line for line in commands() if line not in tried] == []
    assert len(tried) > 10


@pytest.mark.parametrize("command", CHIMERA_COMMANDS)
def test_a_shown_command_succeeds(command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command.split()[1:])
    assert result.exit_code == 0, result.output


# What is shown in the recipes' page trains for two steps; the whole run of the README is what `make train` does.
@pytest.mark.parametrize("command", [line for line in TRAIN_COMMANDS if "max_steps=" in line])
def test_a_shown_training_command_succeeds(command: str, tmp_path: Path) -> None:
    arguments = [*command.split()[1:], f"paths.runs_dir={tmp_path}"]
    line = [sys.executable, "-m", "lightning_chimera.train", *arguments]
    result = subprocess.run(line, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "run folder" in result.stdout


# tests/cluster submits these scripts to a real cluster.
@pytest.mark.parametrize("command", [line for line in SLURM_COMMANDS if "sbatch " in line])
def test_a_shown_batch_script_exists(command: str) -> None:
    (script,) = (word for word in command.split() if word.endswith(".sbatch"))
    assert (ROOT / script).exists()


@pytest.mark.parametrize("command", MAKE_COMMANDS)
def test_a_shown_make_target_exists(command: str) -> None:
    target = command.split()[1]
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if "```python" in page.read_text()], ids=lambda page: page.name
)
def test_shown_code_runs(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for method in ("fit", "save_checkpoint"):
        monkeypatch.setattr(L.Trainer, method, lambda *_args, **_kwargs: None)
    known = {"L": L, "module": None, "datamodule": None}
    for block in blocks("python"):
        if block.page == page:  # a later block may use what an earlier one has defined
            exec(compile(block.text, str(page), "exec"), known)


@pytest.mark.parametrize(
    "expression", re.findall(r"`((?:Trainer|ChimeraStrategy)\([^`]*\))`", (ROOT / "README.md").read_text())
)
def test_shown_arguments_are_accepted(expression: str) -> None:
    known = {
        "Trainer": lambda **options: L.Trainer(accelerator="cpu", **options),
        "ChimeraStrategy": lightning_chimera.ChimeraStrategy,
        "lightning_chimera": lightning_chimera,
    }
    if "..." not in expression:
        eval(expression, known)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        url = urlparse(target)
        if url.scheme:
            continue
        linked = page if not url.path else page.parent / url.path
        assert linked.exists(), f"{page.name} links to {target}"
        if url.fragment:
            titles = re.findall(r"^#+ (.*)$", linked.read_text(), re.MULTILINE)
            # As GitHub names a heading: without what is neither a letter nor a digit.
            assert url.fragment in [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]


def test_the_table_of_arguments_is_that_of_the_constructor() -> None:
    shown = re.findall(r"^\| `(\w+)` \|", USAGE, re.MULTILINE)
    own = list(inspect.signature(lightning_chimera.ChimeraStrategy).parameters)
    assert shown == own[: own.index("accelerator")]


def test_the_usual_numbers_of_microbatches_are_those_of_the_schedules() -> None:
    ones = sorted(name for name, family in SCHEDULES.items() if family.microbatches_per_rank == 1)
    assert {family.microbatches_per_rank for family in SCHEDULES.values()} == {1, 2}
    row = re.search(r"^\| `num_microbatches` \| one for each rank of the pipeline with (.*), two ", USAGE, re.MULTILINE)
    assert row is not None
    assert sorted(re.findall(r"`(\w+)`", row[1])) == ones
    said = re.sub(r"\s+", " ", inspect.getdoc(lightning_chimera.ChimeraStrategy) or "")
    argument = re.search(r"num_microbatches: Parts of a batch; by default one (.*), and two with all others", said)
    assert argument is not None
    assert sorted(re.findall(r"``(\w+)``", argument[1])) == ones


def test_the_readme_names_every_strategy() -> None:
    registered = [name for name in StrategyRegistry.available_strategies() if name.startswith("chimera")]
    table = re.findall(r"^\| `(\w+)` \|", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(registered)


def test_the_page_of_schedules_is_made_from_the_code() -> None:
    path = ROOT / "docs" / "make_schedules.py"
    made: dict[str, Any] = runpy.run_path(str(path))
    text = (ROOT / "docs" / "schedules.md").read_text()
    assert text == made["page"](), "run python docs/make_schedules.py"
    assert all(f"`{name}`" in text for name in SCHEDULES)
    shown = re.findall(r"images/schedules/(\w+)\.png", text)
    assert sorted(file.stem for file in (ROOT / "docs" / "images" / "schedules").iterdir()) == sorted(shown)


# tests/distributed/test_fine_tuning.py runs a few steps of it.
LONG_EXAMPLES = ["fine_tune_gpt2.py"]


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(path, marks=pytest.mark.long if path.name in LONG_EXAMPLES else (), id=path.name)
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_an_example_trains_and_gets_better(script: Path, tmp_path: Path) -> None:
    line = [sys.executable, str(script)]
    result = subprocess.run(line, cwd=tmp_path, env=os.environ, capture_output=True, text=True, timeout=110)
    assert result.returncode == 0, result.stdout + result.stderr
    [metrics] = tmp_path.glob("lightning_logs/version_*/metrics.csv")
    rows = list(csv.DictReader(metrics.open()))
    losses = [float(row["train/loss"]) for row in rows if row["train/loss"]]
    assert mean(losses[-5:]) < mean(losses[:5]) - 0.1  # masks make one step's loss vary by about as much


@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_an_example_differs_from_plain_lightning_in_two_lines(script: Path) -> None:
    numbered = [line for line in script.read_text().splitlines() if re.search(r"# (?:noqa: F401  )?[12]\. ", line)]
    assert len(numbered) == 2
    assert "import lightning_chimera" in numbered[0]
    assert 'strategy="chimera"' in numbered[1]
