"""A kind of devices from a plugin, with the limits of Apple's GPU: whole runs on it, and refusals before training.

Its tensors are the CPU's, so that each run can be compared with one on the CPU.
"""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks
from support.toy_device import install_private, install_toy
from test_docs import write_files
from torch.utils import backend_registration

from ddpforge.runs.metrics import read_metrics

TESTS = Path(__file__).parents[1]
SHORT = (
    'schedule={ use = "constant" }',
    "train.length=12st",
    "train.eval_every=6st",
    "checkpoint.every=6st",
    "track.every=3st",
    "~checkpoint.keep",
)
OWN = """
import torch
from torch import nn

from ddpforge.builtin.datasets.digits import Digits


class Wide(nn.Module):
    \"\"\"A linear layer in float64.\"\"\"

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(64, 10).double()

    def forward(self, images):
        return self.layer(images.flatten(1).double())


class WideDigits(Digits):
    \"\"\"Digits in float64.\"\"\"

    def __init__(self, *, split: str):
        super().__init__(split=split)
        self.images = self.images.double()
"""


@pytest.fixture
def site(tmp_path: Path) -> Path:
    site = tmp_path / "site"
    site.mkdir()
    install_toy(site)
    (tmp_path / "own.py").write_text(OWN)
    return site


def program(site: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{site}:{TESTS}", "OMP_NUM_THREADS": "1"} | variables
    command = [sys.executable, "-m", "ddpforge", *arguments]
    return subprocess.run(command, cwd=site.parent, env=environment, capture_output=True, text=True, timeout=200)


def train(site: Path, name: str, *sets: str, **variables: str) -> list[dict[str, Any]]:
    words = [word for one in (f"name={name}", *SHORT, *sets) for word in ("--set", one)]
    done = program(site, "run", "digits", *words, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return read_metrics(site.parent / "runs" / name)


@pytest.fixture
def on_cpu(ddpforge: Callable[..., Ranks], tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """Returns `on_cpu(name, *sets, nproc=1)`, which trains the same recipe without the plugin, in forked ranks."""

    def run(name: str, *sets: str, nproc: int = 1) -> list[dict[str, Any]]:
        words = [word for one in (f"name={name}", "train.device=cpu", *SHORT, *sets) for word in ("--set", one)]
        ddpforge("run", "digits", *words, nproc=nproc)
        return read_metrics(tmp_path / "runs" / name)

    return run


def test_run_on_a_device_without_float64_pinning_and_streams_is_that_on_the_cpu(
    site: Path, on_cpu: Callable[..., list[dict[str, Any]]]
) -> None:
    """Losses are equal to the last bit of float32, and metrics to 45 bits: they are added in pairs of float32."""
    account = site.parent / "account"
    metrics = 'task.metrics=["accuracy", "f1", "calibration_error"]'
    mine = train(site, "toy", "train.device=toy", metrics, "callbacks.throughput={}", TOY_ACCOUNT=str(account))
    theirs = on_cpu("cpu", metrics, "callbacks.throughput={}")
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    compared = 0
    for row, other in zip(mine, theirs, strict=True):
        for name in row:
            if name in ("train/loss", "train/grad_norm") or name.startswith("eval/"):
                assert math.isclose(row[name], other[name], rel_tol=1e-6, abs_tol=1e-7), name
                compared += 1
    assert compared > 12
    assert {row["perf/peak_memory_gib"] for row in mine if "perf/peak_memory_gib" in row} == {3.0}
    called = account.read_text().split()
    assert "make_current" in called
    assert called.count("seed") >= 12, "every forward pass seeds the device"
    assert "synchronize" not in called, "nothing waits for the device"
    (environment,) = (site.parent / "runs/toy").glob("**/env*.json")
    assert json.loads(environment.read_text())["devices"] == [{"name": "Toy 1", "memory": 8 << 30}]


@pytest.mark.full  # tests/pretend_cuda resumes on the CPU, and tests/distributed/test_anywhere.py on all layouts
def test_run_resumes_on_the_cpu_and_back(site: Path) -> None:
    whole = train(site, "whole", "train.device=toy", "train.length=12st")
    train(site, "parts", "train.device=toy", "train.length=6st")
    found = train(site, "parts", "train.device=cpu", "train.length=12st")
    assert found[-1]["eval/loss"] == pytest.approx(whole[-1]["eval/loss"], rel=1e-6)


def test_ranks_communicate_over_the_backend_of_the_kind(
    site: Path, on_cpu: Callable[..., list[dict[str, Any]]]
) -> None:
    """Two ranks of a kind that Accelerate does not know train as two on the CPU."""
    words = [word for one in ("name=pair", "train.device=toy_pair", *SHORT) for word in ("--set", one)]
    done = program(site, "launch", "digits", "--nproc", "2", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    mine, theirs = read_metrics(site.parent / "runs/pair"), on_cpu("cpu", nproc=2)
    assert [row["step"] for row in mine] == [row["step"] for row in theirs]
    for row, other in zip(mine, theirs, strict=True):
        for name in {"train/loss", "eval/loss", "eval/accuracy"} & row.keys():
            assert row[name] == pytest.approx(other[name], rel=1e-6), name


# ---------------------------------------------------------------------------------------------- a backend of torch
@pytest.fixture
def backend(site: Path) -> Path:
    """Returns a folder with a plugin whose device is in torch's slot for other packages' backends."""
    if not hasattr(backend_registration, "_setup_privateuseone_for_python_backend"):
        pytest.skip("this torch has no backends that are written in Python")
    install_private(site)
    return site


def test_run_on_another_backend_of_torch_is_that_on_the_cpu(
    backend: Path, on_cpu: Callable[..., list[dict[str, Any]]]
) -> None:
    """No tensor of the host meets one of the device, and none on the device is float64: the device refuses both."""
    metrics = 'task.metrics=["accuracy", "f1", "calibration_error", "top5"]'
    ema = "callbacks.ema={ decay = 0.9 }"
    mine = train(backend, "mine", "train.device=toyacc", metrics, ema, "train.clip_norm=1.0")
    theirs = on_cpu("theirs", metrics, ema, "train.clip_norm=1.0")
    compared = 0
    for row, other in zip(mine, theirs, strict=True):
        for name in row:
            if name in ("train/loss", "train/grad_norm") or name.startswith("eval/"):
                assert math.isclose(row[name], other[name], rel_tol=1e-5, abs_tol=1e-6), name
                compared += 1
    assert compared > 12
    resumed = on_cpu("mine", metrics, ema, "train.clip_norm=1.0", "train.length=14st")
    assert resumed[-1]["step"] == 14


def test_step_reads_only_norm_and_loss_from_a_device_without_fused_optimizers_and_float64(backend: Path) -> None:
    reads = {}
    for steps in (10, 20):  # of 23 in an epoch
        account = backend.parent / f"reads-{steps}"
        words = ("train.device=toyacc", f"train.length={steps}st", "track.every=100st", "checkpoint.every=100st")
        train(backend, f"of-{steps}", *words, "train.eval_every=100st", PRIVATE_READS=str(account))
        reads[steps] = account.read_text().split()
    # A third read a step would be 30. A run reads the norms once more a second, which depends on the machine.
    assert 19 <= reads[20].count("read") - reads[10].count("read") < 28
    assert "synchronize" not in reads[20]


# ---------------------------------------------------------------------------------------------- refusals
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["run", "digits", "--set", "train.precision=fp16"],
            'train.precision = "fp16" does not work on a toy (train.device = "toy")',
        ),
        pytest.param(
            ["run", "digits", "--set", "strategy.use=fsdp"],
            'strategy.use = "fsdp" cannot train on a toy (train.device = "toy"): torch has no collectives for it',
            marks=pytest.mark.full,
        ),
        (["check", "digits", "--ranks", "2"], "2 ranks cannot train on a toy"),
        pytest.param(["launch", "digits", "--nproc", "2"], "2 ranks cannot train on a toy", marks=pytest.mark.full),
        pytest.param(
            ["run", "digits", "--set", "train.tf32=true"],
            "train.tf32 multiplies in TF32, which needs CUDA, but this run is on toy",
            marks=pytest.mark.full,
        ),
        pytest.param(
            ["run", "digits", "--set", "train.sync_batchnorm=true"],
            "train.sync_batchnorm needs CUDA, but this run is on toy",
            marks=pytest.mark.full,
        ),
        (
            ["run", "digits", "--set", 'model={ use = "./own.py:Wide" }'],
            "`layer.weight` of the model is float64, which a toy does not have",
        ),
        (
            ["run", "digits", "--set", 'data.train={ use = "./own.py:WideDigits", split = "train" }'],
            "a batch has a float64 tensor of shape [8, 1, 8, 8], but a toy has no float64",
        ),
    ],
    ids=["fp16", "fsdp", "two ranks", "launched", "tf32", "batchnorm", "float64 model", "float64 batch"],
)
def test_unsupported_setting_is_refused_before_training(site: Path, arguments: list[str], said: str) -> None:
    done = program(site, *arguments, "--set", "train.device=toy", *(w for one in SHORT for w in ("--set", one)))
    shown = " ".join((done.stdout + done.stderr).split())
    assert said in shown
    assert "Traceback" not in shown
    assert done.returncode in (2, 3)
    assert not list(site.parent.glob("runs/*/checkpoints/*"))


def test_unknown_device_is_refused_with_the_names_of_plugins(site: Path) -> None:
    done = program(site, "check", "digits", "--set", "train.device=tpu")
    assert done.returncode == 2
    assert "one of: auto, cpu, cuda, toy, toy_pair" in done.stderr


def test_example_of_the_page_is_a_kind_of_devices(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    write_files(TESTS.parent / "docs/extend/device.md", tmp_path)
    done = ddpforge("plugins", "test", "./npu.py", "--json")
    found = {one["check"]: one["status"] for one in json.loads(done.stdout)["results"]}
    assert (found["builds"], found["declared"], found["copies"]) == ("passed", "passed", "skipped")
