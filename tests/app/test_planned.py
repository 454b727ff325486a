"""A run held against its plan: the memory of its second step, and what to change where memory is full."""

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

from ddpforge.app.planned import Room, advised, compares
from ddpforge.errors import OutOfMemory, UsageError
from ddpforge.interfaces import World
from ddpforge.ranks.collectives import Alone
from ddpforge.recipe import load_recipe
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.metrics import read_metrics
from ddpforge.training.contract import Size

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
# Small weights that every rank keeps get other memory in each step, which counts from then on only.
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
def test_the_second_step_takes_what_was_planned(recipe: Path, ddpforge: Run, sets: list[str]) -> None:
    said = ddpforge("run", recipe.name, *sets, nproc=2)
    found = memory(recipe.parent)
    assert found["measured"]["step"] == 2
    assert found["measured"]["peak"] == max(found["measured"]["ranks"])
    assert found["measured"]["phase"] == found["planned"]["phase"]
    assert abs(found["difference"]) < (0.05 if "strategy.tensor=2" in sets else 1e-3)  # gloo keeps some in between
    assert "memory:" not in said.stderr


@pytest.mark.full
@pytest.mark.parametrize(
    "bundled", ["contrastive-digits", "diffusion", "experts", "gan", "masked-lm", "muon-digits", "segment-digits"]
)
def test_so_does_that_of_every_kind_of_task(tmp_path: Path, ddpforge: Run, bundled: str) -> None:
    short = ["train.length=3st", "train.eval_every=1000st"]
    short += [] if bundled in ("gan", "muon-digits") else ["schedule.warmup=1st"]
    ddpforge("run", bundled, "name=run", "track.memory_check=on", *short)
    assert abs(memory(tmp_path)["difference"]) < 0.005


def test_measuring_changes_no_number(recipe: Path, ddpforge: Run) -> None:
    for plan in ("on", "off"):
        ddpforge("run", recipe.name, f"name={plan}", f"track.memory_check={plan}", nproc=2)
    on, off = ([row["train/loss"] for row in read_metrics(recipe.parent / "runs" / name)] for name in ("on", "off"))
    assert on == off
    assert not (recipe.parent / "runs/off/memory.json").exists()


def test_a_difference_of_more_than_a_tenth_is_told(recipe: Path, ddpforge: Run) -> None:
    copy(SUPPORT / "odd_models.py", recipe.parent)
    text = re.sub(r'use = "gpt".*?\[data', 'use = "./odd_models.py:Deciding"\n[data', RECIPE, flags=re.DOTALL)
    recipe.write_text(text, encoding="utf-8")
    said = ddpforge("run", recipe.name)
    found = memory(recipe.parent)
    assert found["measured"]["peak"] - found["planned"]["peak"] == pytest.approx(40e6, rel=0.05)
    assert re.search(r"memory: the plan has .* on a rank at the largest moment of a step, and step 2 had", said.stderr)


def test_what_cannot_be_simulated_is_not_compared(recipe: Path, ddpforge: Run) -> None:
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
        (10**12, [], False),  # nothing runs that the recipe does not ask for
    ],
)
def test_small_models_and_compiled_ones_are_not_held_against_a_plan(
    recipe: Path, parameters: int, sets: list[str], yes: bool
) -> None:
    recipe.write_text(RECIPE.replace('memory_check = "on"\n', ""), encoding="utf-8")
    assert compares(load_recipe(recipe, sets=sets).recipe, Size(parameters, parameters)) is yes


class _Room(Room):
    """So much and no more."""

    def __init__(self, there: int) -> None:
        self.there = there

    def bytes(self, device: torch.device) -> int:
        return self.there


def full(recipe: Path, there: int, *sets: str) -> Any:
    """The error of a run of the recipe, with `sets`, that finds memory full: the bytes that there are do not do."""
    loaded = load_recipe(recipe, sets=["train.global_batch=64", *sets])
    folder = RunFolder(recipe.parent / "a run")
    folder.create(**snapshot(loaded))
    alone = Alone(CPU)
    world = World(all=alone, data=alone, device=CPU, local_rank=0)
    problem = OutOfMemory("memory is full: torch's words", hints=["by arithmetic"])
    return advised(problem, folder, world, loaded.recipe, _Room(there))


@pytest.fixture
def told(recipe: Path) -> Callable[[int], BaseException]:
    """The error of a run of the recipe that finds memory full where there is so much."""
    return lambda there: full(recipe, there)


def test_full_memory_names_what_is_needed_what_there_is_and_what_would_fit(told: Callable[[int], Any]) -> None:
    error = told(8_000_000)
    first, second = error.message.splitlines()
    assert first == "memory is full: torch's words"
    assert re.fullmatch(r"by the plan a step needs [\d.]+ MB for tensors on a rank, and there were 8.0 MB", second)
    changes = [re.fullmatch(r"set (.*): ([\d.]+) MB by the plan", hint).groups() for hint in error.hints]  # type: ignore[union-attr]
    assert changes[0][0].startswith("train.micro_batch = ")
    assert any("train.activation_checkpointing = true" in change for change, _ in changes)
    assert 1 < len(changes) <= 3
    assert all(float(needs) <= 8.0 for _, needs in changes)


@pytest.mark.full
def test_memory_that_no_planned_step_fills_is_explained_by_arithmetic_alone(told: Callable[[int], Any]) -> None:
    error = told(10**12)
    assert error.message.endswith("something else than a planned step has filled it, an evaluation perhaps")
    assert error.hints == ("by arithmetic",)


def test_full_memory_starts_no_plan_unless_asked_and_names_the_command_that_does(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    error = full(recipe, 8_000_000, "track.memory_check=off")
    assert (error.message, error.hints[0]) == ("memory is full: torch's words", "by arithmetic")
    command = error.hints[1].removeprefix("see what a step needs, and which changes fit: ")
    assert shlex.split(command) == [
        *("ddpforge", "plan", str(recipe.parent / "a run/recipe.resolved.toml"), "--ranks", "1"),
        *("--memory", "8.0MB"),
    ]


def test_other_errors_and_runs_without_a_plan_stay_as_they_are(recipe: Path) -> None:
    alone = Alone(CPU)
    world = World(all=alone, data=alone, device=CPU, local_rank=0)
    folder = RunFolder(recipe.parent / "runs" / "run")  # which is not there
    for error in (UsageError("another"), OutOfMemory("memory is full")):
        assert advised(error, folder, world, load_recipe(recipe).recipe, _Room(1)) is error
