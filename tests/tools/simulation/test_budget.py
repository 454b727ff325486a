"""`ddpforge plan --auto` against the memory of torch's CPU allocator, measured by benchmarks/heap.c."""

import importlib.util
import subprocess
import sys
from pathlib import Path
from shutil import which
from types import ModuleType

import pytest

from ddpforge.recipe import load_recipe

BENCHMARK = Path(__file__).parents[3] / "benchmarks/plan.py"


def benchmark() -> ModuleType:
    spec = importlib.util.spec_from_file_location("plan_benchmark", BENCHMARK)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.full
@pytest.mark.skipif(which("cc") is None, reason="needs a C compiler (cc), to measure the allocator")
@pytest.mark.parametrize(("strategy", "budget"), [("ddp", 175_000_000), ("fsdp", 135_000_000)])
def test_micro_batch_of_plan_auto_is_the_largest_within_the_budget(tmp_path: Path, strategy: str, budget: int) -> None:
    plan = benchmark()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(plan.HEAD.replace("global_batch = 8", "global_batch = 24") + plan.MODELS["gpt-4m"])
    auto = ["plan", str(recipe), "--ranks=2", "--auto", f"--strategies={strategy}", f"--memory={budget}B", "--write"]
    subprocess.run([sys.executable, "-m", "ddpforge", *auto], cwd=tmp_path, check=True)
    written = load_recipe(recipe).recipe
    assert (written.strategy.use, written.train.activation_checkpointing) == (strategy, False)
    micro = written.train.micro_batch
    assert micro == 3  # of 12 samples on each rank: the next divisor is 4
    assert plan.measured(recipe, [], cuda=False) <= budget
    assert plan.measured(recipe, ["train.micro_batch=4"], cuda=False) > budget
