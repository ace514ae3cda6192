"""The command ``lightning-chimera``: look at schedules, and copy recipes, without a GPU."""

from __future__ import annotations

import contextlib
import difflib
import importlib.metadata
import importlib.resources
import json
from collections.abc import Iterator, Sequence, Set
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from lightning_chimera.schedules import (
    SCHEDULES,
    Action,
    Family,
    Kind,
    Schedule,
    default_num_microbatches,
    get_family,
    read_schedule,
)
from lightning_chimera.timeline import (
    Costs,
    SyncPolicy,
    Timeline,
    cell_text,
    sample,
    simulate,
    synchronize,
    upward_stages,
    write_trace,
)

app = typer.Typer(
    name="lightning-chimera",
    help="Look at pipeline schedules and copy recipes.",
    no_args_is_help=True,
    # Plain messages: a mistake takes a line or two, in a terminal as well as in the log of a job.
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
recipes = typer.Typer(help="List and copy the recipes that come with the package.", no_args_is_help=True)
app.add_typer(recipes, name="recipes")

Name = Annotated[
    str, typer.Argument(help="A schedule, such as chimera or 1f1b, or a .csv or .txt file.", show_default=False)
]
Names = Annotated[
    list[str], typer.Argument(help="Schedules to compare, such as chimera gpipe, or files.", show_default=False)
]
Stages = Annotated[
    int | None,
    typer.Option(help="Number of stages, one for each rank; some schedules cut them further.", show_default=False),
]
Microbatches = Annotated[
    int | None,
    typer.Option(help="Number of microbatches; by default the schedule's own, the largest where several are compared."),
]
Pipes = Annotated[int | None, typer.Option(help="Number of opposite pipes of Chimera.", show_default=False)]
Chunks = Annotated[int | None, typer.Option(help="Stages of a rank for interleaved and hanayo.", show_default=False)]
CostsText = Annotated[str, typer.Option("--costs", help="Time of a forward and a backward as F:B, or as F:I:W.")]
Latency = Annotated[float, typer.Option(help="Time from the end of an action until another rank has its output.")]
Sync = Annotated[SyncPolicy | None, typer.Option(help="When the all-reduces of gradients start.", show_default=False)]
SyncCost = Annotated[float, typer.Option(help="Time of the all-reduce of a stage.")]

_MAX_CELLS = 20_000
"""Bound on stages x microbatches, which keeps every command within seconds."""

_WIDEST = 1000
"""Bound on the width of a table."""

_STYLES = {
    Kind.FORWARD: ("bold blue", "cyan"),
    Kind.BACKWARD: ("bold red", "yellow"),
    Kind.INPUT: ("bold magenta", "magenta"),
    Kind.WEIGHT: ("bold green", "green"),
}
"""The colour of a kind where a pipe runs down the ranks and where it runs up."""


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        with _mistakes():
            number = importlib.metadata.version("lightning-chimera")
        typer.echo(f"lightning-chimera {number}")
        raise typer.Exit


@app.command()
def schedule(
    name: Name,
    stages: Stages = None,
    microbatches: Microbatches = None,
    pipes: Pipes = None,
    chunks: Chunks = None,
    costs: CostsText = "1:2",
    latency: Latency = 0.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")] = False,
) -> None:
    """Print a schedule as a grid of time, with its makespan, bubble, memory and messages."""
    with _mistakes():
        times = Costs.parse(costs, latency=latency)
        (built,) = _build([name], stages, microbatches, pipes=pipes, chunks=chunks)
        timeline = simulate(built, times)
    if as_json:
        typer.echo(json.dumps(_facts(built, times, timeline)))
        return
    console = Console(highlight=False)
    _print_grid(console, timeline)
    console.print(
        f"\n{built.name}, {built.num_stages} stages, {built.num_microbatches} microbatches: "
        f"makespan {timeline.makespan:g}, bubble {timeline.bubble:.1%}, {built.num_messages} messages",
        soft_wrap=True,
    )
    if built.num_ranks > 1 and len(built.placement.stages_of(0)) == built.num_stages:
        console.print("Every rank holds the whole model.")
    console.print(_rank_table(built, timeline))


@app.command()
def plot(
    names: Names,
    out: Annotated[Path, typer.Option(help="The picture to write, .png or .svg.", show_default=False)],
    stages: Stages = None,
    microbatches: Microbatches = None,
    pipes: Pipes = None,
    chunks: Chunks = None,
    costs: CostsText = "1:2",
    latency: Latency = 0.0,
    sync: Sync = None,
    sync_cost: SyncCost = 1.0,
) -> None:
    """Draw schedules below each other on one time axis."""
    # matplotlib takes a second to load, which only this command needs.
    from lightning_chimera.timeline.plot import plot_timelines, save_figure

    with _mistakes():
        times = Costs.parse(costs, latency=latency)
        timelines = []
        for built in _build(names, stages, microbatches, pipes=pipes, chunks=chunks):
            timeline = simulate(built, times)
            timelines.append(timeline if sync is None else synchronize(built, timeline, sync, cost=sync_cost))
        label = f"time (forward {times.forward:g}, backward {times.backward:g})"
        save_figure(plot_timelines(timelines, time_label=label), out)
    typer.echo(f"Wrote {out}")


@app.command()
def compare(
    stages: Annotated[int, typer.Option(help="Number of ranks.", show_default=False)],
    names: Annotated[
        list[str] | None, typer.Argument(help="Schedules to compare; all where none is given.", show_default=False)
    ] = None,
    microbatches: Microbatches = None,
    pipes: Pipes = None,
    chunks: Chunks = None,
    costs: Annotated[
        list[str] | None, typer.Option(help="Times as F:I:W; may be given several times. 1:1:1 by default.")
    ] = None,
    latency: Latency = 0.0,
) -> None:
    """Compare schedules in a table: bubble, weights, activations and messages, each for the same work."""
    with _mistakes():
        ratios = costs or ["1:1:1"]
        times = [Costs.parse(ratio, latency=latency) for ratio in ratios]
        microbatches = 2 * stages if microbatches is None else microbatches
        built: list[Schedule] = []
        for name in names or SCHEDULES:
            option = "" if name.endswith((".csv", ".txt")) else get_family(name).option
            of_all = {"pipes": pipes, "chunks": chunks}
            try:
                built += _build([name], stages, microbatches, **{option: of_all[option]} if option else {})
            except ValueError:
                # Those that were asked for by name must work; of all of them, those that can are compared.
                if names:
                    raise
        table = Table("schedule", "weights", "activations", "messages", *(f"bubble {ratio}" for ratio in ratios))
        for each in built:
            bubbles = [f"{simulate(each, time).bubble:.1%}" for time in times]
            table.add_row(
                each.name,
                _range(each.placement.weight_copies),
                _range(each.peak_activations),
                str(each.num_messages),
                *bubbles,
            )
    console = Console(highlight=False)
    console.print(f"{stages} ranks, {microbatches} microbatches", soft_wrap=True)
    # A narrow terminal must not hide a column.
    width = Measurement.get(console, console.options.update(width=_WIDEST), table).maximum
    Console(highlight=False, width=max(console.width, width)).print(table)


@app.command()
def trace(
    names: Names,
    out: Annotated[Path, typer.Option(help="The trace to write, .json.", show_default=False)],
    stages: Stages = None,
    microbatches: Microbatches = None,
    costs: CostsText = "1:2",
    latency: Latency = 0.0,
) -> None:
    """Write schedules as a trace for ui.perfetto.dev or chrome://tracing; a time of 1 becomes a second."""
    with _mistakes():
        if out.suffix != ".json":
            raise ValueError(f"A trace is written as .json; got {str(out)!r}. Change the suffix.")
        times = Costs.parse(costs, latency=latency)
        write_trace(out, {built.name: simulate(built, times) for built in _build(names, stages, microbatches)})
    typer.echo(f"Wrote {out}")


@recipes.command("ls")
def list_recipes() -> None:
    """List the recipes, each with the first line of its comment."""
    with _mistakes():
        comments = {name: _first_comment(recipe) for name, recipe in _recipes().items()}
    width = max(map(len, comments), default=0)
    for name, comment in comments.items():
        typer.echo(f"{name:<{width}}  {comment}".rstrip())


@recipes.command("cp")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="A recipe, as listed by ls.", show_default=False)],
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The folder to copy it to.", show_default=False)],
) -> None:
    """Copy a recipe to a folder, to change it there; a file that exists is never overwritten."""
    with _mistakes():
        known = _recipes()
        name = name.removesuffix(".yaml")
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1)
            hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
            raise ValueError(f"There is no recipe {name!r}. Known recipes: {', '.join(known)}.{hint}")
        target = folder / f"{name}.yaml"
        folder.mkdir(parents=True, exist_ok=True)
        try:
            with target.open("xb") as file:
                file.write(known[name].read_bytes())
        except FileExistsError:
            raise ValueError(f"{target} exists and is not overwritten. Move it, or choose another folder.") from None
    typer.echo(f"Wrote {target}")


def main() -> None:
    """Run the command line."""
    app()


@contextlib.contextmanager
def _mistakes() -> Iterator[None]:
    """Turn a user's mistake into a message and exit code 2."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def _build(
    names: list[str],
    stages: int | None,
    microbatches: int | None,
    *,
    pipes: int | None = None,
    chunks: int | None = None,
) -> list[Schedule]:
    """Return the schedules, all with the same number of microbatches so that they do the same work."""
    files = {name: read_schedule(name) for name in names if name.endswith((".csv", ".txt"))}
    families = {name: get_family(name) for name in names if name not in files}
    if families and stages is None:
        raise ValueError("Missing option '--stages': the number of stages, one for each rank.")
    if microbatches is None and stages is not None:
        microbatches = max((default_num_microbatches(name, stages) for name in families), default=0)
    if (stages or 0) * (microbatches or 0) > _MAX_CELLS:
        raise ValueError(
            f"{stages} stages x {microbatches} microbatches are more than anyone can look at: draw at most"
            f" {_MAX_CELLS:,} of them. Use fewer stages or microbatches."
        )
    given = {option: value for option, value in (("pipes", pipes), ("chunks", chunks)) if value is not None}
    unused = given.keys() - {family.option for family in families.values()}
    if unused:
        raise ValueError(f"No schedule among {', '.join(names)} has the option --{min(unused)}. Leave it out.")
    return [files[name] if name in files else _make(families[name], stages, microbatches, given) for name in names]


def _make(family: Family, stages: int | None, microbatches: int | None, given: dict[str, int]) -> Schedule:
    return family.build(stages, microbatches, **{key: value for key, value in given.items() if key == family.option})


def _range(values: Sequence[float]) -> str:
    """Return what all ranks have, or the least and the most that one has."""
    least, most = min(values), max(values)
    return f"{most:g}" if least == most else f"{least:g} to {most:g}"


def _facts(built: Schedule, costs: Costs, timeline: Timeline) -> dict[str, object]:
    return {
        "name": built.name,
        "ranks": built.num_ranks,
        "stages": built.num_stages,
        "microbatches": built.num_microbatches,
        "costs": {
            "forward": costs.forward,
            "backward": costs.backward,
            "weight": costs.weight,
            "latency": costs.latency,
        },
        "makespan": timeline.makespan,
        "bubble": timeline.bubble,
        "idle": list(timeline.idle),
        "peak_activations": list(built.peak_activations),
        "weight_copies": list(built.placement.weight_copies),
        "messages": built.num_messages,
        "actions": [[str(action) for action in row] for row in built.rows],
    }


def _print_grid(console: Console, timeline: Timeline) -> None:
    """Print a line for each rank, cut into blocks as wide as the terminal; in whole where the output is no terminal."""
    grid = sample(timeline)
    labels = [f"rank {rank} " for rank in range(timeline.num_ranks)]
    indent = max(map(len, labels))
    width = max(len(cell_text(action)) for row in grid.rows for action in row) + 1
    num_columns = len(grid.rows[0])
    upward = upward_stages(timeline)
    block = max(5, (console.width - indent) // width) if console.is_terminal else num_columns
    for first in range(0, num_columns, block):
        columns = slice(first, first + block)
        # A cell is narrower than many a time, so only every fifth column has its time, with the room of five.
        ticks = [f"{column * grid.column:g}" if column % 5 == 0 else "" for column in range(num_columns)][columns]
        rulers = [ruler.ljust(5 * width) for ruler in ticks if ruler]
        header = "time".ljust(indent) + " " * (width * (-first % 5)) + "".join(rulers)
        console.print(Text(header[: indent + width * len(ticks)].rstrip(), style="dim"), soft_wrap=True)
        for label, row in zip(labels, grid.rows, strict=True):
            line = Text(label.ljust(indent))
            for action in row[columns]:
                line.append(cell_text(action).ljust(width), style=_style(action, upward))
            line.rstrip()
            console.print(line, soft_wrap=True)


def _style(action: Action | None, upward: Set[tuple[int, int]]) -> str:
    return "dim" if action is None else _STYLES[action.kind][(action.pipe, action.stage) in upward]


def _rank_table(built: Schedule, timeline: Timeline) -> Table:
    table = Table("rank", "stages", "weights", "idle", "peak activations")
    facts = zip(built.placement.weight_copies, timeline.idle, built.peak_activations, strict=True)
    for rank, numbers in enumerate(facts):
        stages = ", ".join(map(str, built.placement.stages_of(rank)))
        table.add_row(str(rank), stages, *(f"{number:g}" for number in numbers))
    return table


def _recipes() -> dict[str, Traversable]:
    """Return the recipes of the package by their names, in alphabetical order."""
    files = importlib.resources.files("lightning_chimera.recipes").iterdir()
    found = {file.name.removesuffix(".yaml"): file for file in files if file.name.endswith(".yaml")}
    return dict(sorted(found.items()))


def _first_comment(recipe: Traversable) -> str:
    lines = recipe.read_text(encoding="utf-8").splitlines()
    comments = (line.lstrip("# ").rstrip() for line in lines if line.startswith("#"))
    # Hydra's own directives look like comments: "# @package _global_".
    return next((comment for comment in comments if not comment.startswith("@")), "")


if __name__ == "__main__":
    main()
