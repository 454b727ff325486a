"""Examples of docs/extend/research.md: short, with the same curve on any number of ranks and after a resume."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.launched import Ranks

from ddpforge.errors import RecipeError
from ddpforge.launchers.local import check_world
from ddpforge.recipe import load_recipe

ROOT = Path(__file__).parents[1] / "examples"
EXAMPLES = sorted(path.parent.name for path in ROOT.glob("*/recipe.toml"))
FULL = (
    *("lora", "metrics"),  # their libraries take seconds to import; other tests cover them
    *("gan", "muon", "diffusion"),  # forms of built-in components, which tests/builtin and golden curves train
)
STEPS, HALF = 6, 3
SINGLE, FSDP = 'strategy={ use = "single" }', 'strategy={ use = "fsdp" }'
TIMES = ("time", "attempt", "train/samples_per_second", "train/time/", "perf/")
ROUNDING = {"muon": 5e-3}  # torch's Muon makes matrices orthogonal in bfloat16; 2e-5 for the others
NOISY = {"diffusion"}  # evaluations draw noise from the rank's RNG
LINES = {"gan": 60, "infonce": 40, "plateau": 10}  # 80 for the others

Run = Callable[..., list[dict[str, Any]]]


@pytest.fixture
def run(ddpforge: Callable[..., Ranks], tmp_path: Path) -> Run:
    """Returns `run(example, ranks, steps, *sets, out="a")`, which trains or resumes in `out` and returns the rows."""

    def train(example: str, ranks: int, steps: int, *sets: str, out: str) -> list[dict[str, Any]]:
        if not (tmp_path / example).exists():
            shutil.copytree(ROOT / example, tmp_path / example)
        every = [f"train.length={steps}st", "track.every=1st", f"checkpoint.every={HALF}st"]
        if "[data.eval]" in (tmp_path / example / "recipe.toml").read_text():
            every.append(f"train.eval_every={HALF}st")
        options = [f"--set={one}" for one in (*every, *sets)]
        ddpforge("run", f"{example}/recipe.toml", "--out", out, *options, nproc=ranks)
        (file,) = (tmp_path / out).glob("*/metrics.jsonl")
        return [json.loads(line) for line in file.read_text().splitlines()]

    return train


def compare(example: str, found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert [row["step"] for row in found] == [row["step"] for row in expected]
    rounding = ROUNDING.get(example, 2e-5)
    for row, other in zip(found, expected, strict=True):
        ignored = {name for name in row if name.startswith(TIMES) or (example in NOISY and name.startswith("eval/"))}
        numbers = {name: row[name] for name in row.keys() - ignored}
        assert numbers == pytest.approx({name: other[name] for name in numbers}, rel=rounding, abs=1e-7), row["step"]


@pytest.mark.slow
@pytest.mark.parametrize(
    "example", [pytest.param(name, marks=pytest.mark.full if name in FULL else ()) for name in EXAMPLES]
)
def test_example_trains_the_same_curve_on_one_and_two_ranks_and_after_a_resume(run: Run, example: str) -> None:
    """Trains the second half under the recipe's strategy (or ddp), from a checkpoint of fsdp."""
    expected = run(example, 1, STEPS, SINGLE, out="one")
    assert len([row for row in expected if "train/loss" in row]) == STEPS
    run(example, 2, HALF, FSDP, out="two")
    compare(example, run(example, 2, STEPS, out="two"), expected)


@pytest.mark.full
@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_trains_the_same_curve_on_four_ranks(run: Run, example: str) -> None:
    compare(example, run(example, 4, STEPS, out="four"), run(example, 1, STEPS, SINGLE, out="one"))


SCRIPTS = {  # the smallest eval/accuracy; None without one
    "pytorch_loop": 0.97,
    "own_loss": 0.93,
    "search": 0.8,
    "lightning_module": 0.95,
    "hf_trainer": None,
}
OF_PLUGINS = {"lightning_module": "ddpforge_lightning", "hf_trainer": "ddpforge_transformers"}  # whose tests train more


@pytest.mark.parametrize(
    "script", [pytest.param(name, marks=pytest.mark.full if name in OF_PLUGINS else ()) for name in SCRIPTS]
)
def test_a_script_trains(tmp_path: Path, script: str) -> None:
    if script in OF_PLUGINS:
        pytest.importorskip(OF_PLUGINS[script])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "DDPFORGE_DISABLE_PLUGINS": ""}
    file = ROOT / f"scripts/{script}.py"
    subprocess.run([sys.executable, file], cwd=tmp_path, env=environment, check=True, timeout=300)
    (rows, *_) = sorted(tmp_path.rglob("metrics.jsonl"), reverse=True)
    last = json.loads(rows.read_text().splitlines()[-1])
    assert last.get("eval/loss", 0) < 0.5
    assert (SCRIPTS[script] or 0) <= last.get("eval/accuracy", 0)


def test_every_script_is_in_the_table_of_its_readme() -> None:
    table = (ROOT / "scripts/README.md").read_text()
    scripts = {path.stem for path in (ROOT / "scripts").glob("*.py")} - {"rings"}
    assert {name for name in scripts if f"| [{name}.py]({name}.py) |" in table} == scripts == SCRIPTS.keys()


@pytest.mark.parametrize("example", EXAMPLES)
def test_example_is_short(example: str) -> None:
    lines = [line for file in (ROOT / example).glob("*.py") for line in file.read_text().splitlines()]
    assert len(lines) <= LINES.get(example, 80)


def test_launcher_divides_the_batch_by_data_parallel_ranks() -> None:
    """Batches of 64 do not divide by five ranks, unless all five see the same samples."""
    recipe = str(ROOT / "tensor-parallel/recipe.toml")
    check_world(load_recipe(recipe), 5)
    with pytest.raises(RecipeError, match="5"):
        check_world(load_recipe(recipe, sets=['strategy={ use = "ddp" }']), 5)
