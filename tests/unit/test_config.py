"""The training command's own part: the search path, which mistakes are told without a traceback, and the summary."""

import re
from pathlib import Path
from types import SimpleNamespace

import lightning as L
import pytest
from hydra._internal.config_search_path_impl import ConfigSearchPathImpl
from hydra.errors import CompactHydraException
from omegaconf import OmegaConf

from hydra_plugins.lightning_chimera import LightningChimeraSearchPathPlugin
from lightning_chimera import train


class Module(L.LightningModule):
    """Fails when it is fitted, at the step it is told to."""

    def __init__(self, message):
        super().__init__()
        self.message = message


class Trainer:
    """Stands in for Lightning's: fit raises what the module holds."""

    def __init__(self, logger, callbacks, has_begun=False, global_zero=True, log_dir=None):
        self.callbacks = callbacks
        self.has_begun = has_begun
        self.is_global_zero = global_zero
        self.loggers = [SimpleNamespace(log_dir=log_dir)]
        self.checkpoint_callback = SimpleNamespace(best_model_path="some/best.ckpt")
        self.sanity_checking = False
        self.callback_metrics = {}

    def fit(self, module, datamodule, ckpt_path):
        if self.has_begun:
            self.callbacks[0].on_train_start(self, module)
        if module.message:
            raise ValueError(module.message)
        for loss in (7.5, 5.25):
            self.callback_metrics["val/loss"] = SimpleNamespace(item=lambda loss=loss: loss)
            self.callbacks[0].on_validation_end(self, module)


class Data:
    """Takes the place of a data module."""

    def prepare_data(self):
        pass


class BadData:
    """A data module whose text is not there."""

    def prepare_data(self):
        raise FileNotFoundError("no such text")


def config(tmp_path, message=None, **trainer):
    here = Module.__module__
    return OmegaConf.create(
        {
            "seed": 1,
            "ckpt_path": None,
            "data": {"_target_": f"{here}.Data"},
            "optimizer": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
            "model": {"_target_": f"{here}.Module", "message": message},
            "callbacks": {},
            "logger": {},
            "trainer": {"_target_": f"{here}.Trainer", **trainer},
            "paths": {"output_dir": str(tmp_path)},
        }
    )


def test_the_packaged_configs_come_last_so_that_a_users_files_win():
    path = ConfigSearchPathImpl()
    path.append("main", "file:///mine")
    LightningChimeraSearchPathPlugin().manipulate_search_path(path)
    first, *ours = [element.path for element in path.get_path()]
    assert first == "file:///mine"
    assert [Path(location.removeprefix("file://")).name for location in ours] == ["conf", "recipes"]
    assert all(Path(location.removeprefix("file://"), "__init__.py").is_file() for location in ours)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("optimizer.lr", "fast", "TypeError"),
        ("data._target_", f"{__name__}.BadData", "FileNotFoundError: no such text"),
    ],
)
def test_a_mistake_in_data_or_optimizer_is_told_before_anything_is_started(tmp_path, key, value, message):
    mistaken = config(tmp_path)
    OmegaConf.update(mistaken, key, value)
    with pytest.raises(CompactHydraException, match=message):
        train.run(mistaken)


def test_a_mistake_before_the_first_batch_is_told_without_a_traceback(tmp_path):
    with pytest.raises(CompactHydraException, match=re.escape("ValueError: 3 stages are odd")) as caught:
        train.run(config(tmp_path, message="3 stages are odd"))
    assert isinstance(caught.value.__cause__, ValueError)


def test_a_failure_during_training_keeps_its_traceback(tmp_path):
    with pytest.raises(ValueError, match="a bug"):
        train.run(config(tmp_path, message="a bug", has_begun=True))


def test_the_summary_says_where_everything_lies_and_whether_it_learned(tmp_path, capsys):
    (tmp_path / "step_20.png").touch()
    assert train.run(config(tmp_path, log_dir="some/logs")) == 5.25
    assert capsys.readouterr().out.splitlines() == [
        "validation loss  7.500 -> 5.250",
        "best checkpoint  some/best.ckpt",
        f"timeline picture {tmp_path}/step_20.png",
        "logged values    some/logs",
        f"run folder       {tmp_path}",
    ]


def test_only_global_rank_0_prints_the_summary(tmp_path, capsys):
    train.run(config(tmp_path, global_zero=False))
    assert capsys.readouterr().out == ""
