"""Makes docs/schedules.md and its pictures in docs/images/schedules from the schedules themselves.

python docs/make_schedules.py
"""

import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from lightning_chimera.schedules import (
    SCHEDULES,
    Schedule,
    chimera,
    chimera_doubling,
    chimera_greedy,
    chimera_halving,
    chimera_split,
    chimera_split_in_place,
    chimera_split_v,
    dualpipe,
    dualpipe_v,
    gems,
    gpipe,
    hanayo,
    interleaved,
    one_f_one_b,
    one_f_one_b_pb,
    one_f_one_b_so,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from lightning_chimera.timeline import Costs, SyncPolicy, Timeline, simulate, synchronize

FOLDER = Path(__file__).parent
IMAGES = FOLDER / "images" / "schedules"
EQUAL, LONG = Costs(1, 1), Costs(1, 2)


def timelines(*schedules: Schedule, costs: Costs = LONG) -> list[Timeline]:
    return [dataclasses.replace(simulate(schedule, costs), name=title(schedule)) for schedule in schedules]


def title(schedule: Schedule) -> str:
    """What a picture calls a schedule: its name and what sets it apart from others of that name."""
    pipes = f", {schedule.num_pipes} pipes" if schedule.num_pipes > 2 else ""
    stages = f", {schedule.num_stages} stages" if schedule.num_stages != schedule.num_ranks else ""
    return f"{schedule.name}{pipes}{stages}, N = {schedule.num_microbatches}"


def synced(schedule: Schedule, policy: SyncPolicy) -> Timeline:
    timeline = synchronize(schedule, simulate(schedule, LONG), policy, cost=4)
    return dataclasses.replace(timeline, name=f"{schedule.name}, {policy}")


class Section(NamedTuple):
    title: str
    module: str
    picture: Callable[[], list[Timeline]]
    caption: str = ""


SECTIONS = [
    Section("GPipe", "gpipe", lambda: timelines(gpipe(4, 8))),
    Section(
        "1F1B",
        "one_f_one_b",
        lambda: timelines(
            *(build(4, 8) for build in (one_f_one_b, one_f_one_b_pb, one_f_one_b_so)), costs=Costs(1, 2, 0.5)
        ),
        "In the picture a message takes half a forward.",
    ),
    Section(
        "Chimera",
        "chimera",
        lambda: timelines(chimera(4, 3), chimera(4, 4), chimera(4, 6), chimera(4, 8), chimera(8, 8, pipes=4)),
    ),
    Section("Chimera with forward doubling", "chimera_doubling", lambda: timelines(chimera_doubling(4, 16))),
    Section("Chimera with backward halving", "chimera_halving", lambda: timelines(chimera_halving(4, 8))),
    Section("Chimera by list scheduling", "chimera_greedy", lambda: timelines(chimera_greedy(4, 8))),
    Section(
        "Chimera with a split backward",
        "chimera_split",
        lambda: timelines(
            *(build(4, 8) for build in (chimera_split_in_place, chimera_split, chimera_split_v)),
            chimera_split(4, 8, pipes=4),
        ),
    ),
    Section("GEMS", "gems", lambda: timelines(gems(4, 4))),
    Section(
        "Interleaved 1F1B",
        "interleaved",
        lambda: timelines(interleaved(4, 8), interleaved(4, 8, chunks=4), interleaved(4, 6)),
    ),
    Section("Hanayo", "hanayo", lambda: timelines(*(hanayo(4, 4, chunks=2 * waves) for waves in (1, 2, 4)))),
    Section("ZB-H1 and ZB-H2", "zero_bubble", lambda: timelines(zb_h1(4, 8), zb_h2(4, 8))),
    Section("ZB-V, V-Half and V-Min", "v_shaped", lambda: timelines(*(build(4, 8) for build in (zb_v, v_half, v_min)))),
    Section("DualPipe and DualPipeV", "dualpipe", lambda: timelines(dualpipe(4, 8), dualpipe_v(4, 8))),
]

INTRODUCTION = """\
# Schedules

This page and its pictures are made from the code by `python docs/make_schedules.py`.

A schedule says, for each rank, what it runs in which order. It is a value: a small function of the numbers of ranks, D,
and of microbatches, N, makes it; it can be printed, compared, checked, simulated, drawn and written to a file.

```console
lightning-chimera schedule chimera --stages 4 --microbatches 8
lightning-chimera plot chimera 1f1b zb_v --stages 4 --microbatches 8 --costs 1:1:1 --out schedules.png
lightning-chimera compare --stages 4 --microbatches 8 --costs 1:1:1 --costs 1:1.5:1
```

F is the forward of a stage for one microbatch and B its backward. A split backward has two parts: I, the gradient of
the stage's input, which the stage before waits for, and W, the gradients of its weights, which nobody waits for. Times
and memory are in the units of an equal share of the model for each rank: where a rank runs several stages of a pipe,
each of them takes and keeps a part of that. A forward takes 1 and a backward 2, I and W one each, unless it says
otherwise.

Activations are kept from a forward until its backward, or the weight-gradient part of it, has run. The bubble is the
idle part of a step from flush to flush.

Each of them trains: `ChimeraStrategy(schedule="zb_v")`, with `pipes=4` or `chunks=4` where the table says that the
schedule takes it. `recompute="blocks"` or `"stages"` keeps inputs only, and makes a backward a forward longer.
"""

OWN = """\
## Your own schedule

A schedule that is in a file is checked, drawn and compared like any other: `ChimeraStrategy(schedule="mine.csv")`, or
`lightning-chimera schedule mine.csv`. The file has a line for each rank, with its actions in order. An action is
`<stage><kind><microbatch>`, followed by `.<pipe>` unless that is 0; an empty cell is an idle rank:

```
0F0,0F1,,0B0,0B1
1F0,1B0,1F1,1B1
```

The `compute_only` tables of `torch.distributed.pipelining` are such files. What is wrong is said with the rule, and
with the cell marked in the grid.
"""


def page() -> str:
    """The whole page as text."""
    parts = [INTRODUCTION, *_overview(), *_papers_tables(), *_splits(), *_sync()]
    for section in SECTIONS:
        module = importlib.import_module(f"lightning_chimera.schedules.{section.module}")
        parts.append(f"## {section.title}\n\n{(module.__doc__ or '').strip()}\n")
        parts += [f"{section.caption}\n"] if section.caption else []
        parts.append(f"![{section.title}](images/schedules/{section.module}.png)\n")
    return "\n".join([*parts, OWN])


def _table(headings: list[str], rows: list[list[str]]) -> Iterator[str]:
    lines = [headings, ["---"] * len(headings), *rows]
    yield "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _ratio(schedule: Schedule, costs: Costs) -> str:
    return f"{simulate(schedule, costs).bubble:.1%}"


def _span(values: tuple[float, ...]) -> str:
    low, high = min(values), max(values)
    return f"{high:g}" if low == high else f"{low:g} to {high:g}"


def _idle(schedule: Schedule, costs: Costs = LONG) -> str:
    return f"{min(simulate(schedule, costs).idle):g}"


def _overview() -> Iterator[str]:
    yield "## All of them\n\nFour ranks, eight microbatches.\n"
    rows = []
    for name, family in SCHEDULES.items():
        schedule = family.build(4, 8)
        bubbles = [_ratio(schedule, costs) for costs in (LONG, Costs(1, 2.5, weight=1), Costs(1, 2, 0.25))]
        facts = [_span(schedule.placement.weight_copies), _span(schedule.peak_activations), str(schedule.num_messages)]
        usual = "D" if family.microbatches_per_rank == 1 else f"{family.microbatches_per_rank} D"
        option = f"`{family.option}`" if family.option else ""
        rows.append([f"`{name}`", family.summary, option, usual, *facts, *bubbles])
    headings = [
        "name",
        "what it is",
        "takes",
        "N by default",
        "weights",
        "activations",
        "messages",
        "bubble",
        "1:1.5:1",
        "latency 0.25",
    ]
    yield from _table(headings, rows)


def _papers_tables() -> Iterator[str]:
    yield (
        "## The tables of the Chimera paper\n\n"
        "Tables 2 and 3 give the bubble as a part of the step, the copies of the weights, and the activations of a"
        " rank. The simulator's figures stand beside the formulas, for 8 ranks. PipeDream and PipeDream-2BW have no"
        " flush and are not here.\n"
    )
    rows = []
    for count in (8, 16):
        schemes = [
            ("GPipe", gpipe(8, count), "(D-1)/(N+D-1)", 7 / (count + 7)),
            ("GEMS", gems(8, count), "about (D-1)/(D+1/2)", 7 / 8.5),
            ("DAPPLE", one_f_one_b(8, count), "(D-1)/(N+D-1)", 7 / (count + 7)),
            ("Chimera", chimera(8, count), "(D-2)/(2N+D-2)", 6 / (2 * count + 6)),
        ]
        for pipes in (4, 8):
            value = (8 - pipes) / (pipes * count + 8 - pipes)
            built = chimera(8, count, pipes=pipes)
            schemes.append((f"Chimera, {pipes} pipes", built, "(D-2f)/(2fN+D-2f)", value))
        for title, schedule, formula, value in schemes:
            facts = [_span(schedule.placement.weight_copies), _span(schedule.peak_activations)]
            simulated = [_ratio(schedule, costs) for costs in (EQUAL, LONG)]
            rows.append([title, str(count), formula, f"{value:.1%}", *simulated, *facts])
    headings = ["scheme", "N", "bubble in the paper", "its value", "B = F", "B = 2F", "weights", "activations"]
    yield from _table(headings, rows)
    yield (
        "The tables hide two facts.\n\n"
        "1. They assume that a backward is as long as a forward; only the figure of GEMS is for a backward of two. For"
        " B = 2F Chimera's bubble is twice as long where N = D, and direct concatenation stops amortising it: each"
        " further unit adds D - 2 again, so its part of a step tends to (D-2)/(4D-2), 14 % for 4 ranks and 20 % for 8,"
        " and never vanishes.\n"
        "2. So for long steps 1F1B idles less than direct concatenation: from the third unit on for 8 ranks, from the"
        " fourth on for 4. Doubling, halving, list scheduling and, best, a split backward keep Chimera ahead.\n\n"
        "Idle time of the busiest rank, B = 2F:\n"
    )
    builds = [one_f_one_b, chimera, chimera_greedy, chimera_halving, chimera_split, zb_v]
    rows = []
    for ranks in (4, 8):
        for units in (1, 2, 3, 4):
            rows.append([str(ranks), str(units * ranks), *(_idle(build(ranks, units * ranks)) for build in builds)])
    yield from _table(["D", "N", *(f"`{build(4, 4).name}`" for build in builds)], rows)


def _splits() -> Iterator[str]:
    yield (
        "## What a split backward gains\n\n"
        "With I in the place of B, forward and backward are equally long, as Chimera's slots assume, and W fills what"
        " is left. Idle time of the busiest rank / most activations / copies of the weights, where F = I = W:\n"
    )
    sizes = [(4, 4), (4, 8), (4, 16), (8, 8), (8, 16), (8, 32)]
    builds: list[tuple[str, Callable[[int, int], Schedule]]] = [
        (f"`{name}`", SCHEDULES[name].build)
        for name in (
            "1f1b",
            "zb_h1",
            "zb_h2",
            "zb_v",
            "v_half",
            "v_min",
            "dualpipe",
            "dualpipe_v",
            "chimera",
            "chimera_split_in_place",
            "chimera_split",
            "chimera_split_v",
        )
    ]
    builds.insert(-1, ("`chimera_split`, 4 pipes", lambda ranks, count: chimera_split(ranks, count, pipes=4)))
    rows = []
    for title, build in builds:
        cells = []
        for size in sizes:
            try:
                schedule = build(*size)
            except ValueError:
                cells.append("-")
                continue
            peak, weights = max(schedule.peak_activations), max(schedule.placement.weight_copies)
            cells.append(f"{_idle(schedule)} / {peak:g} / {weights:g}")
        rows.append([title, *cells])
    yield from _table(["schedule", *(f"D = {ranks}, N = {count}" for ranks, count in sizes)], rows)
    yield (
        "`zb_v` needs one copy of the weights and twice the messages, and wins wherever nobody wants the replicas of"
        " opposite pipes. Where replicas are wanted anyway, `chimera_split` idles less with half of the messages, and"
        " `chimera_split_v` least of all with as many. `dualpipe` comes to the same bubble as `chimera_split` with one"
        " more activation and at least 2D microbatches. What I and W really take matters: compare with your own"
        " `--costs`.\n"
    )


def _sync() -> Iterator[str]:
    yield (
        "## When gradients are summed\n\n"
        "Every stage of opposite pipes has a copy on another rank, so its gradients are summed in any case. `eager`"
        " starts when a stage's last gradient is there; `eager-opt`, the paper's rule, does so for the stages beyond"
        " the middle one only, `hidden` only where the simulator says that the all-reduce ends before its ranks' last"
        " action, and `lazy` never. Black bars are all-reduces, of 4 units each:\n\n"
        "![All-reduces of gradients](images/schedules/sync.png)\n"
    )


def pictures() -> dict[str, list[Timeline]]:
    """The pictures by the names of their files."""
    found = {section.module: section.picture() for section in SECTIONS}
    found["sync"] = [synced(chimera(8, 8), policy) for policy in SyncPolicy]
    return found


def main() -> None:
    from lightning_chimera.timeline.plot import plot_timelines, save_figure

    (FOLDER / "schedules.md").write_text(page())
    for name, drawn in pictures().items():
        if len(sys.argv) == 1 or name in sys.argv[1:]:
            save_figure(plot_timelines(drawn), IMAGES / f"{name}.png")


if __name__ == "__main__":
    main()
