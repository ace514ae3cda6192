"""What is shipped equals what lies in the tree, and Hydra finds the configs in a wheel and in an editable install."""

import ast
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
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
RECIPES_PAGE = ROOT / "docs" / "recipes.md"
QUICK = [
    "paths.cache_dir=cache",
    "trainer.val_check_interval=1",
    "trainer.limit_val_batches=1",
    "data.sequence_length=32",
    "data.batch_size=4",
]
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


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """Another Hydra project: the files that docs/recipes.md shows, each with its path in its first line."""
    blocks = re.findall(r"^```(?:yaml|python)\n# (\S+)\n(.*?)^```", RECIPES_PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names = ["conf/mine.yaml", "conf/model/wide.yaml", "train.py", "conf/own.yaml", "own.py"]
    assert [name for name, _ in blocks] == names
    folder = tmp_path / "project"
    for name, text in blocks:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def run_project(python: Path, project: Path, *arguments: str, script: str = "train.py") -> str:
    """Runs a script of the other project; the ranks that it starts are not those of this process."""
    foreign = ("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "NODE_RANK", "WORLD_SIZE")
    environment = {name: value for name, value in os.environ.items() if name not in foreign}
    if python != Path(sys.executable):
        environment.pop("PYTHONPATH", None)
    command = [str(python), script, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, cwd=project, env=environment, timeout=110)
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_another_project_builds_on_a_recipe_where_the_package_is_installed_as_for_these_tests(project: Path) -> None:
    config = yaml.safe_load(run_project(Path(sys.executable), project, "--cfg", "job"))
    assert config["model"]["config"]["n_embd"] == 256
    assert config["model"]["config"]["n_layer"] == 4
    assert config["trainer"]["strategy"]["schedule"] == "1f1b"
    assert config["trainer"]["max_steps"] == 2


def test_another_project_takes_the_strategy_alone(project: Path) -> None:
    with initialize_config_dir(str(project / "conf"), version_base="1.3"):
        config = OmegaConf.to_container(compose("own"))
    assert config["trainer"]["strategy"]["_target_"] == "lightning_chimera.ChimeraStrategy"
    assert set(config) == {"trainer"}
    assert run_project(Path(sys.executable), project, script="own.py") == ""  # it makes the Trainer, and trains nothing


@pytest.mark.long
def test_another_project_trains_where_the_package_is_installed_as_for_these_tests(project: Path) -> None:
    assert "validation loss" in run_project(Path(sys.executable), project, *QUICK)
    assert list((project / "runs").rglob("metrics.csv"))


@pytest.mark.long
def test_another_project_trains_with_an_installed_wheel(wheel: Path, project: Path, tmp_path: Path) -> None:
    python = tmp_path / "venv" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "venv")], check=True)
    install = ["install", "--quiet", "--no-index", "--no-deps", "--disable-pip-version-check", str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", "--python", str(python), *install], check=True)
    # Dependencies come from the installation of these tests; a path in a .pth file brings no other .pth file along.
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    mine = project / "conf" / "mine.yaml"
    mine.write_text(re.sub(r"^hydra:\n.*?(?=^defaults:)", "", mine.read_text(), flags=re.DOTALL | re.MULTILINE))
    assert "searchpath" not in mine.read_text(), "the wheel's plugin does it"
    with (project / "train.py").open("a") as script:
        script.write("    import lightning_chimera\n    print(lightning_chimera.__file__)\n")
    printed = run_project(python, project, *QUICK)
    assert "validation loss" in printed
    assert f"{site}/lightning_chimera/__init__.py" in printed


def test_lowest_constraints_are_the_lower_bounds():
    extras = PROJECT["optional-dependencies"]
    lowest = pins("lowest")
    loggers = extras["tensorboard"] + extras["wandb"]
    requirements = [Requirement(text) for text in PROJECT["dependencies"] + extras["hub"] + loggers]
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
