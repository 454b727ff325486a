"""Training on pretended GPUs, whose kernels compute on the CPU, gives the results of training on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.pretended import environment, python, with_changes
from support.sharding import CNN, DDP, FSDP, GPT, ZERO, Bench, weights_in

CPU = {"ACCELERATE_USE_CPU": "true"}
SINGLE = 'use = "single"'
ON_GPU = '[callbacks.on_gpu]\nuse = "./pretended_counts.py:OnGPU"\n'


@pytest.mark.parametrize(
    ("parts", "precision", "tolerance"),
    [
        pytest.param(CNN, "fp32", 1e-6, id="cnn-fp32", marks=pytest.mark.full),
        pytest.param(GPT, "fp32", 1e-6, id="gpt-fp32"),
        pytest.param(CNN, "bf16", 0.02, id="cnn-bf16", marks=pytest.mark.full),
        pytest.param(GPT, "bf16", 0.02, id="gpt-bf16"),
        pytest.param(CNN, "fp16", 0.02, id="cnn-fp16"),
        pytest.param(GPT, "fp16", 0.02, id="gpt-fp16", marks=pytest.mark.full),
    ],
)
def test_losses_are_those_of_the_cpu(bench: Bench, parts: str, precision: str, tolerance: float) -> None:
    train = f'precision = "{precision}"'
    bench("cuda", SINGLE, nproc=1, parts=parts, train=train, more=ON_GPU)
    bench("cpu", SINGLE, nproc=1, parts=parts, train=train, env=CPU)
    bench.alike("cuda", "cpu", rel=tolerance)


def test_gradients_of_fp16_are_read_without_their_loss_scale(bench: Bench) -> None:
    for precision in ("fp32", "fp16"):
        bench(precision, SINGLE, nproc=1, parts=CNN, train=f'precision = "{precision}"')
    norms = [bench.column(precision, "train/grad_norm") for precision in ("fp32", "fp16")]
    assert norms[1] == pytest.approx(norms[0], rel=0.2)  # the scale is 2¹⁶


@pytest.mark.parametrize("strategy", [DDP, FSDP], ids=["ddp", "fsdp"])
def test_two_gpus_train_like_two_ranks_on_the_cpu(bench: Bench, strategy: str) -> None:
    bench("cuda", strategy, more=ON_GPU)
    bench("cpu", strategy, env=CPU)
    bench.alike("cuda", "cpu", rel=1e-6)


@pytest.mark.parametrize("precision", [pytest.param("bf16", marks=pytest.mark.full), "fp16"])
def test_fsdp_in_low_precision_stays_close_to_one_gpu(bench: Bench, precision: str) -> None:
    train = f'precision = "{precision}"'
    bench("one", SINGLE, nproc=1, train=train, more=ON_GPU)
    bench("two", FSDP, train=train, more=ON_GPU)
    assert bench.column("two") == pytest.approx(bench.column("one"), rel=0.02)


def test_model_with_layers_shared_by_ranks_is_compared_in_bf16_before_training(bench: Bench) -> None:
    """Blocks are gathered in bf16 by default, so the comparison with the whole model computes in bf16, too."""
    train = 'precision = "bf16"'
    bench("one", SINGLE, nproc=1, train=train, more=ON_GPU)
    bench("two", f"{FSDP}\ntensor = 2", train=train, more=ON_GPU)
    bench.alike("two", "one", rel=0.02)


def test_checkpoint_of_two_gpus_resumes_on_one_and_on_the_cpu(bench: Bench) -> None:
    bench("whole", FSDP, length="20st")
    for name, strategy, env in (("gpu", DDP, {}), ("cpu", SINGLE, CPU)):
        bench(name, FSDP, more=ON_GPU)
        bench(name, strategy, nproc=1, length="20st", env=env)
        assert bench.column(name) == pytest.approx(bench.column("whole"), rel=1e-5)


def test_ema_and_its_checkpoint_are_those_of_the_cpu(bench: Bench) -> None:
    ema = '[callbacks.ema]\nuse = "ema"\ndecay = 0.9\n'
    bench("cuda", SINGLE, nproc=1, more=ema + ON_GPU)
    bench("cpu", SINGLE, nproc=1, more=ema, env=CPU)
    bench.alike("cuda", "cpu", rel=1e-6)
    found, expected = (weights_in(bench.newest(name)) for name in ("cuda", "cpu"))
    assert found.keys() == expected.keys()
    for name, weight in found.items():
        assert weight.numpy() == pytest.approx(expected[name].numpy(), abs=1e-6)


@pytest.mark.parametrize("strategy", [SINGLE, FSDP], ids=["single", "fsdp"])
def test_background_saves_are_staged_in_pinned_memory_and_equal_blocking_ones(bench: Bench, strategy: str) -> None:
    registered = {}  # pieces of memory that exists; batches take pinned memory of torch's allocator
    for name, background in (("waits", "false"), ("trains_on", "true")):
        more = f'[checkpoint]\nevery = "2st"\nasync_save = {background}\n[checkpoint.keep]\nlast = 30\n'
        bench(name, strategy, nproc=1, more=f'{more}{ON_GPU}file = "{name}.json"\n')
        registered[name] = json.loads((bench.folder / f"{name}.json").read_text())["registered"]
    saved = [sorted((bench.folder / f"runs/{name}/checkpoints").glob("step-*")) for name in ("waits", "trains_on")]
    assert len(saved[0]) == len(saved[1]) == 5
    for blocking, other in zip(*saved, strict=True):
        found, expected = weights_in(other), weights_in(blocking)
        assert all((found[name] == expected[name]).all() for name in expected)
    assert registered["trains_on"] > registered["waits"]


def test_batches_of_every_form_are_pinned(tmp_path: Path) -> None:
    code = """
import types, typing, numpy, torch
from ddpforge.data.pytree import leaves, pinned

class Pair(typing.NamedTuple):
    x: object
    y: object

class Graphs:
    def pin_memory(self):
        self.x = torch.ones(2).pin_memory()
        return self

batch = {"a": torch.ones(2), "b": [Pair(torch.ones(1), "text"), (torch.empty(0), 3)], "c": numpy.ones(2), "d": Graphs()}
found = pinned(batch)
assert all(leaf.is_pinned() for leaf in leaves(found) if isinstance(leaf, torch.Tensor) and leaf.numel())
assert type(found["b"][0]) is Pair and found["b"][0].y == "text" and found["b"][1][1] == 3
assert type(found["c"]) is numpy.ndarray and found["d"].x.is_pinned()
assert not batch["a"].is_pinned()
"""
    python(code, tmp_path)


def test_fsdp_without_a_launcher_names_its_gpu_to_torch(bench: Bench) -> None:
    """Starts the command itself: without a launcher's LOCAL_RANK, a mesh of devices guesses the device and warns."""
    bench("launched", FSDP, nproc=1, length="3st")
    env = with_changes(environment(2, computes=True))
    command = [sys.executable, "-m", "ddpforge", "run", "launched.toml", "--fresh"]
    done = subprocess.run(command, cwd=bench.folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert "did not set/select the default device" not in done.stderr
    assert len(bench.column("launched")) == 3


POISONED = """
from ddpforge.builtin.tasks.language_modeling import LanguageModeling

class Poisoned(LanguageModeling):
    "Multiplies the loss of the third and the seventh training pass by a factor that is not finite."

    def __init__(self, *, factor: str) -> None:
        super().__init__()
        self.factor, self.passes = float(factor), 0

    def loss(self, model, batch):
        loss, outputs = super().loss(model, batch)
        self.passes += model.training
        return (loss * self.factor if model.training and self.passes in (3, 7) else loss), outputs
"""


@pytest.mark.parametrize(("strategy", "factor"), [(SINGLE, "nan"), (FSDP, "inf")], ids=["single-nan", "fsdp-inf"])
def test_step_without_a_finite_gradient_is_skipped_on_the_device(bench: Bench, strategy: str, factor: str) -> None:
    """Compares weights with the CPU, which decides on the host; the fused AdamW reads a flag on the device."""
    (bench.folder / "poisoned.py").write_text(POISONED)
    parts = GPT.replace('use = "language_modeling"', f'use = "./poisoned.py:Poisoned"\nfactor = "{factor}"')
    for name, env in (("cuda", {}), ("cpu", CPU)):
        bench(name, strategy, nproc=1, parts=parts, train='on_nonfinite = "skip"', env=env)
    assert bench.column("cuda", "train/loss")[-1] == pytest.approx(bench.column("cpu", "train/loss")[-1], rel=1e-6)
    found, expected = (weights_in(bench.newest(name)) for name in ("cuda", "cpu"))
    for name, weight in found.items():
        assert weight.isfinite().all()
        assert weight.numpy() == pytest.approx(expected[name].numpy(), abs=1e-6)


def test_zero_trains_like_on_the_cpu(bench: Bench) -> None:
    bench("cuda", ZERO[3], nproc=1)
    bench("cpu", ZERO[3], nproc=1, env=CPU)
    bench.alike("cuda", "cpu", rel=1e-5)


def test_kit_checks_copies_and_memory_on_the_device(tmp_path: Path) -> None:
    """Not random numbers: on this device they are the CPU's."""
    code = """
from ddpforge.testing import Kit
from ddpforge.testing.cases import find_cases

with Kit(find_cases("ddpforge", kind="device", names=["cuda"])) as kit:
    for one in kit.run():
        print(one.check, one.status, one.found)
"""
    said = python(code, tmp_path, computes=True).splitlines()
    for check in ("copies", "measures-memory"):
        assert f"{check} passed " in said, said
