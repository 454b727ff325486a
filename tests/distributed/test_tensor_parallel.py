"""A tensor-parallel strategy by somebody else: ranks that see the same data train the curve of one process."""

import json
from collections.abc import Callable
from pathlib import Path
from shutil import copy

import pytest
from launched import Ranks

from ddpforge.checkpoint.reader import Reader
from ddpforge.cli.launch import _check_world
from ddpforge.errors import RecipeError
from ddpforge.recipe import load_recipe

RECIPE = """
recipe = 1
name = "run"
[model]
use = "./tensor_parallel.py:Mlp"
[data.train]
use = "./parts.py:Points"
[data.eval]
use = "./parts.py:Points"
samples = 11
[task]
use = "regression"
[optimizer]
use = "adamw"
lr = 1e-2
fused = false
[train]
length = "12st"
global_batch = 8
micro_batch = 4
clip_norm = 0.5
[track]
every = "1st"
"""


def test_it_trains_evaluates_and_saves_what_one_process_does(ddpforge: Callable[..., Ranks], tmp_path: Path) -> None:
    """Each rank sees all samples of a step; the votes of ranks, the row and the checkpoint are those of one model."""
    for name in ("parts.py", "tensor_parallel.py"):
        copy(Path(__file__).parents[1] / name, tmp_path)
    (tmp_path / "run.toml").write_text(RECIPE)
    rows, states = [], []
    for ranks, strategy in ((1, "single"), (2, "./tensor_parallel.py:TensorParallel")):
        out = f"on{ranks}"
        sets = ("--set", f'strategy.use="{strategy}"', "--set", f'output_dir="{out}"')
        ddpforge("run", "run.toml", *sets, nproc=ranks)
        lines = (tmp_path / out / "run/metrics.jsonl").read_text().splitlines()
        rows.append([json.loads(line) for line in lines])
        saved = max((tmp_path / out / "run/checkpoints").glob("step-*"))
        states.append(Reader(saved).state())

    one, two = rows
    for name in ("train/loss", "train/grad_norm", "eval/loss", "samples"):
        expected = [row[name] for row in one if name in row]
        assert [row[name] for row in two if name in row] == pytest.approx(expected, rel=1e-5), name
    single, tensor = states
    for name, saved in single.model.items():
        assert tensor.model[name].read().flatten().tolist() == pytest.approx(saved.read().flatten().tolist(), abs=1e-5)
        moment, expected_moment = (state.optimizer[name]["exp_avg"] for state in (tensor, single))
        assert moment.read().flatten().tolist() == pytest.approx(expected_moment.read().flatten().tolist(), abs=1e-5)  # type: ignore[union-attr]


def test_a_launcher_deals_the_batch_to_the_ranks_that_see_different_data(tmp_path: Path) -> None:
    """Eight samples are too few for three ranks, unless all three see the same."""
    for name in ("parts.py", "tensor_parallel.py"):
        copy(Path(__file__).parents[1] / name, tmp_path)
    (tmp_path / "run.toml").write_text(RECIPE)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)
        loaded = load_recipe("run.toml", sets=['strategy.use="./tensor_parallel.py:TensorParallel"'])
        _check_world(loaded, 3)
        with pytest.raises(RecipeError, match="3"):
            _check_world(load_recipe("run.toml"), 3)
