"""What runs a program once more, for the other ranks."""

import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

from lightning_chimera import commands


@pytest.fixture
def runs(monkeypatch, tmp_path):
    """Makes this process look like one that runs a program; the paths are those of the test's folder."""

    def runs(argument: str, module: str | None = None, file: str | None = None) -> None:
        main = ModuleType("__main__")
        main.__spec__ = None if module is None else ModuleSpec(module, None, origin=file and str(tmp_path / file))
        if file is not None:
            main.__file__ = file if file.startswith("<") else str(tmp_path / file)
        monkeypatch.setitem(sys.modules, "__main__", main)
        monkeypatch.setattr(sys, "argv", [argument, "--lr", "a b"])
        monkeypatch.chdir(tmp_path)

    for name in ("train.py", "app/__main__.py", "profiler.py"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    return runs


def rerun() -> list[str]:
    commands.check_program()
    arguments, folder = commands.command(1)
    assert folder is None
    assert arguments[0] == sys.executable
    assert arguments[-2:] == ["--lr", "a b"]
    return arguments[1:-2]


@pytest.mark.parametrize(
    ("argument", "module", "file", "expected"),
    [
        ("train.py", None, "train.py", ["{}/train.py"]),
        ("{}/app/__main__.py", "app.__main__", "app/__main__.py", ["-m", "app"]),
        ("{}/train.py", "train", "train.py", ["-m", "train"]),
        ("app", "__main__", "app/__main__.py", ["{}/app"]),
        ("train.py", "cProfile", "profiler.py", ["{}/train.py"]),
        ("changed", "train", "train.py", ["-m", "train"]),
    ],
    ids=["a script", "a package", "a module", "a folder", "a script under a profiler", "a module that changes argv"],
)
def test_a_program_is_run_once_more_as_it_was(runs, tmp_path, argument, module, file, expected) -> None:
    runs(argument.format(tmp_path), module, file)
    assert rerun() == [part.format(tmp_path) for part in expected]


def test_a_script_is_found_from_another_folder(runs, tmp_path, monkeypatch) -> None:
    runs("train.py", None, "train.py")
    monkeypatch.chdir(tmp_path / "app")
    assert rerun() == [str(tmp_path / "train.py")]


def test_a_script_is_run_by_the_name_of_its_link(runs, tmp_path) -> None:
    Path(tmp_path, "link.py").symlink_to("train.py")
    runs("link.py", None, "link.py")
    assert rerun() == [str(tmp_path / "link.py")]


@pytest.mark.parametrize(("argument", "file"), [("-c", None), ("-", "<stdin>"), ("", None)])
def test_a_program_without_a_file_is_refused(runs, argument, file) -> None:
    runs(argument, None, file)
    with pytest.raises(MisconfigurationException, match=r"there is no file of it.*start_method='fork'"):
        commands.check_program()


@pytest.mark.parametrize("method", ["popen", "spawn", "forkserver"])
def test_a_notebook_is_told_to_fork(monkeypatch, method) -> None:
    monkeypatch.setattr(commands, "_IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=rf"'{method}'.*start_method='fork'\), devices=2\)"):
        commands.check_session(method, 2)
    commands.check_session("fork", 2)
    commands.check_session("popen", 1)
