"""A rank holds what its own stages need, and no longer than they need it."""

import gc
import re
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import GPT2Config, GPT2LMHeadModel

from benchmarks.memory import SavedForBackward, state_bytes
from lightning_chimera.runtime.pipeline import _Training
from lightning_chimera.runtime.shared_memory import ROOM
from lightning_chimera.schedules import Action, Kind

from .fidelity import Cell, make_trainer
from .users import make_loader, make_rows
from .world import World

WIDTH, BLOCKS, LENGTH, MICROBATCH = 128, 4, 16, 2
BOUNDARY = MICROBATCH * LENGTH * WIDTH * 4
"""Bytes of a message."""

CUTS = {2: (2,), 4: (1, 2, 3)}


class Wide(L.LightningModule):
    """Large enough that a batch and a generator's state are less than a percent of it."""

    def __init__(self) -> None:
        super().__init__()
        config = GPT2Config(
            vocab_size=256,
            n_positions=LENGTH,
            n_embd=WIDTH,
            n_layer=BLOCKS,
            n_head=2,
            resid_pdrop=0,
            embd_pdrop=0,
            attn_pdrop=0,
            bos_token_id=1,
            eos_token_id=2,
        )
        self.model = GPT2LMHeadModel(config)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.model(input_ids=batch["input_ids"], labels=batch["labels"]).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), foreach=True)


def owned_bytes(module: Wide, cell: Cell, stages: tuple[int, ...]) -> int:
    """Bytes of the parameters of some stages, by their names; the tied table is on both ends."""
    cuts = CUTS[num_stages(cell)]

    def is_owned(name: str) -> bool:
        if ".h." in name:
            block = int(name.split(".h.")[1].partition(".")[0])
            return sum(block >= cut for cut in cuts) in stages
        return ((0 in stages and ".wte." in name) or (".wpe." in name and 0 in stages)) or (
            len(cuts) in stages and (".ln_f." in name or ".wte." in name)
        )

    return sum(parameter.nbytes for name, parameter in module.named_parameters() if is_owned(name))


def num_stages(cell: Cell) -> int:
    return cell.stages * (2 if cell.schedule == "zb_v" else 1)


def fit(cell: Cell, callback: Callback) -> Wide:
    torch.manual_seed(0)
    strategy = (("cuts", CUTS[num_stages(cell)]),)
    cell = Cell(cell.schedule, cell.stages, cell.replicas, cell.microbatches, precision="32-true", strategy=strategy)
    rows = make_rows("gpt2", 3 * cell.replicas * cell.microbatches * MICROBATCH, padded=False, length=LENGTH)
    module = Wide()
    make_trainer(cell, max_steps=3, callbacks=[callback]).fit(module, make_loader(rows, cell.microbatches * MICROBATCH))
    return module


# ------------------------------------------------------------------------------------------------------ between steps


class AfterStep(Callback):
    """Notes what lives between two steps."""

    def on_train_batch_end(self, trainer: L.Trainer, module: L.LightningModule, *_: Any) -> None:
        self.stages = trainer.strategy.engine.layout.schedule().placement.stages_of(trainer.strategy.topology.position)
        self.states = state_bytes(module.parameters(), trainer.optimizers[0])
        gc.collect()
        gradients = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
        alive = storages([*gradients, *(found for found in gc.get_objects() if isinstance(found, Tensor))])
        self.alive = sum(size for size in alive.values() if size < ROOM)  # of a link's address space little is used
        ownership = trainer.strategy.engine.ownership
        self.shared = sum(held.nbytes for held in ownership.held() if len(ownership.holders[held]) > 1)


def look_between_steps(cell: Cell) -> tuple[int, int, int, int]:
    spy = AfterStep()
    module = fit(cell, spy)  # whole again
    return owned_bytes(module, cell, spy.stages), spy.states, spy.shared, spy.alive


@pytest.mark.contract("Loop", "a rank holds parameters, gradients and the optimizer's state of its own stages only")
@pytest.mark.parametrize(
    "cell",
    [
        Cell("1f1b", 2, microbatches=4),
        Cell("gpipe", 2, replicas=2, microbatches=2),
        Cell("zb_v", 2, microbatches=4),
        Cell("chimera", 4, microbatches=4),
        pytest.param(Cell("chimera", 2, replicas=2, microbatches=2), marks=pytest.mark.long),
        pytest.param(Cell("1f1b", 4, microbatches=4), marks=pytest.mark.long),
        pytest.param(Cell("chimera_split", 4, microbatches=4), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_a_rank_holds_the_states_of_its_own_stages_and_nothing_else(world: World, cell: Cell) -> None:
    for owned, states, shared, alive in world.run(look_between_steps, cell, size=cell.size):
        assert states == 4 * owned  # parameters, gradients and two moments
        # On the CPU the buffer in which gradients are summed with other ranks is kept from step to step.
        assert states <= alive <= 1.01 * states + shared


# ------------------------------------------------------------------------------------------------------- after the fit


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """The bytes of what has numbers, by where they are."""
    real = [tensor for tensor in tensors if not tensor.is_meta]
    return {storage.data_ptr(): storage.nbytes() for storage in (tensor.untyped_storage() for tensor in real)}


def mapped() -> int:
    """Bytes of the memory of links that this process has in use."""
    sizes, is_link = [0], False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-", line):
            is_link = "memfd:chimera-" in line
        elif is_link and line.startswith("Rss:"):
            sizes.append(1024 * int(line.split()[1]))
    return sum(sizes)


class AtTrainEnd(Callback):
    """Notes what is mapped before the strategy is torn down."""

    def on_train_end(self, *_: Any) -> None:
        self.mapped = mapped()


def look_after_the_fit(cell: Cell) -> tuple[int, int, int, int, Any]:
    torch.manual_seed(0)
    spy, module, rows = AtTrainEnd(), Wide(), make_rows("gpt2", 16, padded=False, length=LENGTH)
    trainer = make_trainer(cell, max_steps=2, callbacks=[spy])
    trainer.fit(module, make_loader(rows, 8))
    held = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    held += [*module.parameters(), *module.buffers(), *(row[name] for row in rows for name in row)]
    held += [leaf for leaf in tree_leaves(trainer.optimizers[0].state_dict()) if isinstance(leaf, Tensor)]
    gc.collect()
    alive = storages(found for found in gc.get_objects() if isinstance(found, Tensor))
    known = storages(held)
    other = sum(size for place, size in alive.items() if place not in known)
    strategy = trainer.strategy
    return spy.mapped, mapped(), other, sum(known.values()), (strategy.peak_activations, len(strategy.timeline().spans))


@pytest.mark.contract("Loop", "after `fit` neither buffers of gradients nor shared memory of links are kept")
def test_buffers_and_memory_of_links_are_let_go_after_the_fit(world: World) -> None:
    for before, after, other, states, (peak, spans) in world.run(look_after_the_fit, Cell("chimera", 4), size=4):
        assert before >= 2 * BOUNDARY
        assert after == 0
        assert other < 0.01 * states
        assert peak >= 1
        assert spans >= 4 * 4


# ------------------------------------------------------------------------------------------------------ within a step


class Live(TorchDispatchMode):
    """Counts the bytes of what operations have made and what lives."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {leaf.untyped_storage()._cdata for leaf in tree_leaves((args, kwargs)) if is_real(leaf)}
        made = function(*args, **(kwargs or {}))
        for leaf in tree_leaves(made):
            if is_real(leaf) and leaf.untyped_storage()._cdata not in known:
                self._add(leaf.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        place, size = storage._cdata, storage.nbytes()
        if place not in self._seen:
            self._seen.add(place)
            self.bytes += size
            weakref.finalize(storage, self._remove, place, size)

    def _remove(self, place: int, size: int) -> None:
        self._seen.discard(place)
        self.bytes -= size


def is_real(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_meta


class Moment(NamedTuple):
    """What is held before and after an action, in bytes.

    Attributes:
        action: The action.
        before: What autograd keeps before it.
        after: What autograd keeps after it.
        live: All that lives after it and was made in the step, but gradients of parameters.
    """

    action: Action
    before: int
    after: int
    live: int


class WithinStep(Callback):
    """Notes what lives between the actions of the last step."""

    def __init__(self) -> None:
        self.moments: list[Moment] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: L.LightningModule, batch: Any, *_: Any) -> None:
        parameters = [parameter for parameter in module.parameters() if not parameter.is_meta]
        self._meter, self._live = SavedForBackward([*parameters, *batch.values()]), Live()
        self._watching = watched_actions(self._meter, self._live, parameters, self.moments)
        self.moments.clear()
        for manager in (self._meter, self._live, self._watching):
            manager.__enter__()

    def on_train_batch_end(self, trainer: L.Trainer, *_: Any) -> None:
        for manager in (self._watching, self._live, self._meter):
            manager.__exit__(None, None, None)
        schedule = trainer.strategy.engine.layout.schedule()
        self.bound = schedule.peak_activations[trainer.strategy.topology.position] / schedule.placement.share


@contextmanager
def watched_actions(
    meter: SavedForBackward, live: Live, parameters: list[nn.Parameter], moments: list[Moment]
) -> Iterator[None]:
    run = _Training.run

    def watch(self: _Training, action: Action, incoming: Any) -> Any:
        before = meter.live
        output = run(self, action, incoming)
        gradients = sum(parameter.grad.nbytes for parameter in parameters if parameter.grad is not None)
        moments.append(Moment(action, before, meter.live, live.bytes - gradients))
        return output

    _Training.run = watch
    yield
    _Training.run = run


def look_within_a_step(cell: Cell) -> tuple[list[Moment], float]:
    spy = WithinStep()
    fit(cell, spy)
    return spy.moments, float(spy.bound)


@pytest.mark.contract(
    "Loop", "activations are kept for as many microbatches as the schedule says, until their backward"
)
@pytest.mark.parametrize(
    "cell",
    [
        Cell("chimera", 2, microbatches=4),
        Cell("1f1b", 4, microbatches=8),
        Cell("zb_v", 2, microbatches=4),
        pytest.param(Cell("gpipe", 2, microbatches=4), marks=pytest.mark.long),
        pytest.param(Cell("chimera", 4, microbatches=8), marks=pytest.mark.long),
        pytest.param(Cell("chimera_split", 4, microbatches=8), marks=pytest.mark.long),
        pytest.param(Cell("zb_h1", 4, microbatches=8), marks=pytest.mark.long),
    ],
    ids=str,
)
def test_activations_are_freed_by_their_backward_and_stay_below_the_bound(world: World, cell: Cell) -> None:
    for moments, bound in world.run(look_within_a_step, cell, size=cell.size):
        kept: dict[int, int] = {}
        for moment in moments:
            change, stage = moment.after - moment.before, moment.action.stage
            if moment.action.kind is Kind.FORWARD:
                assert change == kept.setdefault(stage, change) > 10 * BOUNDARY
            else:
                assert change == (0 if moment.action.kind is Kind.WEIGHT else -kept[stage])
        assert moments[-1].after == 0
        # Messages on their way are no activations: what was sent last and what was posted ahead, of each link.
        messages = (2 * bound + 2) * BOUNDARY
        assert max(moment.live for moment in moments) <= bound * max(kept.values()) + messages
