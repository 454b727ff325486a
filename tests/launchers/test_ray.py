"""Ray Train runs a recipe as in docs/guides/clusters.md, with Ray's own ranks and process group."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from support.launched import Ranks

pytestmark = pytest.mark.full

SETS = ["--set=train.length=60st", "--set=train.device=cpu", "--set=checkpoint.every=30st"]
TRAIN = """
import sys

import ray
from ray.train import RunConfig, ScalingConfig
from ray.train.torch import TorchConfig, TorchTrainer


def train(settings):
    import ddpforge

    done = ddpforge.run("digits", out=settings["out"], sets=settings["sets"])
    assert (done.status["state"], done.status["world_size"]) == ("done", 2)


if __name__ == "__main__":
    out, *sets = sys.argv[1:]
    ray.init(num_cpus=3, include_dashboard=False, object_store_memory=200 << 20, _temp_dir=f"{out}/r")
    TorchTrainer(
        train,
        train_loop_config={"out": out, "sets": sets},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=ScalingConfig(num_workers=2, use_gpu=False),
        run_config=RunConfig(name="ray", storage_path=f"{out}/ray"),
    ).fit()
"""


def losses(run: Path) -> list[float]:
    rows = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.fixture
def out() -> Iterator[Path]:
    """Yields a folder with a short path: paths of Ray's sockets in it have at most 107 characters."""
    with TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


def test_ray_gives_the_same_losses_as_other_launchers(
    tmp_path: Path, out: Path, ddpforge: Callable[..., Ranks]
) -> None:
    pytest.importorskip("ray.train")
    sets = [part.removeprefix("--set=") for part in SETS]
    (tmp_path / "train.py").write_text(TRAIN)
    environ = {**os.environ, "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "300", "RAY_USAGE_STATS_ENABLED": "0"}
    command = [sys.executable, "train.py", str(out), *sets]
    done = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=550, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    ddpforge("run", "digits", *SETS, nproc=2)
    found = losses(out / "digits")
    assert found
    assert found == losses(tmp_path / "runs/digits")
