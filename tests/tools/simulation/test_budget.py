"""The answer of `ddpforge plan --auto` against torch's CPU allocator, which benchmarks/heap.c counts."""

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
@pytest.mark.skipif(which("cc") is None, reason="needs a C compiler (cc), to count what the allocator gives out")
@pytest.mark.parametrize(("strategy", "budget"), [("ddp", 215_000_000), ("fsdp", 172_000_000)])
def test_what_auto_writes_trains_within_the_budget_and_a_sample_more_would_not(
    tmp_path: Path, strategy: str, budget: int
) -> None:
    plan = benchmark()
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(plan.HEAD.replace("global_batch = 8", "global_batch = 24") + plan.MODELS["gpt-4m"])
    auto = ["plan", str(recipe), "--ranks=2", "--auto", f"--strategies={strategy}", f"--memory={budget}B", "--write"]
    subprocess.run([sys.executable, "-m", "ddpforge", *auto], cwd=tmp_path, check=True)
    written = load_recipe(recipe).recipe
    assert (written.strategy.use, written.train.activation_checkpointing) == (strategy, False)
    micro = written.train.micro_batch
    assert micro == 3  # of 12 samples on each rank, so that 4 would be next
    assert plan.measured(recipe, [], cuda=False) <= budget
    assert plan.measured(recipe, ["train.micro_batch=4"], cuda=False) > budget
