import functools
import importlib.metadata
import importlib.resources
import json
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner, Result

from lightning_chimera import cli
from lightning_chimera.schedules import SCHEDULES, chimera
from lightning_chimera.timeline import Costs, chrome_trace, render_timeline, simulate

GRID = """
time   0              5              10             15             20             25
rank 0 F0 F1 .  F2 B2 B2 F3 B3 B3 .  B0 B0 F4 .  B1 B1 F5 F6 B6 B6 F7 B7 B7 .  B4 B4 .  .  B5 B5
rank 1 .  F0 F2 F1 F3 .  B2 B2 B0 B0 B3 B3 B1 B1 F4 F6 .  F5 F7 .  B6 B6 B4 B4 B7 B7 B5 B5 .  .
rank 2 .  F2 F0 F3 F1 .  B0 B0 B2 B2 B1 B1 B3 B3 F6 F4 .  F7 F5 .  B4 B4 B6 B6 B5 B5 B7 B7 .  .
rank 3 F2 F3 .  F0 B0 B0 F1 B1 B1 .  B2 B2 F6 .  B3 B3 F7 F4 B4 B4 F5 B5 B5 .  B6 B6 .  .  B7 B7

chimera, 4 stages, 8 microbatches: makespan 30, bubble 20.0%, 48 messages
"""


def run(*arguments: object) -> Result:
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


def succeed(*arguments: object) -> str:
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def fail(*arguments: object) -> str:
    """Run a command with a mistake in it: it prints a few lines to stderr, nothing else, and no traceback."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    assert 1 <= len(result.stderr.strip().splitlines()) <= 4
    return result.stderr


def test_schedule_prints_the_grid_of_time() -> None:
    output = succeed("schedule", "chimera", "--stages", 4, "--microbatches", 8)
    assert output.startswith(GRID.lstrip("\n"))


def test_schedule_prints_idle_time_and_peak_activations_of_each_rank() -> None:
    table = [line.split("\u2502")[1:-1] for line in succeed("schedule", "chimera", "--stages", 4).splitlines()]
    rows = [[cell.strip() for cell in cells] for cells in table if cells]
    assert rows == [
        ["0", "0, 3", "2", "4", "3"],
        ["1", "1, 2", "2", "4", "4"],
        ["2", "1, 2", "2", "4", "4"],
        ["3", "0, 3", "2", "4", "3"],
    ]


def test_a_wide_grid_is_printed_in_full_where_there_is_no_terminal() -> None:
    lines = succeed("schedule", "gpipe", "--stages", 8, "--microbatches", 100).splitlines()
    timeline = simulate(SCHEDULES["gpipe"].build(8, 100))
    assert [line.replace("  ", " ") for line in lines[1:9]] == [
        line.replace("  ", " ") for line in render_timeline(timeline).splitlines()
    ]
    assert len(lines[1]) > 1000


def test_a_wide_grid_is_cut_into_blocks_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli, "Console", functools.partial(Console, force_terminal=True, color_system=None, width=40))
    lines = succeed("schedule", "chimera", "--stages", 2, "--microbatches", 8).splitlines()
    assert lines[:6] == [
        "time   0              5              10",
        "rank 0 F0 F1 B1 B1 B0 B0 F2 F3 B3 B3 B2",
        "rank 1 F1 F0 B0 B0 B1 B1 F3 F2 B2 B2 B3",
        "time               15             20",
        "rank 0 B2 F4 F5 B5 B5 B4 B4 F6 F7 B7 B7",
        "rank 1 B3 F5 F4 B4 B4 B5 B5 F7 F6 B6 B6",
    ]


def test_json_is_one_object_with_the_facts() -> None:
    facts = json.loads(succeed("schedule", "chimera", "--stages", 2, "--costs", "1:1:1", "--latency", 0.5, "--json"))
    assert facts == {
        "name": "chimera",
        "ranks": 2,
        "stages": 2,
        "microbatches": 2,
        "costs": {"forward": 1.0, "backward": 2.0, "weight": 1.0, "latency": 0.5},
        "makespan": 7.0,
        "bubble": pytest.approx(1 / 7),
        "idle": [1.0, 1.0],
        "peak_activations": [2, 2],
        "weight_copies": [2, 2],
        "messages": 4,
        "actions": [["0F0", "1F1.1", "1B1.1", "0B0"], ["0F1.1", "1F0", "1B0", "0B1.1"]],
    }


@pytest.mark.parametrize(("name", "expected"), [("chimera", 4), ("gpipe", 8), ("1f1b", 8)])
def test_the_number_of_microbatches_defaults_to_the_schedules_own(name: str, expected: int) -> None:
    assert json.loads(succeed("schedule", name, "--stages", 4, "--json"))["microbatches"] == expected


def test_plot_writes_a_picture(tmp_path: Path) -> None:
    out = tmp_path / "new" / "figure.svg"
    assert succeed("plot", "gpipe", "chimera", "--stages", 4, "--out", out).split() == ["Wrote", str(out)]
    assert out.read_text().count("<!-- gpipe: makespan 33") == 1
    # Both run the same 8 microbatches, though 4 are the default of chimera alone.
    assert out.read_text().count("<!-- chimera: makespan 30") == 1


def test_plot_draws_all_reduces(tmp_path: Path) -> None:
    out = tmp_path / "figure.svg"
    succeed("plot", "chimera", "--stages", 4, "--sync", "eager-opt", "--sync-cost", 3, "--out", out)
    assert "<!-- chimera: makespan 16, bubble 25.0%, all-reduces end at 20 -->" in out.read_text()


def test_schedules_take_their_options_and_say_when_a_rank_holds_the_whole_model() -> None:
    output = succeed("schedule", "chimera", "--stages", 4, "--pipes", 4)
    assert "Every rank holds the whole model." in output
    facts = json.loads(succeed("schedule", "interleaved", "--stages", 4, "--chunks", 3, "--json"))
    assert (facts["ranks"], facts["stages"], facts["weight_copies"]) == (4, 12, [1, 1, 1, 1])
    assert "Every rank" not in succeed("schedule", "chimera", "--stages", 4)


def test_a_schedule_may_come_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n")
    assert "mine, 2 stages, 2 microbatches: makespan 9" in succeed("schedule", path)
    out = tmp_path / "figure.svg"
    succeed("plot", path, "chimera", "--stages", 2, "--out", out)
    assert "<!-- mine: makespan 9" in out.read_text()


def test_compare_prints_a_line_for_each_schedule_and_a_column_for_each_ratio() -> None:
    output = succeed("compare", "1f1b", "zb_v", "chimera_split", "--stages", 4, "--costs", "1:1:1", "--costs", "1:2:1")
    table = [[cell.strip() for cell in line.split("\u2502")[1:-1]] for line in output.splitlines()]
    assert [cells for cells in table if cells] == [
        ["1f1b", "1", "1 to 4", "48", "27.3%", "27.3%"],
        ["zb_v", "1", "4", "96", "5.9%", "12.3%"],
        ["chimera_split", "2", "4", "48", "4.0%", "8.6%"],
    ]


def test_compare_leaves_out_what_the_numbers_do_not_allow_unless_it_is_asked_for() -> None:
    output = succeed("compare", "--stages", 4, "--microbatches", 4)
    assert all(f" {name} " in output for name in SCHEDULES if not name.startswith("dualpipe"))
    assert "dualpipe" not in output
    assert "at least twice as many" in fail("compare", "dualpipe", "--stages", 4, "--microbatches", 4)


def test_trace_writes_a_trace(tmp_path: Path) -> None:
    out = tmp_path / "trace.json"
    succeed("trace", "chimera", "--stages", 4, "--microbatches", 6, "--costs", "1:3", "--out", out)
    assert json.loads(out.read_text()) == chrome_trace({"chimera": simulate(chimera(4, 6), Costs(1, 3))})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("schedule", "chimea", "--stages", 4), "Did you mean 'chimera'?"),
        (("schedule", "chimera", "--stages", 3), "even number of stages"),
        (("schedule", "chimera", "--stages", 0), "at least one stage"),
        (("schedule", "chimera", "--stages", 4, "--microbatches", 0), "at least one microbatch"),
        (("schedule", "chimera", "--stages", "four"), "Invalid value for '--stages'"),
        (("schedule", "chimera"), "Missing option '--stages'"),
        (("schedule", "chimera", "--stages", 8, "--pipes", 6), "it makes 2, 4, 8 pipes; got 6"),
        (("schedule", "1f1b", "--stages", 8, "--pipes", 2), "has the option --pipes"),
        (("schedule", "{folder}/none.csv"), "none.csv"),
        (("schedule", "{folder}/file"), "no schedule '"),
        (("schedule", "chimera", "--stages", 4, "--costs", "1:x"), "'1:x' is no cost"),
        (("schedule", "chimera", "--stages", 4, "--costs", "0:0"), "'0:0' is no cost"),
        (("schedule", "chimera", "--stages", 4, "--latency", "-1"), "latency time must be"),
        (("schedule", "chimera", "--stages", 4, "--latency", "nan"), "latency time must be"),
        (("plot", "chimera", "gpip", "--stages", 4, "--out", "{folder}/a.png"), "Did you mean 'gpipe'?"),
        (("plot", "chimera", "--stages", 4, "--out", "{folder}/a.pdf"), "written as .png or .svg"),
        (("plot", "chimera", "--stages", 4, "--out", "{folder}/file/a.png"), "file"),
        (("plot", "chimera", "--stages", 4, "--out", "{folder}/folder.png"), "folder.png"),
        (("trace", "chimera", "--stages", 4, "--out", "{folder}/a.txt"), "written as .json"),
        (("trace", "chimera", "--stages", 4, "--out", "{folder}/file/a.json"), "file"),
        (("trace", "chimera", "--stages", 4, "--out", "{folder}/folder.json"), "folder.json"),
        (("nonsense",), "No such command 'nonsense'"),
        (("recipes", "cp", "gpt2", "{folder}"), "no recipe 'gpt2'"),
    ],
)
def test_a_mistake_is_answered_in_a_few_lines(arguments: tuple[object, ...], message: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("not a folder")
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "folder.json").mkdir()
    before = sorted(tmp_path.rglob("*"))
    assert message in fail(*(str(argument).format(folder=tmp_path) for argument in arguments))
    assert sorted(tmp_path.rglob("*")) == before


@pytest.fixture
def two_recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "packaged"
    (folder / "slurm").mkdir(parents=True)
    (folder / "__init__.py").touch()
    (folder / "README.md").write_text("# not a recipe\n")
    (folder / "gpt2_tiny.yaml").write_text(
        "# @package _global_\n# Train a tiny GPT-2: with [brackets].\n# More.\na: 1\n"
    )
    (folder / "bert_tiny.yaml").write_text("defaults: []\n# Train a tiny BERT.\n")
    monkeypatch.setattr(importlib.resources, "files", {"lightning_chimera.recipes": folder}.__getitem__)
    return folder


def test_recipes_are_listed_with_their_first_comment(two_recipes: Path) -> None:
    lines = [line.split(maxsplit=1) for line in succeed("recipes", "ls").splitlines()]
    assert lines == [["bert_tiny", "Train a tiny BERT."], ["gpt2_tiny", "Train a tiny GPT-2: with [brackets]."]]


@pytest.mark.parametrize("name", ["gpt2_tiny", "gpt2_tiny.yaml"])
def test_a_recipe_is_copied_as_it_is(two_recipes: Path, tmp_path: Path, name: str) -> None:
    assert "gpt2_tiny.yaml" in succeed("recipes", "cp", name, tmp_path / "mine" / "runs")
    copy = tmp_path / "mine" / "runs" / "gpt2_tiny.yaml"
    assert copy.read_bytes() == (two_recipes / "gpt2_tiny.yaml").read_bytes()


def test_a_copy_never_overwrites(two_recipes: Path, tmp_path: Path) -> None:
    mine = tmp_path / "gpt2_tiny.yaml"
    mine.write_text("mine")
    assert f"{mine} exists and is not overwritten" in fail("recipes", "cp", "gpt2_tiny", tmp_path)
    assert mine.read_text() == "mine"


def test_a_misspelt_recipe_is_refused_with_the_nearest(two_recipes: Path, tmp_path: Path) -> None:
    message = fail("recipes", "cp", "gpt2_tyni", tmp_path / "new")
    assert "Known recipes: bert_tiny, gpt2_tiny. Did you mean 'gpt2_tiny'?" in message
    assert not (tmp_path / "new").exists()


def test_a_recipe_cannot_be_copied_into_a_file(two_recipes: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "file" in fail("recipes", "cp", "gpt2_tiny", tmp_path / "file")


def test_missing_recipes_are_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib.resources, "files", missing)
    assert "No module named 'lightning_chimera.recipes'" in fail("recipes", "ls")


def test_the_packaged_recipes_can_be_listed() -> None:
    pytest.importorskip("lightning_chimera.recipes")
    packaged = [file.name for file in importlib.resources.files("lightning_chimera.recipes").iterdir()]
    expected = sorted(name.removesuffix(".yaml") for name in packaged if name.endswith(".yaml"))
    assert [line.split()[0] for line in succeed("recipes", "ls").splitlines() if line] == expected


def test_the_version_is_that_of_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", {"lightning-chimera": "1.2.3"}.__getitem__)
    assert succeed("--version") == "lightning-chimera 1.2.3\n"


@pytest.mark.parametrize("arguments", [(), ("recipes",)])
def test_without_a_command_the_help_is_shown(arguments: tuple[str, ...]) -> None:
    result = run(*arguments)
    assert result.exit_code == 2
    assert "Usage:" in result.output
