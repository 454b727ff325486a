"""Documentation of plugins: their code runs with the results that they show."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.fake_distributions import forgetting_modules_below
from test_docs import blocks as all_blocks
from test_docs import write_files
from test_tutorial import shell

from ddpforge.cli import main
from ddpforge.components.kinds import KINDS
from ddpforge.testing.registered_checks import checks_of
from ddpforge.testing.settings import SECTIONS

DOCS = Path(__file__).parents[2] / "docs"
TUTORIAL = (DOCS / "custom-loss.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", TUTORIAL, re.DOTALL | re.MULTILINE)


@pytest.fixture
def focal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Writes the files of the tutorial, and returns their folder."""
    monkeypatch.chdir(tmp_path)
    for text in blocks("python"):
        (tmp_path / text.split()[1]).write_text(text)
    recipe, _, project = blocks("toml")
    (tmp_path / "recipe.toml").write_text(recipe)
    (tmp_path / "pyproject.toml").write_text(project)
    return tmp_path


def test_tutorial_has_less_than_40_lines_of_code() -> None:
    component, _, test = blocks("python")
    lines = [line for line in (component + test + blocks("toml")[2]).splitlines() if line.strip()]
    assert len([line for line in lines if not line.startswith("#")]) < 40


def test_tutorial_file_passes_and_its_mistake_gives_the_message_shown(focal: Path) -> None:
    invoke = CliRunner().invoke
    with forgetting_modules_below(focal):
        assert invoke(main, ["plugins", "test", "./focal.py"]).exit_code == 0
    (focal / "focal.py").write_text((focal / "focal.py").read_text().replace(").sum()", ").mean()"))
    with forgetting_modules_below(focal):
        result = invoke(main, ["plugins", "test", "./focal.py"])
    assert result.exit_code == 1
    (shown,) = blocks("text")
    number = r"[0-9]+\.[0-9]+"  # differs between versions of torch
    shown = re.sub(number, "N", shown.replace("/home/you/focal", str(focal)))
    assert shown in re.sub(number, "N", result.stdout)


@pytest.mark.full
def test_tutorial_package_installs_passes_its_tests_and_trains(focal: Path) -> None:
    """Tests of packages that `plugins new` writes are in `tests/components/test_scaffold.py`."""
    offline = ["--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--disable-pip-version-check"]
    command = [sys.executable, "-m", "pip", "install", *offline, "--target", "site", "."]
    subprocess.run(command, check=True, capture_output=True)
    environment = os.environ | {"PYTHONPATH": "site", "OMP_NUM_THREADS": "1"}
    for words in (
        ["ddpforge", "plugins", "show", "focal"],
        ["pytest", "-q", "test_focal.py"],
        ["ddpforge", "launch", "recipe.toml", "--nproc=2", "--set=train.length=3st"],
    ):
        done = subprocess.run([sys.executable, "-m", *words], capture_output=True, text=True, env=environment)
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.full
def test_examples_of_the_plugin_pages_pass_the_checks(tmp_path: Path) -> None:
    write_files(DOCS / "extend/test-a-plugin.md", tmp_path)
    (tmp_path / "ddpforge_testing.toml").write_text(all_blocks(DOCS / "extend/test-a-plugin.md", "ini")[-1])
    (tmp_path / "lines").mkdir()
    (tmp_path / "lines/a.txt").write_text("".join(f"line {number:02}\n" for number in range(16)))
    files = sorted({path.name for path in tmp_path.glob("*.py")} - {"mini_tp.py", "replicas.py"})
    assert len(files) > 12
    for file in files:  # the two strategies are compared with DDP by the commands of their page
        shell(f"ddpforge plugins test ./{file}", tmp_path)


def test_how_to_names_every_check_and_every_key() -> None:
    page = (DOCS / "extend/test-a-plugin.md").read_text()
    table = page.partition("## What is checked")[2]
    for kind in KINDS:
        for check in checks_of(kind):
            assert f"`{check.name}`" in table, check.name
    for key in (*SECTIONS, "options", "skip", *(key for spec in KINDS.values() for key in spec.settings())):
        assert re.search(rf"\b{key}\b", page), key
