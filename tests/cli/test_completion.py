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


def complete(words: str, folder: Path | None = None) -> list[str]:
    """Returns the proposals for bash after `words` and the tab key: "kind,word" for each."""
    asked = {"_DDPFORGE_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": str(len(words.split()) - 1)}
    command = [str(Path(sys.executable).with_name("ddpforge"))]
    return subprocess.run(
        command, env=os.environ | asked, cwd=folder, capture_output=True, text=True, check=True
    ).stdout.split()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("ddpforge r", ["plain,recipes", "plain,report", "plain,run", "plain,runs"]),
        ("ddpforge recipes c", ["plain,cp"]),
        ("ddpforge run --allow", ["plain,--allow-change"]),
        ("ddpforge completion z", ["plain,zsh"]),
        ("ddpforge run my", ["file,my"]),  # the shell's own completion of files
        ("ddpforge eval runs/d", ["file,runs/d"]),
        ("ddpforge run di", ["plain,diffusion", "plain,digits", "plain,distil-digits", "file,di"]),
        ("ddpforge check digits optimizer.l", ["plain,optimizer.layer_decay=", "plain,optimizer.lr="]),
        ("ddpforge run digits --set train.gl", ["plain,train.global_batch="]),
        ("ddpforge run nowhere.toml schedule.w", []),
        ("ddpforge plugins show cla", ["plain,classification"]),
    ],
)
def test_commands_options_recipes_keys_and_files_are_completed(words: str, expected: list[str]) -> None:
    assert complete(words) == expected


def test_names_of_runs_are_completed(tmp_path: Path) -> None:
    for name in ("digits", "digits-2", "other"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "run.json").touch()
    assert complete("ddpforge status di", tmp_path) == ["plain,digits", "plain,digits-2", "file,di"]


def test_keys_are_completed_without_torch() -> None:
    script = "import sys; from ddpforge.cli.completion import keys; print(keys('digits', 'optimizer.')); "
    script += "assert 'torch' not in sys.modules"
    shown = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True).stdout
    assert "'optimizer.weight_decay'" in shown
