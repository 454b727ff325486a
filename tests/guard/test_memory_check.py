"""Memory check: the plan against the memory of a run's second step, and advice when memory is full."""

import json
import re
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from shutil import copy
from typing import Any

import pytest
import torch
from support import SUPPORT
from support.launched import Ranks

from ddpforge.errors import OutOfMemory, UsageError
from ddpforge.guard.memory_check import MemoryBudget, is_enabled, with_oom_advice
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import SingleRank
from ddpforge.recipe import load_recipe
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.metrics import read_metrics

RECIPE = """
recipe = 2
name = "run"
[model]
use = "gpt"
vocab_size = 256
block_size = 32
layers = 2
heads = 2
width = 64
[data.train]
use = "text"
split = "train"
block_size = 32
[task]
use = "language_modeling"
[optimizer]
use = "adamw"
lr = 1e-3
[train]
length = "4st"
global_batch = 16
[track]
every = "1st"
memory_check = "on"
"""
# Without persistent small weights: their memory moves in each step, and is tracked only from then on.
SHARDED = "strategy.extra.zero_optimization.stage3_param_persistence_threshold=0"
CPU = torch.device("cpu")

Run = Callable[..., Ranks]


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    file = tmp_path / "run.toml"
    file.write_text(RECIPE, encoding="utf-8")
    return file


def memory(folder: Path, name: str = "run") -> Any:
    return json.loads((folder / "runs" / name / "memory.json").read_text())


@pytest.mark.parametrize(
    "sets",
    [
        ["train.micro_batch=4", "train.activation_checkpointing=true"],
        pytest.param(["strategy.use=fsdp"], marks=pytest.mark.full),
        pytest.param(["strategy.use=fsdp", "strategy.tensor=2"], marks=pytest.mark.full),
        pytest.param(["strategy.use=deepspeed", "strategy.stage=3", SHARDED], marks=pytest.mark.full),
    ],
    ids=lambda sets: sets[-1],
)
def test_peak_memory_of_the_second_step_matches_the_plan_and_its_check_changes_no_loss(
    recipe: Path, ddpforge: Run, sets: list[str]
) -> None:
    said = ddpforge("run", recipe.name, *sets, nproc=2)
    ddpforge("run", recipe.name, *sets, "name=off", "track.memory_check=off", nproc=2)
    on, off = ([row["train/loss"] for row in read_metrics(recipe.parent / "runs" / name)] for name in ("run", "off"))
    assert on == off
    assert not (recipe.parent / "runs/off/memory.json").exists()

    found = memory(recipe.parent)
    assert found["measured"]["step"] == 2
    assert found["measured"]["peak"] == max(found["measured"]["ranks"])
    assert found["measured"]["phase"] == found["planned"]["phase"]
    assert abs(found["difference"]) < (
        0.05 if "strategy.tensor=2" in sets else 1e-3
    )  # gloo keeps some memory in between
    assert "memory:" not in said.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "bundled", ["contrastive-digits", "diffusion", "experts", "gan", "masked-lm", "muon-digits", "segment-digits"]
)
def test_peak_memory_of_bundled_recipes_matches_the_plan(tmp_path: Path, ddpforge: Run, bundled: str) -> None:
    short = ["train.length=3st", "train.eval_every=1000st"]
    short += [] if bundled in ("gan", "muon-digits") else ["schedule.warmup=1st"]
    ddpforge("run", bundled, "name=run", "track.memory_check=on", *short)
    assert abs(memory(tmp_path)["difference"]) < 0.005


def test_difference_of_more_than_a_tenth_is_logged(recipe: Path, ddpforge: Run) -> None:
    copy(SUPPORT / "odd_models.py", recipe.parent)
    text = re.sub(r'use = "gpt".*?\[data', 'use = "./odd_models.py:Deciding"\n[data', RECIPE, flags=re.DOTALL)
    recipe.write_text(text, encoding="utf-8")
    said = ddpforge("run", recipe.name)
    found = memory(recipe.parent)
    assert found["measured"]["peak"] - found["planned"]["peak"] == pytest.approx(40e6, rel=0.05)
    assert re.search(r"memory: the plan has a peak of .* per rank, but step 2 had", said.stderr)


@pytest.mark.full  # tests/tools/simulation has the models that cannot be simulated
def test_model_that_cannot_be_simulated_is_not_compared(recipe: Path, ddpforge: Run) -> None:
    copy(SUPPORT / "odd_models.py", recipe.parent)
    text = re.sub(r'use = "gpt".*?\[data', 'use = "./odd_models.py:Unforeseen"\n[data', RECIPE, flags=re.DOTALL)
    recipe.write_text(text, encoding="utf-8")
    said = ddpforge("run", recipe.name)
    found = memory(recipe.parent)
    assert (found["difference"], found["planned"]["peak"]) == (None, None)
    assert found["planned"]["unsimulated"]
    assert "memory:" not in said.stderr


@pytest.mark.parametrize(
    ("parameters", "sets", "yes"),
    [
        (999_999, ["track.memory_check=auto"], False),
        (1_000_000, ["track.memory_check=auto"], True),
        (1_000_000, ["track.memory_check=auto", "train.compile=default"], False),
        (1_000_000, ["track.memory_check=off"], False),
        (1, ["track.memory_check=on"], True),
        (1, ["track.memory_check=on", "train.compile=default"], False),
        (10**12, [], False),  # without the key there is no memory check
    ],
)
def test_memory_check_is_off_for_small_and_compiled_models(
    recipe: Path, parameters: int, sets: list[str], yes: bool
) -> None:
    recipe.write_text(RECIPE.replace('memory_check = "on"\n', ""), encoding="utf-8")
    assert is_enabled(load_recipe(recipe, sets=sets).recipe, parameters) is yes


class _Room(MemoryBudget):
    """Budget of `there` bytes."""

    def __init__(self, there: int) -> None:
        self.there = there

    def bytes(self, device: torch.device) -> int:
        return self.there


def full(recipe: Path, there: int, *sets: str) -> Any:
    """Returns the out-of-memory error, with advice, of a run under `sets` with `there` bytes of memory."""
    loaded = load_recipe(recipe, sets=["train.global_batch=64", *sets])
    folder = RunFolder(recipe.parent / "a run")
    folder.create(**snapshot(loaded))
    alone = SingleRank(CPU)
    world = World(global_ranks=alone, dp_ranks=alone, device=CPU, local_rank=0)
    problem = OutOfMemory("memory is full: torch's words", hints=["by arithmetic"])
    return with_oom_advice(problem, folder, world, loaded.recipe, _Room(there))


@pytest.fixture
def told(recipe: Path) -> Callable[[int], BaseException]:
    """Returns a function that gives the out-of-memory error of a run with a number of bytes."""
    return lambda there: full(recipe, there)


def test_oom_advice_names_needed_memory_available_memory_and_settings_that_fit(told: Callable[[int], Any]) -> None:
    error = told(8_000_000)
    first, second = error.message.splitlines()
    assert first == "memory is full: torch's words"
    assert re.fullmatch(r"by the plan a step needs [\d.]+ MB for tensors on a rank; available: 8.0 MB", second)
    changes = [re.fullmatch(r"set (.*): ([\d.]+) MB by the plan", hint).groups() for hint in error.hints]  # type: ignore[union-attr]
    assert changes[0][0].startswith("train.micro_batch = ")
    assert any("train.activation_checkpointing = true" in change for change, _ in changes)
    assert 1 < len(changes) <= 3
    assert all(float(needs) <= 8.0 for _, needs in changes)


@pytest.mark.full
def test_oom_advice_keeps_its_hints_if_the_planned_step_fits(told: Callable[[int], Any]) -> None:
    error = told(10**12)
    assert error.message.endswith("the plan of a step does not explain this; it may be an evaluation")
    assert error.hints == ("by arithmetic",)


def test_oom_advice_names_the_plan_command_if_the_memory_check_is_off(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    error = full(recipe, 8_000_000, "track.memory_check=off")
    assert (error.message, error.hints[0]) == ("memory is full: torch's words", "by arithmetic")
    command = error.hints[1].removeprefix("for the memory of a step and for settings that fit, run: ")
    assert shlex.split(command) == [
        *("ddpforge", "plan", str(recipe.parent / "a run/recipe.resolved.toml"), "--ranks", "1"),
        *("--memory", "8.0MB"),
    ]


def test_oom_advice_leaves_other_errors_and_missing_runs_unchanged(recipe: Path) -> None:
    alone = SingleRank(CPU)
    world = World(global_ranks=alone, dp_ranks=alone, device=CPU, local_rank=0)
    folder = RunFolder(recipe.parent / "runs" / "run")  # does not exist
    for error in (UsageError("another"), OutOfMemory("memory is full")):
        assert with_oom_advice(error, folder, world, load_recipe(recipe).recipe, _Room(1)) is error
