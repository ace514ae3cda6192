import importlib
import textwrap

import pytest

from lightning_chimera.schedules import Schedule, chimera, forward_only, gpipe, lower, one_f_one_b
from lightning_chimera.timeline import Costs, Timeline, render_timeline, simulate


def drawings(module: str) -> str:
    return importlib.import_module(f"lightning_chimera.schedules.{module}").__doc__ or ""


@pytest.mark.parametrize(
    ("module", "schedule"),
    [
        ("gpipe", gpipe(4, 4)),
        ("one_f_one_b", one_f_one_b(4, 4)),
        ("chimera", chimera(4, 4)),
        ("forward_only", forward_only(4, 3)),
    ],
)
def test_the_drawing_of_a_schedule_is_true(module: str, schedule: Schedule) -> None:
    assert textwrap.indent(render_timeline(simulate(schedule)), "    ") in drawings(module)


def test_the_drawing_of_the_slots_of_chimera_is_true() -> None:
    # With equal times every action runs in its slot.
    timeline: Timeline = simulate(chimera(4, 4), Costs(1, 1))
    assert textwrap.indent(render_timeline(timeline), "    ") in drawings("chimera")


def test_the_drawing_of_lowering_is_true() -> None:
    columns = [[str(step).split(" (")[0] for step in row] for row in lower(one_f_one_b(2, 2)).rows]
    aligned = [[f"{step.split(' ', 1)[0]:<7} {step.split(' ', 1)[1]}" for step in column] for column in columns]
    lines = [f"    {left:<33} {right}" for left, right in zip(*aligned, strict=True)]
    assert "\n".join(lines) in drawings("lowering")
