"""Forked ranks for a plugin's tests: real ranks, with their exit codes and output."""

import json
import os
from functools import partial
from pathlib import Path

import pytest

from ddpforge.launchers.torchrun import NO_GPUS
from ddpforge.ranks import devices
from ddpforge.testing.ranks import fork_ranks, run_ddpforge, starter

RECIPE = """
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [4] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8 }
"""


def test_two_ranks_train_and_the_environment_is_restored(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE)
    before = dict(os.environ)
    done = run_ddpforge("run", "tiny.toml", cwd=tmp_path, ranks=2)

    assert done.returncode == 0, done.stderr
    assert "2 ranks" in done.stdout + done.stderr
    assert json.loads((tmp_path / "runs/tiny/status.json").read_text())["step"] == 2
    assert dict(os.environ) == before


def test_recipe_error_returns_its_exit_code_and_message(tmp_path: Path) -> None:
    (tmp_path / "tiny.toml").write_text(RECIPE.replace("sgd", "sdg"))
    done = run_ddpforge("run", "tiny.toml", cwd=tmp_path)

    assert done.returncode == 2
    assert "did you mean `sgd`?" in done.stderr


def test_ranks_that_do_not_end_are_killed_and_the_limit_is_the_last_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text(RECIPE.replace("2st", "1000000000st"))

    code = fork_ranks(["tiny.toml"], 1, tmp_path / "log", timeout=3.0)

    assert code != 0
    assert (tmp_path / "log").read_text().endswith("did not end within 3 seconds\n")


def test_compared_runs_use_gpus_only_if_there_is_one_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "accelerators", lambda: 2)

    assert starter(4, "auto") is fork_ranks
    assert starter(2, "cpu") is fork_ranks
    on_gpus = starter(2, "cuda")
    assert isinstance(on_gpus, partial)
    assert (on_gpus.args, on_gpus.keywords) == (({},), {"python": None})
    other = starter(4, "auto", "other/bin/python")
    assert isinstance(other, partial)
    assert (other.args, other.keywords) == ((NO_GPUS,), {"python": "other/bin/python"})
