"""Several GPUs of one machine: one curve under every strategy, faults that end soon. Run with `pytest -m gpus`."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.launched import Ranks
from support.sharding import CNN, DDP, EACH, FSDP, RECIPE, ZERO, Bench

GPUS = torch.cuda.device_count()
SOON = 30  # seconds, in which nothing may be left of a run that lost a rank
pytestmark = [
    pytest.mark.gpus,
    pytest.mark.skipif(GPUS < 2, reason="needs two CUDA devices"),
]

LONG = f"""
recipe = 2
name = "run"
model = {{ use = "gpt", vocab_size = 256, block_size = 32, layers = 4, heads = 4, width = 64 }}
data.train = {{ use = "text", split = "train", block_size = 32 }}
task = {{ use = "language_modeling" }}
optimizer = {{ use = "adamw", lr = 1e-3 }}
train = {{ length = "100000st", global_batch = {8 * GPUS}, collective_timeout = "20s" }}
track.every = "10st"
"""
FAULT = """
import os, signal, time
from ddpforge.interfaces import Callback

class Fault(Callback):
    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_start(self, run):
        self.here = run.world.all.rank == 1

    def on_step(self, info):
        if self.here and info.step == 20:
            if self.kind == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            if self.kind == "hangs":
                time.sleep(1000)
            raise ValueError("of rank 1")
"""


@pytest.fixture
def bench(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Bench:
    return Bench(tmp_path, ddpforge, RECIPE.replace("global_batch = 12", f"global_batch = {3 * GPUS}"))


def started(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """`python -m ddpforge ARGUMENTS` in a folder with the recipe."""
    (folder / "run.toml").write_text(LONG)
    (folder / "fault.py").write_text(FAULT)
    command = [sys.executable, "-m", "ddpforge", *arguments]
    return subprocess.Popen(command, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True)


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "runs/run/status.json").read_text())
    return found


def wait_for_steps(process: subprocess.Popen[str]) -> None:
    assert process.stderr
    assert any(int(found[1]) >= 3 for line in process.stderr if (found := re.search(r"step (\d+)/", line)))


def test_every_strategy_gives_the_curve_of_one_gpu(tmp_path: Path) -> None:
    chosen = "ddp@1,ddp,fsdp,deepspeed:1,deepspeed:2,deepspeed:3" + (",fsdp:replicas=2" if GPUS % 4 == 0 else "")
    command = ("parity", "run.toml", "--strategies", chosen, "--nproc", str(GPUS))
    process = started(tmp_path, *command, "--set=train.length=40st", "--set=train.collective_timeout=10m")
    _, said = process.communicate(timeout=600)
    assert process.returncode == 0, said


@pytest.mark.parametrize("kind", ["killed", "raises", "hangs"])
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_rank_that_is_lost_ends_the_run_soon(tmp_path: Path, strategy: str, kind: str) -> None:
    sets = ["--set=callbacks.fault.use=./fault.py:Fault", f"--set=callbacks.fault.kind={kind}"]
    process = started(tmp_path, "launch", "run.toml", f"--nproc={GPUS}", *sets, f"--set=strategy.use={strategy}")
    wait_for_steps(process)
    began = time.monotonic()
    _, said = process.communicate(timeout=600)
    took = time.monotonic() - began
    assert process.returncode not in (0, 75), said
    found = status(tmp_path)
    assert found["state"] == "failed"
    assert "rank 1" in found["error"]
    assert took < SOON + (20 if kind == "hangs" else 0)  # of which the first 20 are train.collective_timeout


def test_a_request_to_stop_ends_with_a_checkpoint(tmp_path: Path) -> None:
    process = started(tmp_path, "launch", "run.toml", f"--nproc={GPUS}", "--set=strategy.use=fsdp")
    wait_for_steps(process)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 75, said
    step = status(tmp_path)["step"]
    assert f"step-{step:09}" in max((tmp_path / "runs/run/checkpoints").glob("step-*")).name


@pytest.mark.parametrize("strategy", [DDP, FSDP, ZERO[3]], ids=["ddp", "fsdp", "zero3"])
def test_ranks_that_see_one_gpu_each_train(bench: Bench, strategy: str) -> None:
    bench("all", strategy, nproc=GPUS)
    (bench.folder / "alone.toml").write_text((bench.folder / "all.toml").read_text().replace('"all"', '"alone"'))
    code = 'CUDA_VISIBLE_DEVICES=$LOCAL_RANK exec "$0" -m ddpforge run alone.toml'
    torchrun = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        f"--nproc-per-node={GPUS}",
        "--no-python",
    ]
    subprocess.run([*torchrun, "sh", "-c", code, sys.executable], cwd=bench.folder, check=True, env=os.environ)
    bench.alike("alone", "all", rel=1e-4)


@pytest.mark.parametrize("strategy", EACH.values(), ids=EACH)
@pytest.mark.parametrize("fewer", [1, max(1, GPUS // 2)])
def test_a_checkpoint_of_all_gpus_goes_on_on_fewer(bench: Bench, fewer: int, strategy: str) -> None:
    bench.recipe = bench.recipe.replace('use = "cosine"\nwarmup = "5st"', 'use = "constant"')  # of any length
    bench("whole", 'use = "single"', nproc=1, length="20st")
    bench("parts", strategy, nproc=GPUS, length="10st")
    bench("parts", DDP, nproc=fewer, length="20st")
    assert bench.column("parts") == pytest.approx(bench.column("whole"), rel=1e-4)


def test_batchnorm_over_all_gpus_is_that_of_the_whole_batch_on_one(bench: Bench) -> None:
    bench("all", DDP, nproc=GPUS, parts=CNN, train="sync_batchnorm = true")
    bench.recipe = bench.recipe.replace("micro_batch = 3", f"micro_batch = {3 * GPUS}")
    bench("one", 'use = "single"', nproc=1, parts=CNN)
    bench.alike("all", "one", rel=1e-3)
