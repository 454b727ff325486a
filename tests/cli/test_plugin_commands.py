"""Commands of plugins: listed without an import, loaded when they run, and harmless when they are broken."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from support.fake_distributions import forgetting_modules_below, install

from ddpforge.cli import main
from ddpforge.errors import ExitCode

PAGE = Path(__file__).parents[2] / "docs/extend/command.md"
CODE = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
Installer = Callable[..., None]


@pytest.fixture
def plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Yields a function that installs a plugin with commands: `plugin("code", name="function")`."""
    monkeypatch.syspath_prepend(tmp_path)

    def installed(code: str, distribution: str = "house-tools", **commands: str) -> None:
        module = distribution.replace("-", "_")
        points = {name: f"{module}:{attribute}" for name, attribute in commands.items()}
        install(tmp_path, distribution, {"ddpforge.command": points}, modules={f"{module}.py": code})

    with forgetting_modules_below(tmp_path):
        yield installed


def call(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def test_help_lists_commands_of_plugins_with_their_first_line_and_imports_none(plugin: Installer) -> None:
    plugin(CODE, queue="queue")
    *_, own, listed = call("--help").stdout.split("\n\n")
    assert own.startswith("Recipes and plugins:")
    line = "  queue           Print the runs that wait for a start. (house-tools)"
    assert listed == f"Plugins:\n{line}\n"
    assert "house_tools" not in sys.modules


def test_a_command_of_a_plugin_runs_with_its_own_options(plugin: Installer) -> None:
    plugin(CODE, queue="queue")
    found = call("queue", "--out", "elsewhere")
    assert (found.exit_code, found.stdout) == (0, "no run waits in elsewhere\n")
    assert "--out" in call("queue", "--help").stdout


def test_a_command_group_of_a_plugin_has_its_commands(plugin: Installer) -> None:
    code = "import click\n@click.group()\ndef team(): ...\n@team.command()\ndef hello(): click.echo('hi')"
    plugin(code, team="team")
    assert call("team", "hello").stdout == "hi\n"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "`queue` of house-tools (ddpforge.command) cannot be loaded: ZeroDivisionError"),
        ("queue = 3", "`queue` of house-tools (ddpforge.command) is a int, not a command of click"),
        ("", "cannot be loaded: AttributeError"),
    ],
    ids=["import", "no command", "no attribute"],
)
def test_a_broken_command_is_listed_and_fails_only_when_it_is_called(plugin: Installer, code: str, said: str) -> None:
    plugin(code, queue="queue")
    assert "queue" in call("--help").stdout
    assert call("recipes", "ls").exit_code == 0
    found = call("queue")
    assert found.exit_code == ExitCode.ENVIRONMENT
    assert said in found.stderr
    assert "DDPFORGE_DISABLE_PLUGINS=house-tools" in found.stderr


def test_a_command_of_two_plugins_is_refused_with_both(plugin: Installer) -> None:
    plugin(CODE, queue="queue")
    plugin(CODE, "other-tools", queue="queue")
    found = call("queue")
    assert found.exit_code == ExitCode.ENVIRONMENT
    assert "`queue` of house-tools (ddpforge.command) is a command of other-tools, too" in found.stderr


def test_a_plugin_cannot_replace_a_command_of_ddpforge(plugin: Installer) -> None:
    plugin("raise SystemExit(7)", status="status")
    assert "status          Not used: ddpforge has this command. (house-tools)" in call("--help").stdout
    assert call("status", "--help").exit_code == 0
