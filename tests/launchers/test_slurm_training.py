"""Jobs of `ddpforge slurm` train on a real Slurm; after any stop, the weights equal those of an undisturbed run."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.launched import Ranks
from support.slurm import Job, Slurm, until

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.runs.folder import RunFolder

pytestmark = pytest.mark.full

STEPS = 80
RECIPE = f"""
recipe = 2
name = "undisturbed"
[model]
use = "mlp"
inputs = 64
outputs = 10
dropout = 0.1
[data.train]
use = "digits"
split = "train"
[task]
use = "classification"
[optimizer]
use = "adamw"
lr = 0.01
[train]
length = "{STEPS}st"
global_batch = 32
device = "cpu"
[checkpoint]
every = "1000st"
[callbacks.slow]
use = "./slow.py:Slow"
"""
# From step 5 on, each step takes 4 seconds while a file `slow` exists.
SLOW = """
import time
from pathlib import Path
from ddpforge.interfaces import Callback

class Slow(Callback):
    def on_step(self, info):
        Path("step").write_text(str(info.step))
        if info.step >= 5 and Path("slow").exists():
            time.sleep(4)
"""


@pytest.fixture
def folder(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> Path:
    """Trains a recipe undisturbed with two ranks, makes later runs slow, and returns the folder."""
    (tmp_path / "run.toml").write_text(RECIPE)
    (tmp_path / "slow.py").write_text(SLOW)
    ddpforge("run", "run.toml", nproc=2)
    (tmp_path / "step").unlink()
    (tmp_path / "slow").touch()
    return tmp_path


def submitted(slurm: Slurm, folder: Path, *flags: str) -> Job:
    """Submits the job of a run called `job`, with a rank on each of two nodes."""
    command = [sys.executable, "-m", "ddpforge", "slurm", "run.toml", "--nodes=2", "--set=name=job", "--to=job.sh"]
    subprocess.run([*command, "--sbatch=output=out.txt", "--sbatch=exclusive", *flags], cwd=folder, check=True)
    return slurm.submit(folder / "job.sh", cwd=folder, env={"OMP_NUM_THREADS": "1"})


def says(job: Job, folder: Path, text: str, times: int = 1) -> None:
    """Waits until the job has printed `text` `times` times."""
    out = folder / "out.txt"
    until(lambda: out.exists() and out.read_text().count(text) >= times, 200, lambda: f"{out.read_text()}\n{job.facts}")


def trains(folder: Path) -> None:
    """Waits until the job has reached its slow steps."""
    step = folder / "step"
    until(lambda: step.exists() and int(step.read_text() or 0) >= 6, 120, (folder / "out.txt").read_text)


def newest(run: Path) -> Path:
    """Returns a run's last checkpoint."""
    return max(run.glob("checkpoints/step-*"))


def finishes(job: Job, folder: Path) -> None:
    """Waits for the end of a requeued job, and compares its checkpoint with the undisturbed run's, tensor by tensor."""
    (folder / "slow").unlink()
    job.begin()
    assert job.wait(timeout=150) == "COMPLETED", (folder / "out.txt").read_text()
    found, expected = (CheckpointReader(newest(folder / "runs" / name)) for name in ("job", "undisturbed"))
    assert found.metadata.step == STEPS
    for section in ("model", "optimizer"):
        names = list(expected.names(section))
        assert list(found.names(section)) == names
        assert names
        for name in names:
            assert torch.equal(found.read(section, name), expected.read(section, name)), name


@pytest.mark.parametrize("flags", [(), ("--one-task-per-rank",)], ids=["launchers", "tasks"])
def test_preempted_job_ends_with_the_weights_of_an_undisturbed_run(
    slurm: Slurm, folder: Path, flags: tuple[str, ...]
) -> None:
    job = submitted(slurm, folder, *flags)
    trains(folder)
    (folder / "urgent.sh").write_text("#!/bin/bash\ntrue\n")
    slurm.submit(folder / "urgent.sh", "--partition=high", "--nodes=2", "--exclusive", cwd=folder).wait(timeout=100)
    job.wait("PENDING", timeout=100)
    status = RunFolder(folder / "runs/job").status()
    assert status is not None
    assert (status["state"], status["exit_code"], status["world_size"]) == ("preempted", 75, 2)
    assert 5 < status["step"] < STEPS
    finishes(job, folder)
    assert RunFolder(folder / "runs/job").attempts() == 2


def test_job_that_reaches_its_time_limit_twice_ends_with_the_same_weights(slurm: Slurm, folder: Path) -> None:
    job = submitted(slurm, folder, "--time=2", "--signal=20")
    for attempt in (1, 2):
        says(job, folder, "requeued the job", times=attempt)
        job.wait("PENDING", timeout=60)
        if attempt == 1:
            job.begin()
    finishes(job, folder)
    assert job.restarts == 2  # Slurm may signal a minute early: on a busy machine before training begins


@pytest.mark.parametrize("flags", [(), ("--one-task-per-rank",)], ids=["launchers", "tasks"])
def test_job_stopped_while_it_starts_ends_with_the_same_weights(
    slurm: Slurm, folder: Path, flags: tuple[str, ...]
) -> None:
    job = submitted(slurm, folder, *flags)
    until(lambda: f"{job.number}.0" in slurm.run("squeue", "--steps", "-h", "-o", "%i"), 20)
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # ranks are about to import torch
    says(job, folder, "requeued the job")
    job.wait("PENDING", timeout=60)
    finishes(job, folder)
    assert job.restarts == 1
