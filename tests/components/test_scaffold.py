"""`ddpforge plugins new` writes packages that can be installed and that pass their own tests and the kit."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.components.kinds import KINDS
from ddpforge.components.scaffold import write_plugin
from ddpforge.recipe import load_recipe


@pytest.fixture(autouse=True)
def _in_tmp_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plugins", "new", *arguments])


def test_plugins_new_prints_the_written_files_and_the_next_command() -> None:
    result = invoke("task", "my-task")
    assert result.exit_code == 0
    assert result.stdout.splitlines() == [
        "my-task/pyproject.toml",
        "my-task/README.md",
        "my-task/src/my_task/__init__.py",
        "my-task/src/my_task/ddpforge_testing.toml",
        "my-task/recipe.toml",
        "my-task/tests/test_my_task.py",
    ]
    assert all(Path(line).is_file() for line in result.stdout.splitlines())
    assert "next: `pip install -e 'my-task[test]'`" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["model", "Net"], "`Net` cannot be the name of a plugin"),
        (["model", "my net"], "cannot be the name"),
        (["model", "../net"], "cannot be the name"),
        (["model", "net-"], "cannot be the name"),
        (["model", "a__b"], "cannot be the name"),
        (["model", "9net"], "cannot be the name"),
        (["model", "x" * 51], "cannot be the name"),
        (["model", "class"], "is a keyword of Python"),
        (["model", "mlp"], "there is a model `mlp` already, of ddpforge"),
        (["data", "torch"], "there is already a Python module `torch`"),
        (["data", "json"], "for example `my_json`"),
        (["network", "net"], "Invalid value for"),
    ],
)
def test_invalid_plugin_names_are_rejected(arguments: list[str], says: str) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert says in result.stderr
    assert list(Path().iterdir()) == []


def test_an_existing_folder_is_not_changed() -> None:
    Path("net").mkdir()
    result = invoke("model", "net")
    assert result.exit_code == 2
    assert "net exists already" in result.stderr
    assert list(Path("net").iterdir()) == []
    Path("a-file").write_text("")
    assert invoke("model", "net", "--in", "a-file").exit_code == 2


# ---------------------------------------------------------------------------------------------- written packages
UNPACK = """
import os, sys, zipfile
from setuptools.build_meta import build_wheel
site, *projects = sys.argv[1:]
os.mkdir(site)
for project in projects:
    os.chdir(project)
    zipfile.ZipFile(os.path.join(site, build_wheel(site))).extractall(site)
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Installs a plugin of every kind in `site`, from the wheel that pip would build; a test below uses pip itself."""
    folder = tmp_path_factory.mktemp("plugins")
    plugins = [str(write_plugin(kind, f"try_{kind}", folder).folder) for kind in KINDS]
    subprocess.run([sys.executable, "-c", UNPACK, str(folder / "site"), *plugins], check=True, capture_output=True)
    return folder


def run(folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(folder / "site"), "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, env=environment, cwd=folder)


def own_tests(folder: Path, *kinds: str, only: str = "") -> subprocess.CompletedProcess[str]:
    tests = [f"try_{kind}/tests" for kind in kinds]
    return run(folder, "pytest", "-q", "--import-mode=importlib", "-p", "no:cacheprovider", *tests, "-k", only)


IN_ONE_PROCESS = ["schedule", "metric", "optimizer", "task", "tracker"]  # kinds whose checks in the kit start no ranks


def test_written_tests_of_all_kinds_pass_without_ranks(installed: Path) -> None:
    done = own_tests(installed, *KINDS, only=" or ".join(["not contract", *(f"try_{kind}" for kind in IN_ONE_PROCESS)]))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{2 * len(KINDS) + len(IN_ONE_PROCESS)} passed" in done.stdout


@pytest.mark.full
@pytest.mark.parametrize("kind", ["model", "data", "callback", "strategy"])
def test_written_tests_that_start_ranks_pass(installed: Path, kind: str) -> None:
    done = own_tests(installed, kind)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_kit_tests_an_editable_install(installed: Path, tmp_path: Path) -> None:
    """`pip install -e` installs only the entry points; the package stays in its folder."""
    plugin = write_plugin("metric", "live_metric", tmp_path)
    (tmp_path / "empty").mkdir()
    subprocess.run([sys.executable, "-m", "venv", "--system-site-packages", "--without-pip", "env"], check=True)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    for path in sys.path:
        if path.endswith("site-packages"):
            (site / "outer.pth").write_text(f"import site; site.addsitedir({path!r})\n")
    python = str(tmp_path / "env/bin/python")
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    subprocess.run(
        [python, "-m", "pip", "install", *offline, "-e", str(plugin.folder)], check=True, capture_output=True
    )
    command = [python, "-m", "ddpforge", "plugins", "test", "live-metric"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
@pytest.mark.parametrize("kind", ["model", "strategy"])
def test_written_recipes_train(installed: Path, kind: str) -> None:
    done = run(installed, "ddpforge", "launch", f"try_{kind}/recipe.toml", "--nproc=2", "--set=train.length=3st")
    assert done.returncode == 0, done.stdout + done.stderr


def test_written_recipes_name_the_written_component(tmp_path: Path) -> None:
    write_plugin("strategy", "fast-lane", tmp_path)
    assert 'use = "fast_lane"' in (tmp_path / "fast-lane/recipe.toml").read_text()
    with pytest.raises(Exception, match="there is no strategy named `fast_lane`"):
        load_recipe(tmp_path / "fast-lane/recipe.toml")
