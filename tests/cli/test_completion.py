"""`ddpforge completion`: the script for a shell, and its proposals."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpforge.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_calls_ddpforge_for_proposals(shell: str) -> None:
    result = CliRunner().invoke(main, ["completion", shell])
    assert result.exit_code == 0
    assert f"_DDPFORGE_COMPLETE={shell}_complete" in result.stdout


def test_unknown_shells_are_refused() -> None:
    result = CliRunner().invoke(main, ["completion", "tcsh"])
    assert result.exit_code == 2
    assert "'bash', 'zsh', 'fish'" in result.stderr


def complete(words: str) -> list[str]:
    """Returns the proposals for bash after `words` and the tab key: "kind,word" for each."""
    asked = {"_DDPFORGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [str(Path(sys.executable).with_name("ddpforge"))]
    return subprocess.run(command, env=os.environ | asked, capture_output=True, text=True, check=True).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ddpforge r", ["plain,recipes", "plain,report", "plain,run", "plain,runs"]),
        ("ddpforge recipes c", ["plain,cp"]),
        ("ddpforge run --allow", ["plain,--allow-change"]),
        ("ddpforge completion z", ["plain,zsh"]),
        ("ddpforge run my", ["file,my"]),  # the shell's own completion of files
        ("ddpforge eval runs/d", ["file,runs/d"]),
    ],
)
def test_commands_options_and_files_are_completed(words: str, expected: list[str]) -> None:
    assert complete(words) == expected
