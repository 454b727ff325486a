"""Fixture that runs ddpforge."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ddpforge.testing.ranks import run_ddpforge

RECIPE = Path(__file__).parents[1] / "recipes" / "cartpole.toml"


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Runs the recipe in the test's folder: `train("name", "train.length=5st", ranks=2)`; returns the metrics rows.

    With `launcher` it starts torchrun, as a user would; without, it is faster.
    """

    def run(name: str, *sets: str, ranks: int = 1, launcher: bool = False) -> list[dict[str, Any]]:
        arguments = ["run", str(RECIPE), f"--set=name={name}", *(f"--set={value}" for value in sets)]
        if launcher:
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
            command = [sys.executable, *torchrun, "-m", "ddpforge", *arguments]
            done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        else:
            done = run_ddpforge(*arguments, cwd=tmp_path, ranks=ranks)
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    return run
