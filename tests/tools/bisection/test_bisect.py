"""`ddpforge bisect`: planted differences are found at their step, in their module or parameter, in their direction."""

import json
from collections.abc import Sequence
from pathlib import Path
from shutil import copy

import pytest
from support import SUPPORT

from ddpforge.testing.ranks import run_ddpforge
from ddpforge.tools.bisect.bisection import BisectResult, Side, bisect

RECIPE = """
recipe = 2
name = "run"

[model]
use = "./faulty_model.py:Transformer"

[data.train]
use = "./faulty_model.py:Sequences"

[task]
use = "language_modeling"

[optimizer]
use = "adamw"
lr = 1e-2
weight_decay = 0.1

[schedule]
use = "cosine"
warmup = "2st"

[train]
length = "12st"
global_batch = 8
clip_norm = 1.0
device = "cpu"
seed = 0

[track]
every = "1st"
"""


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    copy(SUPPORT / "faulty_model.py", tmp_path)
    (tmp_path / "recipe.toml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path / "recipe.toml"


def found(recipe: Path, *sets: str, strategies: Sequence[str | None] = (None, None), steps: int = 2) -> BisectResult:
    a = Side.of(str(recipe), strategies[0], [])
    b = Side.of(str(recipe), strategies[1], sets)
    return bisect(a, b, steps=steps, out=recipe.parent / "bisect")


def plant(fault: str, at: str, step: int = 1) -> list[str]:
    return [f'model.fault="{fault}"', f'model.at="{at}"', f"model.step={step}"]


MODULES = [
    *("embed", "norm", "head", "blocks.0.attention_norm", "blocks.0.attention.query", "blocks.0.attention.key"),
    *("blocks.1.attention.value", "blocks.1.attention.out", "blocks.0.mlp_norm", "blocks.0.mlp.up"),
    *("blocks.1.mlp.down", "blocks.1.mlp_norm"),
]
PASSED_ON = [name for name in MODULES if name not in ("embed", "blocks.0.attention.query")]  # modules with an input
FORWARD = [
    *((fault, at) for fault in ("scale 0.01", "round") for at in MODULES),
    ("shift 0.01", "blocks.1.mlp.up"),
    ("scale 1e-4", "blocks.0.attention.value"),
]
CODE = [  # faults in the code of a module, and the module that it calls next
    ("attribute temperature 1.1", "blocks.1.attention", "blocks.1.attention.out"),
    ("attribute diagonal -1", "blocks.0.attention", "blocks.0.attention.out"),
    ("attribute approximate tanh", "blocks.0.mlp", "blocks.0.mlp.down"),
    ("attribute residual 0.99", "blocks.1", "blocks.1.mlp_norm"),
]
BACKWARD = [(f"backward {factor}", at) for factor in ("2", "0.5") for at in PASSED_ON[:6]]
GRADIENTS = ["head.weight", "blocks.0.mlp.up.weight", "blocks.1.attention.query.bias", "norm.weight", "embed.weight"]
SETTINGS = [
    *("optimizer.lr=0.011", "optimizer.eps=1e-4", "optimizer.weight_decay=0.2"),
    *('optimizer.no_decay=["bias"]', "train.clip_norm=0.5", 'schedule.warmup="3st"'),
]
DATA = ["train.seed=1", "data.train.offset=1"]


def test_planted_differences_are_more_than_fifty() -> None:
    planted = [FORWARD, CODE, BACKWARD, GRADIENTS, SETTINGS, DATA]
    assert sum(map(len, planted)) >= 50


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [(None, None), ("single@1", "fsdp@2"), ("ddp@2", "single@1")])
def test_equal_runs_and_layouts_do_not_part(recipe: Path, strategies: Sequence[str | None]) -> None:
    assert found(recipe, strategies=strategies).step is None


@pytest.mark.slow
def test_a_recipe_with_fewer_steps_is_replayed_to_its_end(recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("12st", "3st"))

    finding = found(recipe, strategies=("single@1", "single@1"), steps=20)

    assert (finding.step, finding.steps) == (None, 3)


@pytest.mark.full
@pytest.mark.parametrize(("fault", "at"), FORWARD)
def test_fault_of_a_forward_pass_is_found_in_its_module(recipe: Path, fault: str, at: str) -> None:
    finding = found(recipe, *plant(fault, at))

    assert (finding.step, finding.kind, finding.name) == (1, "forward", at)


@pytest.mark.slow
def test_fault_of_a_forward_pass_is_found_across_layouts_with_its_factor_and_operation(recipe: Path) -> None:
    finding = found(recipe, *plant("scale 0.01", "blocks.1.mlp.down"), strategies=("single@1", "ddp@2"))

    assert (finding.step, finding.kind, finding.name) == (1, "forward", "blocks.1.mlp.down")
    assert finding.multiple == pytest.approx(1.01, rel=1e-3)
    assert "aten.mul" in finding.operation


@pytest.mark.full
@pytest.mark.parametrize(("fault", "at", "next_one"), CODE)
def test_fault_in_the_code_of_a_module_is_found_between_its_calls(
    recipe: Path, fault: str, at: str, next_one: str
) -> None:
    finding = found(recipe, *plant(fault, at))

    assert (finding.step, finding.kind, finding.name) == (1, "forward", at)
    assert next_one in finding.where


@pytest.mark.full
@pytest.mark.parametrize(("fault", "at"), BACKWARD)
def test_fault_of_a_backward_pass_is_found_in_its_module(recipe: Path, fault: str, at: str) -> None:
    finding = found(recipe, *plant(fault, at))

    assert (finding.step, finding.kind, finding.name) == (1, "backward", at)


@pytest.mark.slow
def test_fault_of_a_backward_pass_is_found_across_layouts(recipe: Path) -> None:
    finding = found(recipe, *plant("backward 2", "blocks.0.mlp.up"), strategies=("single@1", "fsdp@2"))

    assert (finding.step, finding.kind, finding.name) == (1, "backward", "blocks.0.mlp.up")


@pytest.mark.full
@pytest.mark.parametrize("parameter", GRADIENTS)
def test_wrong_gradient_of_one_parameter_is_found_with_its_factor(recipe: Path, parameter: str) -> None:
    finding = found(recipe, *plant("gradient", parameter))

    assert (finding.step, finding.kind, finding.name) == (1, "gradient", parameter)
    assert finding.multiple == pytest.approx(0.5)


@pytest.mark.full
@pytest.mark.parametrize("setting", SETTINGS)
def test_another_setting_of_the_optimizer_is_found_in_the_update(recipe: Path, setting: str) -> None:
    finding = found(recipe, setting)

    assert (finding.step, finding.kind) == (1, "update")


@pytest.mark.full
def test_averages_of_adam_differ_from_the_second_step_on(recipe: Path) -> None:
    finding = found(recipe, "optimizer.betas=[0.9, 0.95]")

    assert (finding.step, finding.kind) == (2, "update"), "bias correction makes the first step independent of them"


@pytest.mark.full
@pytest.mark.parametrize("setting", DATA)
def test_other_samples_are_named(recipe: Path, setting: str) -> None:
    finding = found(recipe, setting, strategies=("single@1", "ddp@2"))

    assert (finding.step, finding.kind) == (1, "samples")


@pytest.mark.slow
def test_fault_that_begins_later_is_found_at_its_step(recipe: Path) -> None:
    finding = found(recipe, *plant("scale 0.01", "blocks.0.mlp.up", step=3), steps=4)

    assert (finding.step, finding.kind, finding.name) == (3, "forward", "blocks.0.mlp.up")


@pytest.mark.slow
def test_two_runs_are_replayed_from_the_newest_checkpoint_before_they_part(recipe: Path) -> None:
    for name, sets in (("good", []), ("bad", plant("backward 2", "blocks.1.mlp.up", step=7))):
        done = run_ddpforge(
            "run",
            str(recipe),
            f"name={name}",
            "checkpoint.every=5st",
            "checkpoint.keep.last=9",
            *sets,
            cwd=recipe.parent,
        )
        assert done.returncode == 0, done.stderr
    a, b = (Side.of(name, None, []) for name in ("good", "bad"))

    finding = bisect(a, b, steps=4, out=recipe.parent / "bisect")

    assert (finding.step, finding.kind, finding.name) == (7, "backward", "blocks.1.mlp.up")
    first = json.loads((recipe.parent / "bisect/a/metrics.jsonl").read_text().splitlines()[0])
    assert first["step"] == 6, "the replay begins with the checkpoint of step 5"


@pytest.mark.slow
def test_runs_without_a_checkpoint_before_they_part_are_replayed_near_that_step(recipe: Path) -> None:
    for name, sets in (("good", []), ("bad", plant("scale 0.5", "blocks.1.mlp.up", step=10))):
        done = run_ddpforge("run", str(recipe), f"name={name}", "checkpoint.keep.last=1", *sets, cwd=recipe.parent)
        assert done.returncode == 0, done.stderr
    a, b = (Side.of(name, None, []) for name in ("good", "bad"))

    finding = bisect(a, b, steps=4, out=recipe.parent / "bisect")

    assert (finding.step, finding.kind, finding.name) == (10, "forward", "blocks.1.mlp.up")


@pytest.mark.slow
def test_command_prints_the_place_and_exits_with_1(recipe: Path) -> None:
    both = ["--strategies", "single@1,single@1"]
    done = run_ddpforge(
        *("bisect", str(recipe), *both, "--steps", "1", "--set-b", 'model.fault="scale 0.01"'),
        *("--set-b", 'model.at="blocks.1.mlp"'),
        cwd=recipe.parent,
    )

    assert done.returncode == 1, done.stderr
    assert "they part at step 1, in the forward pass of module `blocks.1.mlp`" in done.stdout
    assert "the first operation that differs: nothing in A, aten.mul.Tensor in B" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe.toml"], "A and B are the same"),
        (["recipe.toml", "--strategies", "single@1"], "--strategies names 1 strategies"),
        (["recipe.toml", "--set-b", "model.nothing=1"], "nothing"),
        (["recipe.toml", "train.seed=1"], "A and B are the same"),
        (["absent.toml", "--set-b", "train.seed=1"], "absent.toml"),
    ],
)
def test_wrong_arguments_are_refused_before_a_run(recipe: Path, arguments: list[str], message: str) -> None:
    done = run_ddpforge("bisect", *arguments, cwd=recipe.parent)

    assert (done.returncode, message in done.stderr) == (2, True), done.stderr
    assert "Traceback" not in done.stderr
