"""A way to run ddpforge."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RECIPE = Path(__file__).parents[1] / "recipes" / "cartpole.toml"


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """`train("name", "train.length=5st", ranks=2)` runs the recipe in the test's folder; the rows of its metrics."""

    def run(name: str, *sets: str, ranks: int = 1) -> list[dict[str, Any]]:
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"] if ranks > 1 else []
        command = [sys.executable, *launcher, "-m", "ddpforge", "run", str(RECIPE), f"--set=name={name}"]
        done = subprocess.run(
            [*command, *(f"--set={value}" for value in sets)],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return [json.loads(line) for line in (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()]

    return run
