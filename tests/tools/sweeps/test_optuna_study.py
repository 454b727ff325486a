"""Searches with Optuna: the next trial, recorded results, resumption, and pruned runs."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
import pytest
from support.run_folders import made, trained

from ddpforge.errors import SetupError, UsageError
from ddpforge.ranks.collectives import SingleRank
from ddpforge.tools.sweeps.optuna_study import Search
from ddpforge.tools.sweeps.pruning import OptunaPruning, opened_trial
from ddpforge.tools.sweeps.space import SearchSpace, Variant
from ddpforge.tools.sweeps.training import Trained

WORDS = ["lr=1e-4..1e-1:log", "act=a,b", "width=1..8", "epochs=3"]


def search(folder: Path, count: int = 6, **options: Any) -> Search:
    given: dict[str, Any] = {"metric": "eval/loss", "mode": "min", "seed": 0, "prunes": False}
    return Search(SearchSpace.parse(WORDS), folder, count=count, **(given | options))


def outcome(variant: Variant, state: str = "done", loss: float | None = 0.5) -> Trained:
    return Trained(name=variant.name, state=state, metrics={"eval/loss": loss}, log=Path("log"))


def trials(folder: Path) -> list[optuna.trial.FrozenTrial]:
    return search(folder, 0)._study.trials


def values(variant: Variant) -> dict[str, str]:
    return dict(text.split("=", 1) for text in variant.sets)


def drained(found: Search) -> Iterator[Variant]:
    """Yields all variants; the loss of a run is the distance of its learning rate from 0.01."""
    for variant in found:
        yield variant
        found.report(variant, outcome(variant, loss=abs(float(values(variant)["lr"]) - 0.01)))


def test_search_samples_runs_from_the_space(tmp_path: Path) -> None:
    found = list(drained(search(tmp_path, 12)))
    assert [variant.name for variant in found] == [f"trial-{number:04}" for number in range(12)]
    assert all(values(variant)["epochs"] == "3" for variant in found)
    assert all(1e-4 <= float(values(variant)["lr"]) <= 0.1 for variant in found)
    assert len({values(variant)["lr"] for variant in found}) == 12
    told = trials(tmp_path)
    assert [trial.value for trial in told] == [abs(float(values(one)["lr"]) - 0.01) for one in found]


def test_killed_search_resumes_its_unfinished_trials(tmp_path: Path) -> None:
    first = search(tmp_path)
    before = [next(first), next(first), next(first)]
    first.report(before[0], outcome(before[0]))
    made(tmp_path / before[1].name, state="preempted")

    with trained(made(tmp_path / before[2].name, state="running")):  # by another process
        assert next(search(tmp_path)) == before[1]
        again = search(tmp_path)
        assert [next(again).name for _ in range(2)] == ["trial-0001", "trial-0003"]
    assert next(again).name == "trial-0004"
    assert [variant.name for variant in search(tmp_path)] == [f"trial-{n:04}" for n in (1, 2, 3, 4, 5)]
    assert len({trial.params["lr"] for trial in trials(tmp_path)}) == 6


def test_study_records_the_state_of_each_run(tmp_path: Path) -> None:
    found = search(tmp_path)
    for state, loss in [("done", 0.5), ("done", None), ("diverged", None), ("failed", None), ("preempted", 0.1)]:
        variant = next(found)
        found.report(variant, outcome(variant, state, loss))
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE", "PRUNED", "PRUNED", "FAIL", "RUNNING"]


def test_another_search_space_is_rejected(tmp_path: Path) -> None:
    next(search(tmp_path))
    other = Search(
        SearchSpace.parse(["act=x,y"]), tmp_path, count=5, metric="eval/loss", mode="min", seed=0, prunes=False
    )
    with pytest.raises(UsageError, match="has other values"):
        next(other)


def test_error_names_the_extra_if_optuna_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SetupError, match="which is not installed") as caught:
        search(tmp_path)
    assert caught.value.hints == ("pip install 'optuna<6,>=4'",)


# ---------------------------------------------------------------------------------------------- pruning
def pruning(folder: Path, number: int) -> OptunaPruning:
    callback = OptunaPruning(str(folder / "optuna.log"), number, "eval/loss")
    callback.on_start(SimpleNamespace(world=SimpleNamespace(global_ranks=SingleRank())))  # type: ignore[arg-type]
    return callback


def test_run_far_above_the_median_is_pruned(tmp_path: Path) -> None:
    found = search(tmp_path, 8, prunes=True)
    for number in range(6):  # the median is used after five trials
        variant = next(found)
        assert "callbacks.pruning" in values(variant)
        assert not pruning(tmp_path, number).on_eval(1, {"eval/loss": 0.5, "other": 1.0})
        found.report(variant, outcome(variant))
    hopeless = next(found)
    callback = pruning(tmp_path, 6)
    assert not callback.on_eval(1, {"eval/a/loss": 9.0})  # another set
    assert callback.on_eval(1, {"eval/loss": 9.0})
    found.report(hopeless, outcome(hopeless, loss=9.0))
    good = next(found)
    assert not pruning(tmp_path, 7).on_eval(1, {"eval/loss": 0.1})
    found.report(good, outcome(good, loss=0.1))
    assert [trial.state.name for trial in trials(tmp_path)[5:]] == ["COMPLETE", "PRUNED", "COMPLETE"]
    assert opened_trial(tmp_path / "optuna.log", 6).number == 6
