"""What is shipped equals what lies in the tree, and Hydra finds the configs in a wheel and in an editable install."""

import ast
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Folders of the tree, and where they go in the wheel.
SHIPPED = {
    "conf": "lightning_chimera/conf",
    "hydra_plugins": "hydra_plugins",
    "lightning_chimera": "lightning_chimera",
    "recipes": "lightning_chimera/recipes",
}
SHOW_CONFIG = ["--config-name", "bert_base", "--cfg", "job", "--package", "model.config"]


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / "constraints" / f"{name}.txt").read_text().splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel built from a source distribution, which thereby is complete too; nothing is downloaded."""
    tree, dist = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("dist")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in SHIPPED:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, cwd=dist)
    assert result.returncode == 0, result.stdout + result.stderr
    # setuptools warns of each folder that it takes for a package and that pyproject.toml does not list.
    assert "is absent from the `packages` configuration" not in result.stdout + result.stderr
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="module")
def site(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the content of the wheel, as pip would unpack it."""
    folder = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    return folder


def from_the_wheel(site: Path, cwd: Path, code: str, *arguments: str) -> str:
    """Runs code with the wheel's packages; -S keeps the editable install away, which a .pth file would bring in."""
    paths = f"import sys; sys.path[:0] = [{str(site)!r}, {sysconfig.get_path('purelib')!r}]\n"
    command = [sys.executable, "-S", "-P", "-c", paths + code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=100)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_wheel_holds_what_the_tree_holds(wheel):
    expected = {
        f"{target}/{path.relative_to(ROOT / folder).as_posix()}"
        for folder, target in SHIPPED.items()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    with zipfile.ZipFile(wheel) as archive:
        shipped = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert shipped == expected


def test_wheel_carries_licence_and_entry_points(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" in name]
        (entry_points,) = (archive.read(name).decode() for name in names if name.endswith("entry_points.txt"))
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert "lightning-chimera-train = lightning_chimera.train:main" in entry_points
    assert "[hydra.plugins]" in entry_points


def test_command_finds_recipes_in_the_wheel(site, tmp_path):
    code = "import lightning_chimera.train as train\nprint(train.__file__)\ntrain.main()"
    printed = from_the_wheel(site, tmp_path, code, *SHOW_CONFIG)
    assert printed.startswith(str(site))
    assert "num_hidden_layers: 12" in printed


def test_another_hydra_app_finds_recipes_in_the_wheel_without_loading_torch(site, tmp_path):
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "mine.yaml").write_text(
        "defaults: [bert_base, _self_]\nmodel: {config: {num_hidden_layers: 6}}\n"
    )
    code = (
        "import hydra\n"
        f"@hydra.main(version_base='1.3', config_path={str(tmp_path / 'own')!r}, config_name='mine')\n"
        "def app(config): print(config.model.config.num_hidden_layers, 'torch' in sys.modules)\n"
        "app()"
    )
    assert from_the_wheel(site, tmp_path, code, "hydra.run.dir=run") == "6 False\n"


def test_command_finds_recipes_in_the_installation_of_these_tests(tmp_path):
    command = [sys.executable, "-m", "lightning_chimera.train", *SHOW_CONFIG]
    result = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=100)
    assert result.returncode == 0, result.stderr
    assert "num_hidden_layers: 12" in result.stdout


def test_lowest_constraints_are_the_lower_bounds():
    extras = PROJECT["optional-dependencies"]
    lowest = pins("lowest")
    requirements = [Requirement(text) for text in PROJECT["dependencies"] + extras["hub"] + extras["tensorboard"]]
    assert {requirement.name for requirement in requirements} == set(lowest)
    for requirement in requirements:
        (bound,) = (specifier.version for specifier in requirement.specifier if specifier.operator == ">=")
        assert Version(lowest[requirement.name]) == Version(bound), requirement.name


def test_tested_versions_lie_in_the_ranges_and_torch_comes_first():
    tested = {canonical(name): version for name, version in pins("tested").items()}
    assert next(iter(tested.items())) == ("torch", "2.13.0")
    extras = PROJECT["optional-dependencies"]
    for text in (*PROJECT["dependencies"], *extras["test"], *extras["dev"][1:]):
        requirement = Requirement(text)
        assert Version(tested[canonical(requirement.name)]) in requirement.specifier, text


def test_version_is_written_alike_everywhere():
    tree = ast.parse((ROOT / "lightning_chimera" / "__init__.py").read_text())
    (version,) = (
        node.value.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", None) == "__version__"
    )
    assert version == PROJECT["version"]


def test_plugins_share_their_namespace_with_other_distributions():
    assert not (ROOT / "hydra_plugins" / "__init__.py").exists()


@pytest.mark.parametrize("folder", [*SHIPPED, "tests"])
def test_sources_are_ascii(folder):
    sources = [path for path in (ROOT / folder).rglob("*") if path.suffix in (".py", ".yaml", ".sbatch")]
    assert sources
    assert [path for path in sources if not path.read_bytes().isascii()] == []
