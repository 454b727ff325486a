"""Counts of a step between logged rows, next to a loop by hand: launches, copies, waits of the host, peak memory."""

import json
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT
from support.counted import per_step
from support.pretended import environment, with_changes

Counts = dict[str, float]


def measured(folder: Path, name: str) -> tuple[Counts, Counts]:
    """Returns the counts of the loop by hand and of ddpforge; of the second also `plan`, the planned peak in MiB."""
    for file in ("counted.py", "pretended_counts.py"):
        copy(SUPPORT / file, folder)
    env = with_changes(environment(1, computes=False))
    env["PYTHONPATH"] += f":{SUPPORT.parent}"
    # cuBLAS's workspaces of 64 MiB would hide differences of such small models.
    env |= {"CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "0"}
    command = [sys.executable, "counted.py", name]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    plan = [sys.executable, "-m", "ddpforge", "plan", "ours.toml", "--device", "h100", "--json"]
    env = with_changes({"PYTHONPATH": str(SUPPORT.parent)})
    found = subprocess.run(plan, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=True)
    ours = per_step(folder / "ours.json") | {"plan": json.loads(found.stdout)[0]["peak"] / 2**20}
    return per_step(folder / "hand.json"), ours


@pytest.fixture(scope="module")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    return measured(tmp_path_factory.mktemp("mlp"), "mlp")


@pytest.fixture(scope="module")
def gpt(tmp_path_factory: pytest.TempPathFactory) -> tuple[Counts, Counts]:
    return measured(tmp_path_factory.mktemp("gpt"), "gpt")


@pytest.fixture(params=["mlp", "gpt"])
def counts(request: pytest.FixtureRequest) -> tuple[Counts, Counts]:
    found: tuple[Counts, Counts] = request.getfixturevalue(request.param)
    return found


def test_the_host_waits_for_nothing_between_rows(counts: tuple[Counts, Counts]) -> None:
    hand, ours = counts
    assert ours["waits"] == hand["waits"] == 0
    assert ours["to_host"] == ours["unpinned"] == 0


def test_a_step_computes_the_same_products(counts: tuple[Counts, Counts]) -> None:
    hand, ours = counts
    assert ours["products"] == hand["products"] > 0


def test_the_allocator_takes_nothing_from_the_device_once_steps_repeat(counts: tuple[Counts, Counts]) -> None:
    hand, ours = counts
    assert ours["segments"] == hand["segments"] == 0


def test_peak_memory_is_that_of_the_loop_by_hand(counts: tuple[Counts, Counts]) -> None:
    hand, ours = counts
    assert ours["peak"] <= 1.01 * hand["peak"]


def test_the_plan_is_the_peak_of_the_allocator(counts: tuple[Counts, Counts]) -> None:
    _, ours = counts
    assert ours["plan"] == pytest.approx(ours["peak"], rel=0.01)


def test_a_step_launches_four_kernels_more(counts: tuple[Counts, Counts]) -> None:
    """Allows two launches that look for a norm that is not finite, one for Adam's steps, one for the loss in float64.

    The number of targets of a GPT is the host's: a kernel takes the factor of the gradient as an argument.
    """
    hand, ours = counts
    assert ours["launches"] == hand["launches"] + 4


def test_copies_and_events_of_a_step(counts: tuple[Counts, Counts]) -> None:
    """Allows three events more: two for the side stream that copies the batch, one for the memory of the batch."""
    hand, ours = counts
    assert ours["to_device"] <= hand["to_device"] + 1
    assert ours["events"] <= hand["events"] + 3
    assert ours["on_device"] == hand["on_device"]


def test_an_unknown_call_of_the_device_ends_the_process_with_its_name(tmp_path: Path) -> None:
    code = "import torch\nwith torch.cuda.stream(torch.cuda.Stream()):\n    torch.cuda.CUDAGraph().capture_begin()"
    env = with_changes(environment(1, computes=False))
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode < 0
    assert "the pretended CUDA device has no cuda" in done.stderr


def test_counts_find_faults_of_a_loop(tmp_path: Path) -> None:
    """Plants a copy without pinning, a wait for the device, and memory that is kept."""
    copy(SUPPORT / "pretended_counts.py", tmp_path)
    code = """
import json, torch
from pretended_counts import counts
x = torch.ones(4)
kept = torch.ones(1 << 20, device="cuda")
before, memory = counts(), torch.cuda.memory_allocated()
x.to("cuda", non_blocking=True)
unpinned = counts()
x.pin_memory().to("cuda", non_blocking=True)
pinned = counts()
kept.sum().item()
waited = counts()
del kept
print(json.dumps([before, unpinned, pinned, waited, memory - torch.cuda.memory_allocated()]))
"""
    env = with_changes(environment(1, computes=False))
    env["PYTHONPATH"] += f":{tmp_path}"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, unpinned, pinned, waited, freed = json.loads(done.stdout)
    assert [after["to_device"] - start["to_device"] for start, after in pairwise([before, unpinned, pinned])] == [1, 1]
    assert [after["unpinned"] - start["unpinned"] for start, after in pairwise([before, unpinned, pinned])] == [1, 0]
    assert waited["waits"] - pinned["waits"] == 1
    assert waited["launches"] > pinned["launches"]
    assert freed >= 4 << 20
