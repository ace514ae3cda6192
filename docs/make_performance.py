"""Makes docs/performance.md from the benchmarks and from the figures that they have left in docs/figures.

python docs/make_performance.py            # the page, from the figures that are there
python docs/make_performance.py measure    # all figures anew first; exit code 1 where a bar does not hold
"""

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "performance.md"
FIGURES = ROOT / "docs" / "figures"


class Measurement(NamedTuple):
    """One run of a benchmark; its figures lie in a file of its name."""

    name: str
    title: str
    benchmark: str
    options: tuple[str, ...] = ()

    @property
    def path(self) -> Path:
        return FIGURES / f"{self.name}.json"

    @property
    def command(self) -> list[str]:
        return ["python", "-m", f"benchmarks.{self.benchmark}", *self.options]


MEASUREMENTS = [
    Measurement("schedules_4", "Schedules on 4 ranks", "schedules"),
    Measurement("schedules_8", "Schedules on 8 ranks", "schedules", ("--ranks", "8")),
    Measurement("peers_2", "Beside torch.distributed.pipelining on 2 ranks", "peers", ("--ranks", "2")),
    Measurement("peers_4", "Beside torch.distributed.pipelining on 4 ranks", "peers"),
    Measurement("peers_8", "Beside torch.distributed.pipelining on 8 ranks", "peers", ("--ranks", "8")),
    Measurement("split_backward", "A split backward", "split_backward"),
    Measurement("overhead", "Besides the work", "overhead"),
]

INTRODUCTION = """\
# Performance

What is measured, by which command, and what came of it. The figures are those of one machine, which stands above each
table; this page is made of them, and

```console
make bench   # measure everything anew on a machine with nothing else to do, and write this page
```

Every benchmark bounds its figures by bars, and leaves with exit code 1 where one does not hold. With `--json PATH` it
writes what it found to a file: `rows`, the figures, and `bars`, each with its `name`, `value`, `limit` and whether it
`holds`, which is where the value is at most the limit. With `--quick` it only shows that it works.
"""


def page() -> str:
    """The whole page as text."""
    return "\n".join([INTRODUCTION, *(part for measurement in MEASUREMENTS for part in _section(measurement))])


def _section(measurement: Measurement) -> Iterator[str]:
    yield f"## {measurement.title}\n"
    if measurement is next(other for other in MEASUREMENTS if other.benchmark == measurement.benchmark):
        source = (ROOT / "benchmarks" / f"{measurement.benchmark}.py").read_text()
        yield f"{ast.get_docstring(ast.parse(source))}\n"
    yield f"```console\n{' '.join(measurement.command)}\n```\n"
    if not measurement.path.exists():
        yield "No figures yet.\n"
        return
    found = json.loads(measurement.path.read_text())
    yield _conditions(found["about"])
    yield _table(found["rows"])
    broken = [bar for bar in found["bars"] if not bar["holds"]]
    yield f"{len(found['bars']) - len(broken)} of {len(found['bars'])} bars hold.\n"
    if broken:
        yield _table(broken)


def _conditions(about: dict[str, Any]) -> str:
    return (
        ", ".join(f"{key.replace('_', ' ')} {_cell(value)}" for key, value in about.items() if key != "title") + ".\n"
    )


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [[key.replace("_", " ") for key in rows[0]], ["---"] * len(rows[0])]
    lines += [[_cell(value) for value in row.values()] for row in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def measure() -> int:
    """Runs every benchmark; returns 1 where a bar does not hold."""
    code = 0
    for measurement in MEASUREMENTS:
        command = [sys.executable, *measurement.command[1:], "--json", str(measurement.path)]
        code |= subprocess.run(command, cwd=ROOT).returncode != 0
    return code


def main() -> int:
    code = measure() if sys.argv[1:] == ["measure"] else 0
    PAGE.write_text(page())
    return code


if __name__ == "__main__":
    sys.exit(main())
