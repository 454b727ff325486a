"""Comparison of runs: differences, metrics and curves."""

import json
import math
from pathlib import Path

import pytest
from support.run_folders import made

from ddpforge.errors import UsageError
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.summary import compare, curves, thinned


def test_recipes_code_environments_and_metrics_are_compared(tmp_path: Path) -> None:
    rows = [{"step": 1, "eval/loss": 0.25, "lr": 0.1}, {"step": 2, "eval/loss": 0.5, "eval/f1": 0.75}]
    a = made(tmp_path / "a", recipe={"optimizer": {"lr": 0.1, "betas": [0.9, 0.99]}}, rows=rows)
    b = made(tmp_path / "b", recipe={"callbacks": {"ema": {"decay": 0.9}}}, rows=[{"step": 1, "train/loss": 2.0}])
    for folder, code, host in ((a, "x = 1", "here"), (b, "x = 2", "there")):
        (folder.path / "code").mkdir()
        (folder.path / "code/model.py").write_text(code)
        (folder.path / "code/same.py").write_text("")
        environment = {"time": host, "command": [host], "host": host, "packages": {"torch": "2.11"}}
        (folder.path / "env.json").write_text(json.dumps(environment))

    found = compare([a, b])
    assert found.recipe == {
        "optimizer.lr": [0.1, 0.001],
        "optimizer.betas": [[0.9, 0.99], None],
        "callbacks.ema.decay": [None, 0.9],
    }
    assert list(found.code) == ["code/model.py"]
    assert found.environment == {"host": ["here", "there"]}
    assert found.metrics == {
        "eval/loss": [0.5, None],
        "eval/loss (best)": [0.25, None],
        "lr": [0.1, None],
        "eval/f1": [0.75, None],
        "eval/f1 (best)": [0.75, None],
        "train/loss": [None, 2.0],
    }
    json.dumps(found.as_dict())


def test_options_of_a_component_are_compared_only_between_runs_of_it_and_components_come_first(tmp_path: Path) -> None:
    def ran(name: str, **tables: object) -> RunFolder:
        return made(tmp_path / name, recipe=tables)

    runs = [
        ran("a", model={"depth": 1}, strategy={"use": "ddp", "bucket": 25}, train={"seed": 0}, optimizer={"lr": 0.1}),
        ran("b", model={"depth": 2}, strategy={"use": "fsdp", "tensor": 1}, train={"seed": 1}, optimizer={"lr": 0.2}),
    ]
    found = compare(runs)
    assert list(found.recipe) == ["strategy.use", "optimizer.lr", "train.seed", "model.depth"]
    third = ran(
        "c", strategy={"use": "fsdp", "tensor": 2}, model={"depth": 2}, train={"seed": 1}, optimizer={"lr": 0.2}
    )
    assert compare([*runs, third]).recipe["strategy.tensor"] == [None, 1, 2]


def test_variables_in_which_a_launcher_numbers_its_processes_are_no_difference(tmp_path: Path) -> None:
    runs = [made(tmp_path / name) for name in "ab"]
    for number, run in enumerate(runs, 1):
        launched = ("RANK", "LOCAL_RANK", "MASTER_PORT", "TORCHELASTIC_ERROR_FILE", "GROUP_RANK", "NCCL_DEBUG")
        variables = dict.fromkeys((*launched, "WORLD_SIZE"), str(number))
        (run.path / "env.json").write_text(json.dumps({"environment": variables}))
    assert compare(runs).environment == {
        "environment.NCCL_DEBUG": ["1", "2"],
        "environment.WORLD_SIZE": ["1", "2"],
    }


def test_runs_that_have_not_started_can_be_compared(tmp_path: Path) -> None:
    found = compare([made(tmp_path / "a", state=None), made(tmp_path / "b", state=None)])
    assert (found.recipe, found.code, found.environment, found.metrics) == ({}, {}, {}, {})


def test_curves_have_the_finite_points_of_the_runs_with_the_metric(tmp_path: Path) -> None:
    rows = [{"step": 1, "x": 1.0}, {"step": 2, "x": None, "nonfinite": ["x"]}, {"step": 3, "y": 1.0}]
    a, b = made(tmp_path / "a", rows=rows), made(tmp_path / "b", rows=[{"step": 1, "y": 2.0}])
    assert curves([a, b], ["x", "y"]) == {
        "x": {str(a.path): [(1, 1.0)]},
        "y": {str(a.path): [(3, 1.0)], str(b.path): [(1, 2.0)]},
    }
    with pytest.raises(UsageError, match="no run has a metric z"):
        curves([a, b], ["z"])


def test_a_thinned_curve_keeps_spikes() -> None:
    points = [(step, math.sin(step / 1000)) for step in range(100_000)]
    points[77_777] = (77_777, 50.0)
    points[33_333] = (33_333, -50.0)
    kept = thinned(points, 500)
    assert 400 <= len(kept) <= 500
    assert {(77_777, 50.0), (33_333, -50.0)} < set(kept) < set(points)
    assert kept == sorted(kept)
    assert thinned(points[:500], 500) == points[:500]
