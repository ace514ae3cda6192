"""Where memory runs out the error says what the rank holds, and what helps."""

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

from lightning_chimera.memory import is_out_of_memory

from .fidelity import Cell, Experiment, Make, make_trainer, usual
from .users import LanguageModule
from .world import RankFailed, World

FEW = Cell("gpipe", 2, accumulate=1, padded=False)


class RunsOutInABlock(LanguageModule):
    """The last block fails for the third microbatch of the second step."""

    def __init__(self, error: str = "cuda") -> None:
        super().__init__()
        self.error = error
        self.calls = 0
        self.model.transformer.h[3].register_forward_hook(self.fail)

    def fail(self, *_: Any) -> None:
        self.calls += 1
        if self.calls < 7:
            return
        if self.error == "cuda":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        if self.error == "host":
            raise MemoryError
        torch.empty(10**16)


class RunsOutInTheOptimizer(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        super().step(closure)
        torch.empty(10**16)


class OptimizesTooMuch(LanguageModule):
    def configure_optimizers(self) -> Any:
        return RunsOutInTheOptimizer(self.parameters(), lr=1e-3)


def on_the_host(cell: Cell) -> Experiment:
    return usual(cell, RunsOutInABlock("host"))


def by_the_allocator(cell: Cell) -> Experiment:
    return usual(cell, RunsOutInABlock("allocator"))


def run_out(cell: Cell, make: Make, **options: Any) -> str:
    """The message of the error, on a rank whose memory has run out."""
    torch.manual_seed(0)
    experiment = usual(cell, make()) if isinstance(make, type) else make(cell)
    try:
        make_trainer(cell, max_epochs=1, **options).fit(experiment.module, experiment.loader)
    except (RuntimeError, MemoryError) as error:
        if make is not OptimizesTooMuch or not is_out_of_memory(error):  # all its ranks run out of memory
            raise
        return str(error)
    return ""


def ends_with(world: World, cell: Cell, make: Make) -> tuple[str, str]:
    """Type and message of the error that ends a run on rank 0; rank 1 leaves without a word."""
    with pytest.raises(RankFailed) as caught:
        world.run(run_out, cell, make, size=2, limit=60)
    assert caught.value.rank == 0
    kind, _, message = caught.value.error.partition(":")
    return kind.rpartition(".")[2], message.strip()


def knobs_of(message: str) -> list[str]:
    return [line.removeprefix("  - ").split(" ")[0] for line in message.splitlines() if line.startswith("  - ")]


@pytest.mark.contract(
    "Faults",
    "out of memory, on a device or the host: the error names the rank's stages, what it holds, and what helps",
    "works",
    "Lightning#20832",
)
@pytest.mark.parametrize(
    ("make", "kind", "said"),
    [
        (RunsOutInABlock, "OutOfMemoryError", "CUDA out of memory. Tried to allocate 2.00 GiB."),
        (on_the_host, "MemoryError", ""),
        (by_the_allocator, "RuntimeError", "DefaultCPUAllocator: can't allocate memory"),
    ],
)
def test_a_stage_that_runs_out_of_memory_says_what_it_holds_and_what_helps(
    world: World, make: Make, kind: str, said: str
) -> None:
    own, message = ends_with(world, FEW, make)
    assert own == kind
    assert message.startswith(said) or said in message.splitlines()[0]
    holds = re.search(
        r"Global rank 0 \(position 1, stage 1\) ran out of memory with the schedule 'gpipe', 4 microbatches. It holds"
        r" ([\d.]+) KiB of parameters, ([\d.]+) K?i?B of gradients, 0 B of optimizer state, and ([\d.]+) KiB in 2"
        r" activations, of which the schedule allows 4 at a time. The process uses [\d.]+ MiB",
        message,
    )
    assert holds, message
    parameters, gradients, activations = map(float, holds.groups())
    assert parameters == pytest.approx(4 * (2 * 12704 + 64 + 101 * 32) / 1024, rel=1e-3)
    assert gradients in (0.0, pytest.approx(parameters, rel=1e-3))
    assert activations > 2 * 2 * 16 * 32 * 4 * 2 * 10 / 1024  # two blocks keep at least ten tensors of a row's size
    knobs = knobs_of(message)
    assert knobs[:2] == ["recompute='blocks'", "recompute='stages'"]
    assert {"schedule='1f1b'", "schedule='v_min'", "Trainer(precision='bf16-mixed')", "half", "more"} <= set(knobs)
    assert "num_microbatches=8" not in knobs  # GPipe would hold all of them
    assert "schedule='1f1b' holds at most 2 activations of 1/4 of a batch each, not 4 of 1/4: 50%" in message


def test_an_optimizer_that_runs_out_of_memory_is_told_to_hold_less_of_the_model(world: World) -> None:
    cell = replace(FEW, schedule="1f1b")
    for number, message in enumerate(world.run(run_out, cell, OptimizesTooMuch, size=2)):
        holds = re.search(
            r"([\d.]+) KiB of parameters, ([\d.]+) KiB of gradients, ([\d.]+) KiB of optimizer state, and 0 B", message
        )
        assert holds, (number, message)
        parameters, gradients, state = map(float, holds.groups())
        assert gradients == pytest.approx(parameters)
        assert state == pytest.approx(2 * parameters, rel=1e-2)
        assert knobs_of(message)[:2] == ["more", "Trainer(precision='bf16-true')"]
        assert not any(knob.startswith(("recompute", "schedule", "num_microbatches")) for knob in knobs_of(message))


def test_more_microbatches_help_a_schedule_that_holds_few_of_them(world: World) -> None:
    cell = replace(FEW, schedule="1f1b", microbatches=2, strategy=(("recompute", "blocks"),))
    _, message = ends_with(world, cell, RunsOutInABlock)
    assert "  - num_microbatches=4 holds at most 1 activations of 1/4 of a batch each, not 1 of 1/2: 50%" in message
    assert "recompute='blocks'" not in message
