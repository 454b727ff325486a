"""Forked ranks for a plugin's tests: real ranks, with their exit codes and output."""

import json
import os
from pathlib import Path

from ddpforge.testing.ranks import run_ddpforge

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
