"""`ddpforge check`: says what is wrong, on stderr for people and on stdout for machines, and starts nothing."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main


def _check(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["check", *arguments])


def test_a_valid_recipe_is_ok_and_its_batch_is_spelled_out() -> None:
    result = _check("digits", "--ranks", "2", "--set", "train.micro_batch=8")
    assert result.exit_code == 0
    assert result.stdout == "digits: ok, 64 per step = 8 per forward pass × 4 accumulation × 2 ranks\n"


def test_every_error_is_shown_on_stderr_and_the_exit_code_is_2() -> None:
    result = _check("digits", "--set", "train.lenght=5ep", "--set", "model.classes=0")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "unknown key `lenght` in [train]" in result.stderr
    assert "`model.classes` must be at least" in result.stderr
    assert result.stderr.endswith("2 errors in the recipe; nothing was started.\n")


def test_json_is_one_object_on_stdout() -> None:
    assert json.loads(_check("digits", "--json").stdout) == {"ok": True, "problems": []}

    result = _check("digits", "--json", "--set", "train.precision=bf61")
    assert result.exit_code == 2
    assert json.loads(result.stdout) == {
        "ok": False,
        "problems": [
            {
                "message": '`train.precision` cannot be "bf61"',
                "key": "train.precision",
                "file": "--set",
                "line": 1,
                "column": 17,
                "hints": ["did you mean `bf16`?", "one of: fp32, bf16, fp16"],
            }
        ],
    }


def test_the_batch_must_divide_by_the_ranks_that_the_launcher_or_the_option_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert "cannot be dealt out evenly to 3 ranks" in _check("digits").stderr
    assert _check("digits", "--ranks", "4").exit_code == 0


def test_an_optimizer_that_refuses_its_options_is_found() -> None:
    result = _check("digits", "--set", "optimizer.use=torch.optim:SGD", "--set", "optimizer.lr=-1")
    assert result.exit_code == 2
    assert "Invalid learning rate: -1.0" in result.stderr


def test_a_file_that_is_not_there_is_a_problem_like_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = _check("nowhere.toml", "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["problems"][0]["message"] == "no such recipe: `nowhere.toml`"
