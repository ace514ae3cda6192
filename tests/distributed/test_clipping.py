"""Gradients are clipped and measured as in one process, or the ranks are told that it can't be."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import OnExceptionCheckpoint, WeightAveraging
from lightning.pytorch.loggers import Logger
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.utilities import grad_norm
from torch import Tensor, nn

from lightning_chimera import ChimeraStrategy

from .fidelity import CLIP, Cell, Experiment, Make, check, label, make_trainer, train, train_plainly, usual, usual_rows
from .users import LanguageModule, Row, make_loader, make_rows
from .world import RankFailed, World

FEW = Cell("1f1b", 2, clip=False)
CHIMERA = Cell("chimera", 4, clip=False)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3, clip=False)
WHOLE = Cell("chimera", 2, clip=False)
"""Both ranks hold the whole model."""


# ------------------------------------------------------------------------------------------------------------ clipping


class ClipsByItsOwnNorm(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), CLIP)


class ClipsByItsOwnLargest(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 0.01, norm_type=torch.inf)


class ClipsByTheNormOfAll(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=CLIP, gradient_clip_algorithm="norm")


class ClipsByValue(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_value_(self.parameters(), 0.01)


class ScalesAll(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad *= 0.25


class ZeroesInPlace(LanguageModule):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class ClipsNothing(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.parameters(), 1e6)


@pytest.mark.contract(
    "The module",
    "`clip_grad_norm_(self.parameters(), ...)` of your own, which would see one rank's stages, names"
    " `strategy.clip_grad_norm`",
    "refused",
    "DS#7773, PT#162638",
)
@pytest.mark.parametrize(
    ("cell", "module"),
    [
        (FEW, ClipsByItsOwnNorm),
        (CHIMERA, ClipsByItsOwnNorm),
        (REPLICAS, ClipsByItsOwnNorm),
        (FEW, ClipsByItsOwnLargest),
        (FEW, ClipsNothing),
    ],
    ids=label,
)
def test_clipping_by_the_norm_of_one_ranks_parameters_is_an_error(world: World, cell: Cell, module: Make) -> None:
    with pytest.raises(RankFailed, match=r"norm\(\) was called on the gradient of .*strategy\.clip_grad_norm\("):
        world.run(train, cell, module, size=cell.size)


@pytest.mark.contract(
    "The module", "`configure_gradient_clipping` of your own: `self.clip_gradients`, by value, by a factor of your own"
)
@pytest.mark.parametrize(
    ("cell", "module"),
    [
        (FEW, ClipsByTheNormOfAll),
        (REPLICAS, ClipsByTheNormOfAll),
        (FEW, ClipsByValue),
        (FEW, ScalesAll),
        (FEW, ZeroesInPlace),
        (WHOLE, ClipsByItsOwnNorm),
    ],
    ids=label,
)
def test_clipping_of_all_ranks_alike_is_right(world: World, cell: Cell, module: Make) -> None:
    check(world, cell, module)


def fit_twice_with_own_clipping(cell: Cell) -> tuple[list[Tensor], list[str]]:
    """Trains twice with clipping that is put on the instance; returns the weights, and which hooks were called."""
    torch.manual_seed(0)
    module, called = LanguageModule(), []

    def clip(optimizer: Any, *_: Any, **__: Any) -> None:
        called.append("clip")
        nn.utils.clip_grad_value_([p for p in module.parameters() if not p.is_meta], 0.01)

    module.configure_gradient_clipping = clip  # type: ignore[method-assign]
    for _ in range(2):
        make_trainer(cell, max_steps=2, precision="64-true").fit(module, make_loader(usual_rows(cell), cell.batch_size))
        assert vars(module)["configure_gradient_clipping"] is clip
    return [parameter.detach() for parameter in module.parameters()], called


def test_clipping_that_is_put_on_the_instance_is_there_in_a_second_fit_too(world: World) -> None:
    ((plain, called),) = world.run(fit_twice_with_own_clipping, FEW.reference, size=1)
    assert called == ["clip"] * 4
    for weights, hooks in world.run(fit_twice_with_own_clipping, FEW, size=2):
        assert hooks == called
        torch.testing.assert_close(weights, plain, rtol=1e-9, atol=1e-12)


class Graphs(Logger):
    """A logger that keeps nothing."""

    name, version = "graphs", 0

    def log_metrics(self, *_: Any, **__: Any) -> None: ...

    def log_hyperparams(self, *_: Any, **__: Any) -> None: ...


def fit_with_own_attributes(cell: Cell, folder: str) -> list[str]:
    """Fits with objects that have attributes of the user's own where the strategy puts some; returns which are gone."""
    module, plugin, logger = LanguageModule(), MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu")), Graphs()
    module.example_input_array = make_rows("gpt2", 1)[0]["input_ids"][None]
    saver, average = OnExceptionCheckpoint(folder), WeightAveraging()
    owned: list[tuple[Any, str]] = [
        (module, "configure_gradient_clipping"),
        (plugin, "clip_grad_by_norm"),
        (plugin, "clip_grad_by_value"),
        (plugin.scaler, "_unscale_grads_"),
        (saver, "on_exception"),
        (average, "on_train_batch_end"),
        (logger, "log_graph"),
    ]
    own = [(owner, name, partial(getattr(owner, name))) for owner, name in owned]
    for owner, name, value in own:
        vars(owner)[name] = value
    options = {"plugins": [plugin], "logger": logger, "callbacks": [saver, average], "gradient_clip_val": 1.0}
    make_trainer(cell, max_steps=1, enable_checkpointing=True, **options).fit(module, make_loader(usual_rows(cell)))
    return [f"{type(owner).__name__}.{name}" for owner, name, value in own if vars(owner).get(name) is not value]


def test_attributes_that_users_have_put_on_their_objects_are_there_after_a_fit(world: World, tmp_path: Path) -> None:
    assert world.run(fit_with_own_attributes, FEW, str(tmp_path), size=2) == [[], []]


class ClipsByAnyNorm(LanguageModule):
    """Clips by norms of several orders, and once those of a part of the model only."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[float] = []

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        blocks = self.model.transformer.h
        for norm_type, max_norm, part in (
            (2.0, CLIP, self),
            (torch.inf, 0.01, self),
            (1, 5.0, self),
            (3, 0.01, blocks),
        ):
            strategy: Any = self.trainer.strategy
            if isinstance(strategy, ChimeraStrategy):
                norm = strategy.clip_grad_norm(max_norm, norm_type, parameters=part.parameters())
            else:
                norm = nn.utils.clip_grad_norm_(part.parameters(), max_norm, norm_type)
            assert norm > max_norm
            self.notes.append(float(norm))


@pytest.mark.contract(
    "The module", "`strategy.clip_grad_norm(max_norm, norm_type)` by a norm of any order, the infinity norm included"
)
@pytest.mark.parametrize("cell", [FEW, CHIMERA, REPLICAS], ids=str)
def test_the_strategy_clips_by_a_norm_of_any_order(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, ClipsByAnyNorm)
    for seen in ranks:
        assert seen.notes == ranks[0].notes
        assert seen.notes == pytest.approx(plain.notes, rel=1e-10)


class ClipsByNoNorm(LanguageModule):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        strategy: Any = self.trainer.strategy
        strategy.clip_grad_norm(1.0, 0.0)


def test_a_norm_that_is_none_is_refused(world: World) -> None:
    with pytest.raises(RankFailed, match=r"ValueError: norm_type=0\.0: it must be a positive number, or 'inf'"):
        world.run(train, FEW, ClipsByNoNorm, size=2)


# ---------------------------------------------------------------------------------------------------------- non-finite


class Overflows(LanguageModule):
    """One gradient of one stage is not finite at the third step."""

    def __init__(self, what: float = torch.inf) -> None:
        super().__init__()
        self.what = what
        self.model.transformer.h[0].mlp.c_fc.weight.register_hook(self.spoil)
        self.notes: list[Tensor] = []

    def spoil(self, gradient: Tensor) -> Tensor:
        return gradient + self.what if self.trainer.global_step == 2 else gradient

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        finite = [bool(parameter.isfinite().all()) for parameter in self.parameters() if not parameter.is_meta]
        self.notes.append((self.trainer.global_step, all(finite), any(finite)))


def overflows(cell: Cell) -> Experiment:
    return usual(cell, Overflows(), max_steps=3)


def turns_to_nan(cell: Cell) -> Experiment:
    return usual(cell, Overflows(torch.nan), max_steps=3)


@pytest.mark.contract(
    "Precision",
    "a norm that is not finite spreads to all weights when gradients are clipped by it, as in one process",
    reported="Lightning#21929",
)
@pytest.mark.parametrize("make", [overflows, turns_to_nan])
def test_a_norm_that_is_not_finite_does_on_every_rank_what_it_does_in_one_process(world: World, make: Make) -> None:
    cell = Cell("1f1b", 2, tied=False)
    plain = train_plainly(world, cell.reference, make)
    ranks = world.run(train, cell, make, size=2)
    assert [step for step, *_ in plain.notes] == [0, 1, 1, 2, 2, 3]
    wrong = {name for name, value in plain.after.items() if not value.isfinite().all()}
    assert wrong
    for seen in ranks:
        assert [step for step, *_ in seen.notes] == [0, 1, 1, 2, 2, 3]
        assert {name for name, value in seen.after.items() if not value.isfinite().all()} == wrong


class RefusesToOverflow(Overflows):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        strategy: Any = self.trainer.strategy
        try:
            strategy.clip_grad_norm(CLIP, error_if_nonfinite=True)
        except RuntimeError as error:
            self.notes.append(str(error))
            optimizer.zero_grad()


@pytest.mark.contract(
    "Precision",
    "`strategy.clip_grad_norm(..., error_if_nonfinite=True)` raises on every rank",
    reported="Lightning#21929",
)
def test_a_norm_that_is_not_finite_may_be_an_error_on_every_rank(world: World) -> None:
    for seen in world.run(train, FEW, RefusesToOverflow, size=2):
        (message,) = [note for note in seen.notes if isinstance(note, str)]
        assert message.startswith("The norm of order 2.0 of the whole model's gradient is inf")
        assert all(value.isfinite().all() for value in seen.after.values())


# --------------------------------------------------------------------------------------------------------------- norms


class MeasuresGradients(LanguageModule):
    """Logs the norms of its gradients, where people do."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def measure(self, norm_type: float | str) -> dict[str, Any]:
        strategy: Any = self.trainer.strategy
        if isinstance(strategy, ChimeraStrategy):
            return strategy.grad_norm(norm_type)
        return grad_norm(self, norm_type)

    def on_after_backward(self) -> None:
        if (self.trainer.fit_loop.total_batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.notes.append(("after backward", self.measure(2)))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norms = self.measure(2)
        self.log_dict(norms)
        self.notes += [("before step", norms), ("inf", self.measure("inf"))]

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.notes.append(("clipped", self.measure(1)))

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        logged = {name: value for name, value in self.trainer.callback_metrics.items() if "grad" in name}
        self.notes.append(("logged", logged))


@pytest.mark.contract(
    "The module",
    "`strategy.grad_norm(norm_type)` in a hook is Lightning's `grad_norm(self, norm_type)` of the whole model, equal on"
    " every rank",
    reported="Lightning#19106",
)
@pytest.mark.parametrize("cell", [Cell("1f1b", 2), Cell("chimera", 4), Cell("gpipe", 2, 2)], ids=str)
def test_the_strategys_norms_are_those_of_one_process(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, MeasuresGradients)
    assert len(plain.notes) == 30
    assert max(len(norms) for _, norms in plain.notes) == len(plain.before) + 1
    for seen in ranks:
        assert [(where, list(norms)) for where, norms in seen.notes] == [(w, list(norms)) for w, norms in plain.notes]
        for (where, own), (_, expected) in zip(seen.notes, plain.notes, strict=True):
            rtol = 1e-6 if where == "logged" else 1e-9  # logged in float32
            torch.testing.assert_close(own, expected, rtol=rtol, atol=1e-12)
        norms, first = ([norms for _, norms in rank.notes] for rank in (seen, ranks[0]))
        torch.testing.assert_close(norms, first, rtol=0.0, atol=0.0)


class MeasuresTooEarly(MeasuresGradients):
    def on_after_backward(self) -> None:
        self.measure(2)


def test_norms_between_the_batches_of_a_window_are_an_error(world: World) -> None:
    with pytest.raises(RankFailed, match=r"strategy\.grad_norm\(\) was called between the batches of an accumulation"):
        world.run(train, FEW, MeasuresTooEarly, size=2)


# ------------------------------------------------------------------------------------------------- gradients elsewhere


class MeasuresItsOwn(LanguageModule):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.log_dict(grad_norm(self, norm_type=2))


class SumsNorms(LanguageModule):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        total = 0.0
        for parameter in self.parameters():
            if parameter.grad is not None:
                total += float(parameter.grad.detach().square().sum())


@pytest.mark.contract(
    "The module",
    "numbers of a gradient that another rank has, as in Lightning's `grad_norm(self, 2)`, name `strategy.grad_norm`",
    "refused",
    "Lightning#19106",
)
@pytest.mark.parametrize("module", [MeasuresItsOwn, SumsNorms])
def test_numbers_of_a_gradient_elsewhere_are_an_error_that_names_the_way(world: World, module: Make) -> None:
    with pytest.raises(
        RankFailed, match=r"RuntimeError: (norm|square)\(\) was called on the gradient of .*strategy\.grad_norm\("
    ):
        world.run(train, FEW, module, size=2)


class HasUnused(LanguageModule):
    """Notes which parameters have a gradient, where people do."""

    def __init__(self) -> None:
        super().__init__(tied=False)
        self.spare = nn.Linear(3, 3)
        self.model.transformer.h[1].spare = nn.Linear(3, 3)
        self.model.transformer.h[2].mlp.requires_grad_(False)
        self.notes: list[Any] = []

    def note(self) -> None:
        self.notes.append([name for name, parameter in self.named_parameters() if parameter.grad is None])

    def on_after_backward(self) -> None:
        self.note()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.note()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.note()

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        self.note()


@pytest.mark.contract(
    "The module", "`p.grad is None` says on every rank whether the parameter is unused or frozen, whoever holds it"
)
@pytest.mark.parametrize("cell", [FEW, CHIMERA, Cell("chimera", 4, microbatches=1, clip=False)], ids=str)
def test_whether_a_parameter_has_a_gradient_is_seen_on_every_rank(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, HasUnused)
    assert {len(names) for names in plain.notes} == {len(plain.before), 4 + 4}
    for seen in ranks:
        assert seen.notes == plain.notes


class LooksAtGradients(LanguageModule):
    """Notes all gradients before and after the clipping, and what is there without them."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[Any] = []

    def look(self) -> None:
        strategy: Any = self.trainer.strategy
        if not isinstance(strategy, ChimeraStrategy):
            self.notes.append({name: parameter.grad.clone() for name, parameter in self.named_parameters()})
            return
        with strategy.full_parameters(gradients=True):
            self.notes.append({name: parameter.grad.clone() for name, parameter in self.named_parameters()})
        with strategy.full_parameters():
            assert all(parameter.grad is None for parameter in self.parameters())

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.look()

    def on_train_batch_end(self, outputs: Any, batch: Row, batch_idx: int) -> None:
        if (batch_idx + 1) % self.trainer.accumulate_grad_batches == 0:
            self.look()


@pytest.mark.contract(
    "The module", "`with strategy.full_parameters(gradients=True)` every rank has all gradients for a while"
)
@pytest.mark.parametrize("cell", [Cell("1f1b", 2), Cell("chimera", 4)], ids=str)
def test_all_gradients_may_be_had_for_a_while(world: World, cell: Cell) -> None:
    plain, ranks = check(world, cell, LooksAtGradients)
    for seen in ranks:
        torch.testing.assert_close(seen.notes, plain.notes, rtol=1e-9, atol=1e-12)
