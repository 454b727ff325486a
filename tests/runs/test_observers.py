"""Observers of runs come by entry points: ddpforge's own, and those of plugins, which errors name."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.fake_distributions import forgetting_modules_below, install
from support.forked import in_ranks, refused

from ddpforge.app.run import run
from ddpforge.errors import PluginError
from ddpforge.runs.observers import ObservedRun, observers_of

PAGE = Path(__file__).parents[2] / "docs/extend/observer.md"
STEP_TIMES = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
SETS = ['schedule={use="constant"}', "~checkpoint.keep", "train.device=cpu"]
EVERY = """
from ddpforge.api import RunObserver


class Every(RunObserver):
    calls = []

    @classmethod
    def of(cls, run):
        cls.calls.append(f"of {run.recipe.name}")
        return cls()

    def before_open(self, *, fresh):
        self.calls.append(f"before_open {fresh}")

    def on_finished(self):
        self.calls.append("on_finished")

    def tracker(self):
        self.calls.append("tracker")

    def check(self, total):
        self.calls.append(f"check {total}")

    def on_begin(self):
        self.calls.append("on_begin")

    def around(self, parameters):
        self.calls.append(f"around {parameters}")

    def on_end(self, error):
        self.calls.append(f"on_end {error!r}")
"""


def plugin(site: Path, code: str, target: str) -> None:
    points = {"ddpforge.observer": {"mine": f"step_times:{target}"}}
    install(site, "step-times", points, modules={"step_times.py": code})


def observed(site: Path, *lengths: str) -> None:
    """Trains `digits` to each of `lengths` in turn, in a new process that has the plugin."""

    def rank(_: int) -> None:
        sys.path.insert(0, str(site))
        for length in lengths:
            run("digits", sets=[*SETS, f"train.length={length}"], out=site / "run")

    in_ranks(1, rank)


def test_an_observer_of_a_plugin_writes_the_duration_of_each_step_also_of_a_resumed_run(tmp_path: Path) -> None:
    plugin(tmp_path, STEP_TIMES, "StepTimes")
    observed(tmp_path, "2st", "3st")
    lines = [line.split(",") for line in (tmp_path / "run/digits/step-times.csv").read_text().splitlines()]
    assert [int(step) for step, _ in lines] == [1, 2, 3]
    assert all(float(seconds) > 0 for _, seconds in lines)


def test_methods_of_an_observer_are_called_in_their_order(tmp_path: Path) -> None:
    plugin(tmp_path, EVERY, "Every")

    def rank(_: int) -> Any:
        sys.path.insert(0, str(tmp_path))
        from step_times import Every  # type: ignore[import-not-found]

        for _ in range(2):  # the second attempt finds a finished run
            run("digits", sets=[*SETS, "train.length=1st"], out=tmp_path / "run")
        return Every.calls

    (calls,) = in_ranks(1, rank)
    first = ["of digits", "before_open False", "tracker", "check 1", "on_begin", "around 16794", "on_end None"]
    assert calls[: len(first)] == first
    assert calls[len(first) :][-1] == "on_finished"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "cannot be loaded: ZeroDivisionError: division by zero"),
        ("Mine = 3", "is not a subclass of `RunObserver`, nor a list of them"),
        ("Mine = [int]", "is not a subclass of `RunObserver`, nor a list of them"),
    ],
    ids=["import", "no class", "no observers"],
)
def test_a_broken_observer_is_an_error_of_the_environment_that_names_its_plugin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str
) -> None:
    plugin(tmp_path, code, "Mine")
    monkeypatch.syspath_prepend(tmp_path)
    world = SimpleNamespace(is_rank_zero=False)
    recipe = SimpleNamespace(track=SimpleNamespace(memory_check=False), checkpoint=SimpleNamespace(mirror=None))
    one = cast(ObservedRun, SimpleNamespace(folder=None, recipe=recipe, world=world, window=None))
    with forgetting_modules_below(tmp_path):
        message = refused(PluginError, lambda: observers_of(one))
    assert f"`mine` of step-times (ddpforge.observer) {said}" in message
    assert "DDPFORGE_DISABLE_PLUGINS=step-times" in message
