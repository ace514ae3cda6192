import importlib
import textwrap

import pytest

from lightning_chimera.schedules import (
    Placement,
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
    forward_only,
    gems,
    gpipe,
    hanayo,
    interleaved,
    lower,
    one_f_one_b,
    v_half,
    v_min,
    zb_h1,
    zb_h2,
    zb_v,
)
from lightning_chimera.timeline import Costs, Timeline, render_timeline, simulate


def drawings(module: str) -> str:
    return importlib.import_module(f"lightning_chimera.schedules.{module}").__doc__ or ""


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        ("gpipe", gpipe(4, 4)),
        ("one_f_one_b", one_f_one_b(4, 4)),
        ("chimera", chimera(4, 4)),
        ("forward_only", forward_only(Placement.down(4), 3)),
        ("chimera_doubling", chimera_doubling(4, 8)),
        ("chimera_halving", chimera_halving(4, 4)),
        ("chimera_greedy", chimera_greedy(4, 8)),
        ("chimera_split", chimera_split_in_place(4, 4)),
        ("chimera_split", chimera_split(4, 4)),
        ("chimera_split", chimera_split_v(4, 4)),
        ("gems", gems(4, 3)),
        ("interleaved", interleaved(2, 4)),
        ("hanayo", hanayo(2, 4)),
        ("zero_bubble", zb_h1(4, 5)),
        ("zero_bubble", zb_h2(4, 5)),
        ("v_shaped", zb_v(4, 4)),
        ("v_shaped", v_half(4, 4)),
        ("v_shaped", v_min(4, 4)),
        ("dualpipe", dualpipe(4, 8)),
        ("dualpipe", dualpipe_v(2, 4)),
    ],
    ids=lambda value: value.name if isinstance(value, Schedule) else "",
)
def test_the_drawing_of_a_schedule_is_true(module: str, schedule: Schedule) -> None:
    # The forward of a stage takes one column, whatever part of the model a stage is.
    costs = Costs([1] * schedule.num_stages, [2] * schedule.num_stages)
    assert textwrap.indent(render_timeline(simulate(schedule, costs)), "    ") in drawings(module)


def test_the_drawing_of_the_slots_of_chimera_is_true() -> None:
    # With equal times every action runs in its slot.
    timeline: Timeline = simulate(chimera(4, 4), Costs(1, 1))
    assert textwrap.indent(render_timeline(timeline), "    ") in drawings("chimera")


def test_the_drawing_of_lowering_is_true() -> None:
    columns = [[str(step).split(" (")[0] for step in row] for row in lower(one_f_one_b(2, 2)).rows]
    aligned = [[f"{step.split(' ', 1)[0]:<7} {step.split(' ', 1)[1]}" for step in column] for column in columns]
    lines = [f"    {left:<33} {right}" for left, right in zip(*aligned, strict=True)]
    assert "\n".join(lines) in drawings("lowering")
