"""A pipeline changes every parameter as one process does."""

import os
from dataclasses import replace
from itertools import cycle, product

import pytest
import torch

from .fidelity import Cell, Experiment, check, same_copies, train, usual
from .users import LanguageModule
from .world import World

MODELS, MICROBATCHES = ("gpt2", "bert"), (1, 2, 3, 4, 8)
LAYOUTS = list(product(("chimera", "gpipe", "1f1b"), (1, 2, 4), (1, 2)))

MATRIX = [
    Cell(schedule, stages, replicas, microbatches, model)
    for (schedule, stages, replicas), microbatches, model in product(LAYOUTS, MICROBATCHES, MODELS)
]
# Each layout once, each number of microbatches with each model.
SAMPLE = [
    Cell(schedule, stages, replicas, microbatches, model)
    for (schedule, stages, replicas), (microbatches, model) in zip(
        LAYOUTS, cycle(product(MICROBATCHES, MODELS)), strict=False
    )
]
OFF = {"tied": False, "padded": False, "clip": False, "accumulate": 1, "attention": "eager"}
WITHOUT = [
    Cell(schedule, 2, 1, 4, model, **{name: value})
    for (name, value), (schedule, model) in zip(
        OFF.items(), cycle([("chimera", "gpt2"), ("1f1b", "bert"), ("gpipe", "gpt2")]), strict=False
    )
]
NEIGHBOURS = [
    Cell(schedule, stages, 2, microbatches, model, strategy=(("innermost", "replicas"),))
    for schedule, stages, microbatches, model in (
        ("chimera", 2, 4, "gpt2"),
        ("1f1b", 2, 3, "bert"),
        ("zb_v", 2, 4, "gpt2"),
    )
]
SINGLE = [
    Cell(schedule, stages, replicas, microbatches, model, precision="32-true")
    for schedule, (stages, replicas, microbatches), model in product(
        ("chimera", "gpipe", "1f1b"), ((2, 2, 4), (4, 1, 8)), MODELS
    )
]


@pytest.mark.contract("Precision", "`64-true` trains as in one process, clipped by the norm of the whole model")
@pytest.mark.parametrize("cell", SAMPLE, ids=str)
def test_a_pipeline_changes_every_parameter_as_one_process_does(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.parametrize("cell", WITHOUT, ids=str)
def test_it_does_so_with_a_feature_left_out(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.contract(
    "Launch", '`innermost="replicas"`: the copies of a stage on neighbouring ranks train as the stages of a pipeline do'
)
@pytest.mark.parametrize("cell", NEIGHBOURS, ids=str)
def test_it_does_so_with_replicas_on_neighbouring_ranks(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.contract("Precision", "`32-true` trains as in one process")
@pytest.mark.parametrize("cell", SINGLE[::5], ids=str)
def test_it_does_so_in_single_precision(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in MATRIX if cell not in SAMPLE], ids=str)
def test_every_other_cell_of_the_matrix(world: World, cell: Cell) -> None:
    check(world, cell)


@pytest.mark.long
@pytest.mark.parametrize("cell", [cell for cell in SINGLE if cell not in SINGLE[::5]], ids=str)
def test_every_other_cell_in_single_precision(world: World, cell: Cell) -> None:
    check(world, cell)


def unlike_on_each_rank(cell: Cell) -> Experiment:
    torch.manual_seed(100 + int(os.environ["LOCAL_RANK"]))
    return usual(cell, LanguageModule(cell.model))


@pytest.mark.parametrize("cell", [Cell("chimera", 4), Cell("1f1b", replicas=2)], ids=str)
def test_copies_are_equal_though_each_rank_made_another_module(world: World, cell: Cell) -> None:
    ranks = world.run(train, cell, unlike_on_each_rank, size=cell.size)
    same_copies(ranks)
    for seen in ranks:
        torch.testing.assert_close(seen.after, ranks[0].after, rtol=0.0, atol=0.0)
        assert seen.losses == ranks[0].losses


@pytest.mark.parametrize(
    ("mutation", "cell"),
    [
        ("no_sync_of_copies", Cell("gpipe", replicas=2)),
        ("no_sync_of_copies", Cell("1f1b")),
        ("gradients_averaged", Cell("chimera")),
        ("own_norm", Cell("1f1b", tied=False)),
        ("copies_counted_in_norm", Cell("1f1b")),
        ("microbatch_dropped", Cell("gpipe")),
        ("weights_by_rows", Cell("chimera", model="bert")),
        ("labels_not_shifted", Cell("gpipe")),
        ("no_accumulation_scale", Cell("1f1b")),
    ],
    ids=str,
)
def test_a_fault_in_the_gradients_would_be_found(world: World, mutation: str, cell: Cell) -> None:
    unclipped = replace(cell, clip="norm" in mutation)  # a wrong scale of all gradients would be clipped away
    with pytest.raises(AssertionError, match="parameters changed otherwise"):
        check(world, unclipped, mutation=mutation)
