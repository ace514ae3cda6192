"""What every benchmark comes to: rows of figures, bars on them, a table, a JSON file, and an exit code."""

import argparse
import json
import math
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.table import Table

Row = dict[str, Any]

_NARROWEST = 160
"""Characters of a line: a terminal with fewer breaks lines, which is better than cut figures."""


@dataclass(frozen=True)
class Bar:
    """A bound on a figure.

    Attributes:
        name: What is bounded.
        value: What was measured.
        limit: The most that it may be.
    """

    name: str
    value: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the value is at most the limit; one that is no number is not."""
        return self.value <= self.limit

    def as_row(self) -> Row:
        """The bar as it is written and printed."""
        return {"name": self.name, "value": self.value, "limit": self.limit, "holds": self.holds}


@dataclass
class Report:
    """The outcome of a benchmark.

    Attributes:
        title: What was measured.
        about: The conditions, such as the number of ranks.
        rows: The figures; all rows have the same columns, and ``None`` where there is no figure, but in the first.
        bars: The bounds.
    """

    title: str
    about: Row = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    bars: list[Bar] = field(default_factory=list)

    def finish(self, path: Path | None) -> int:
        """Prints the tables and writes the JSON file, if one is wanted.

        Returns:
            The exit code: 1 where a bar does not hold, or where there is nothing that could hold.
        """
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(self.as_json(), indent=1, allow_nan=False) + "\n")
        broken = [bar for bar in self.bars if not bar.holds]
        console = Console(width=max(Console().width, _NARROWEST))
        console.print(_table(self.title, self.rows))
        if broken:
            console.print(_table("Bars that do not hold", [bar.as_row() for bar in broken]))
        console.print(f"{len(self.bars) - len(broken)} of {len(self.bars)} bars hold.")
        return int(bool(broken) or not self.bars)

    def as_json(self) -> dict[str, Any]:
        """The whole report, of plain values; a figure that is no number is ``None``."""
        return {
            "about": {"title": self.title, **machine(), **self.about},
            "rows": [_finite(row) for row in self.rows],
            "bars": [_finite(bar.as_row()) for bar in self.bars],
        }


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The command line that all benchmarks share; each adds its own options."""
    parser = argparse.ArgumentParser(
        description=(description or "").partition("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write rows and bars to this file")
    parser.add_argument("--quick", action="store_true", help="measure little, without bars on time")
    return parser


def machine() -> Row:
    """What the figures depend on besides the code."""
    return {
        "machine": platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _cell(value: Any) -> str:
    """A value as tables show it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _finite(row: Row) -> Row:
    return {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}


def _table(title: str, rows: Sequence[Row]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    for column in rows[0] if rows else ():
        is_number = isinstance(rows[0][column], int | float)
        table.add_column(column.replace("_", " "), justify="right" if is_number else "left")
    for row in rows:
        table.add_row(*map(_cell, row.values()))
    return table
