"""What hooks and steps log is on every rank what one process would have said."""

from typing import Any

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from torch import Tensor, nn

from .fidelity import Cell, make_trainer
from .logs import History, check_all, fit_and_test
from .users import ROWS, LanguageModule, Row, make_loader, make_rows
from .world import World

CHIMERA = Cell("chimera", 2)
REPLICAS = Cell("1f1b", 2, replicas=2, microbatches=3)
CELLS = pytest.mark.parametrize("cell", [CHIMERA, REPLICAS], ids=str)


# -------------------------------------------------------------------------------------------------------- every hook

INSIDE = ("training_step", "validation_step", "test_step", "backward")
"""What runs while each rank is in its own part of the pipeline."""
HOOKS = {name: rule for name, rule in _FxValidator.functions.items() if rule is not None and name not in INSIDE}


def logging_hook(name: str, rule: Any) -> Any:
    """A hook that logs in the ways that Lightning allows it to."""

    def hook(self: Any, *args: Any, **kwargs: Any) -> Any:
        module = args[-1] if isinstance(self, Callback) and isinstance(args[-1], L.LightningModule) else self
        module = getattr(module, "module", module)
        who = "callback" if isinstance(self, Callback) else "module"
        module.count = getattr(module, "count", 0) + 1
        for on_step in (True, False):
            for on_epoch in (True, False):
                if (
                    on_step in rule["allowed_on_step"]
                    and on_epoch in rule["allowed_on_epoch"]
                    and (on_step or on_epoch)
                ):
                    key = f"{who}/{name}/{on_step:d}{on_epoch:d}"
                    module.log(key, float(module.count), on_step=on_step, on_epoch=on_epoch, prog_bar=on_step)
                    module.log(f"{key}/all", module.count, on_step=on_step, on_epoch=on_epoch, sync_dist=True)
        return getattr(super(type(self), self), name)(*args, **kwargs) if who == "module" else None

    return hook


def log_in_every_hook(cell: Cell, folder: str) -> list[Any]:
    torch.manual_seed(0)
    hooks = {name: logging_hook(name, rule) for name, rule in HOOKS.items()}
    module = type("Logs", (LanguageModule,), {n: h for n, h in hooks.items() if hasattr(LanguageModule, n)})(blocks=2)
    callback: Any = type("LogsToo", (Callback,), {n: h for n, h in hooks.items() if hasattr(Callback, n)})()
    callback.module = module
    history = History()
    logger = CSVLogger(folder, name=cell.schedule)
    trainer = make_trainer(
        cell, max_epochs=2, accumulate_grad_batches=2, callbacks=[callback, history], logger=logger, log_every_n_steps=1
    )
    rows = make_rows("gpt2", 4 * cell.replicas * ROWS, padded=False)
    loader = make_loader(rows, cell.batch_size)
    trainer.fit(module, loader, loader)
    return [*history.seen, trainer.test(module, loader, verbose=False)]


@pytest.mark.contract("Logging and metrics", "`self.log` in every hook of the module and of callbacks that may log")
@CELLS
def test_every_hook_may_log(world: World, cell: Cell, tmp_path: Any) -> None:
    (plain,) = world.run(log_in_every_hook, cell.reference, str(tmp_path), size=1)
    assert len({name.split("/")[1] for seen in plain[:-1] for name in seen if "/" in name}) > 12
    for seen in world.run(log_in_every_hook, cell, str(tmp_path), size=cell.size):
        torch.testing.assert_close(seen, plain, rtol=2e-6, atol=1e-9)
    tables = [tmp_path / name / "version_0" / "metrics.csv" for name in (cell.schedule, "plain")]
    assert len(tables[0].read_text().splitlines()) == len(tables[1].read_text().splitlines()) > 5


# ------------------------------------------------------------------------------------------------- every kind of value


def largest(values: Any) -> Any:
    return torch.as_tensor(values).max()


class LogsEverything(LanguageModule):
    """Logs all kinds of values, reduced in all ways, in a step."""

    def __init__(self) -> None:
        super().__init__(blocks=2)
        self.inner = Inner()

    def log_all(self, stage: str, output: Any, batch: Row) -> None:
        loss, rows = output.loss, len(batch["input_ids"])
        for on_step, on_epoch in ((True, False), (False, True), (True, True)):
            when: dict[str, Any] = {"on_step": on_step, "on_epoch": on_epoch}
            key = f"{stage}{on_step:d}{on_epoch:d}"
            for fx in ("mean", "avg", torch.mean):
                self.log(f"{key}/{fx if isinstance(fx, str) else 'torch'}", loss, reduce_fx=fx, **when)
            self.log(f"{key}/sum", batch["input_ids"].sum(), reduce_fx="sum", **when)
            self.log(f"{key}/sum_of_rows", rows, reduce_fx=torch.sum, **when)
            self.log(f"{key}/min", batch["input_ids"].sum(1).min(), reduce_fx="min", **when)
            self.log(f"{key}/max", batch["input_ids"].sum(1).max(), reduce_fx=max, **when)
            self.log(f"{key}/amax", batch["input_ids"].sum(1).max(), reduce_fx=torch.max, **when)
            self.log(f"{key}/amin", batch["input_ids"].sum(1).min(), reduce_fx=torch.min, **when)
            self.log(f"{key}/sync", loss, sync_dist=True, prog_bar=True, **when)
            self.log(f"{key}/size", loss, batch_size=rows, **when)
            self.log(f"{key}/silent", loss, logger=False, **when)
            self.log(f"{key}/whole", 3, **when)
            self.log(f"{key}/true", True, **when)
            self.log(f"{key}/one_element", loss.reshape(1), **when)
            self.log(f"{key}/nested", {"a": loss, "b": {"c": 2 * loss}}["b"]["c"], **when)
        self.log_dict({f"{stage}/first": loss, f"{stage}/second": 2.0}, prog_bar=True)
        self.inner(self, stage, loss)

    def training_step(self, batch: Row, batch_idx: int) -> Any:
        output = self.model(**batch)
        self.log_all("train", output, batch)
        return output.loss

    def validation_step(self, batch: Row, batch_idx: int) -> None:
        self.log_all("val", self.model(**batch), batch)

    def test_step(self, batch: Row, batch_idx: int) -> None:
        self.log_all("test", self.model(**batch), batch)


class Inner(nn.Module):
    """A part that logs through the module."""

    def forward(self, module: L.LightningModule, stage: str, loss: Tensor) -> None:
        module.log(f"{stage}/inner", loss.detach())


def log_everything(cell: Cell) -> list[Any]:
    return fit_and_test(cell, LogsEverything)


@pytest.mark.contract(
    "Logging and metrics",
    "`self.log` and `log_dict` in steps: any number, any `reduce_fx` by name or"
    " function, `on_step`, `on_epoch`, `sync_dist`, `batch_size`, `logger`, `prog_bar`",
)
@CELLS
def test_a_step_may_log_everything_in_every_way(world: World, cell: Cell) -> None:
    plain = check_all(world, cell, log_everything)
    assert max(len(seen) for seen in plain[:-2]) > 80
