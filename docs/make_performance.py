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
    Measurement("real", "GPT-2 in training on 2 cores", "real"),
    Measurement("sync", "When gradients are summed", "sync"),
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

WHEN_NOT = """\
## When not to use this

A pipeline is for a model that does not fit on one device, or not with its activations. Where something simpler will do,
take that; the figures are those of the larger GPT-2 in [training on 2 cores](#gpt-2-in-training-on-2-cores) and of the
[schedules beside torch's](#beside-torchdistributedpipelining-on-4-ranks).

- **DDP, where every process has room for the whole model with its gradients and optimizer state.** It cuts nothing,
  so it takes any module, and a step may do what it likes. On 2 ranks Chimera holds what DDP holds on each
  ({chimera_states} MB beside {ddp_states} MB) and takes {chimera_to_ddp} of its time with 2 microbatches: nothing is
  gained. From 4 ranks on a rank of Chimera holds 2/D of the model, and a rank of every other schedule 1/D.
- **FSDP2, where there is room for the activations of a process's rows and a fast link between all processes.** It
  shares out all states evenly, whatever the model looks like: {fsdp2_states} MB on each of 2 processes, where the
  fuller rank of 1F1B holds {onef1b_states} MB, as the tied table is at both ends. It knows no bubble, so few rows
  cost it nothing; it took {fsdp2_to_chimera} of Chimera's time here, where one machine's memory is the link. Its
  price is that all weights travel twice in a step and their gradients once, over all processes; a pipeline sends one
  hidden state for each microbatch and boundary.
- **ZB-V (`schedule="zb_v"`), where memory for weights is what is short.** Chimera holds every stage twice, ZB-V once.
  On 4 ranks with stages that sleep it took {zbv_to_chimera} of Chimera's time with 4 microbatches and
  {zbv_to_chimera_8} with 8, with half of the weights and as many activations; `chimera_split`, with Chimera's
  weights, took {split_to_zbv} and {split_to_zbv_8} of ZB-V's.
- **One process, where the model fits and a step is short.** What a step costs beside its work does not shrink with
  the model. For the smaller GPT-2 one process with both cores reached {one_small} of the limit, Chimera
  {chimera_small}.

What a pipeline asks of a model, a loss and a step is in [what works and what is refused](contract.md).
"""

DECIDED = """\
## Decided by measuring

Choices that were made once, by figures of the machine of the tables above, and have no benchmark of their own.

- **Receives are posted one action ahead.** Posted 1, 2 and 8 ahead, a step took 517, 517 and 516 ms, and each further
  one holds a buffer.
- **Ranks of one host hand over through shared memory**, not by gloo over loopback. A hop of 1 MiB took 398 us in the
  place of 770; `chimera_split` on 4 ranks 268.9 ms in the place of 276.6 with messages of 1 MiB, and 274.7 in the place
  of 297.1 with 4 MiB.
- **The gradient of embeddings is dense.** It took 4.1 ms where a sparse one took 0.8, but the table is most often that
  of the head, whose dense gradient took 282 ms and has to be added to it.
"""

NO_FIGURE = "(no figure yet)"


def page() -> str:
    """The whole page as text."""
    sections = (part for measurement in MEASUREMENTS for part in _section(measurement))
    return "\n".join([INTRODUCTION, _when_not(), *sections, DECIDED])


def _when_not() -> str:
    def real(column: str, candidate: str, model: str = "large") -> float | None:
        return _figure("real", column, model=model, N=2, candidate=candidate)

    def peers(schedule: str, microbatches: int) -> float | None:
        return _figure("peers_4", "makespan_ms", schedule=schedule, runtime="ours", N=microbatches)

    def states(candidate: str) -> str:
        found = real("states_MB", candidate)
        return NO_FIGURE if found is None else f"{found:.0f}"

    return WHEN_NOT.format(
        chimera_states=states("chimera"),
        ddp_states=states("ddp"),
        fsdp2_states=states("fsdp2"),
        onef1b_states=states("1f1b"),
        chimera_to_ddp=_share(real("step_ms", "chimera"), real("step_ms", "ddp")),
        fsdp2_to_chimera=_share(real("step_ms", "fsdp2"), real("step_ms", "chimera")),
        zbv_to_chimera=_share(peers("zb_v", 4), peers("chimera", 4)),
        zbv_to_chimera_8=_share(peers("zb_v", 8), peers("chimera", 8)),
        split_to_zbv=_share(peers("chimera_split", 4), peers("zb_v", 4)),
        split_to_zbv_8=_share(peers("chimera_split", 8), peers("zb_v", 8)),
        one_small=_share(real("efficiency", "one process", "small"), 1.0),
        chimera_small=_share(real("efficiency", "chimera", "small"), 1.0),
    )


def _figure(name: str, column: str, **where: Any) -> float | None:
    """A figure of the first row that has certain values, if it was measured."""
    path = FIGURES / f"{name}.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    return next((row[column] for row in rows if all(row[key] == value for key, value in where.items())), None)


def _share(value: float | None, whole: float | None) -> str:
    return NO_FIGURE if value is None or whole is None else f"{value / whole:.0%}"


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
