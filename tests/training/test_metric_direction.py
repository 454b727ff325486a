"""A metric declares its direction once; checkpoints and callbacks use it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddpforge.cli.check import choose_and_check
from ddpforge.components.registry import Registry
from ddpforge.errors import RecipeError
from ddpforge.recipe import load_recipe
from ddpforge.runs.changes import recipe_changes
from ddpforge.training.stages import Chosen

RECIPE = """
recipe = 2
name = "run"
[model]
use = "mlp"
inputs = 64
outputs = 10
[data.train]
use = "digits"
split = "train"
[data.eval]
use = "digits"
split = "test"
[task]
use = "classification"
metrics = ["accuracy", "./mine.py:Reach"]
[optimizer]
use = "sgd"
lr = 0.1
[train]
length = "4st"
global_batch = 8
[checkpoint.keep]
best = 1
monitor = "eval/reach"
[callbacks.early_stopping]
metric = "eval/reach"
patience = 1
"""
CODE = """
from ddpforge.interfaces import Callback, Metric, Task, Total

class Shows(Callback):
    def __init__(self, metric: str) -> None:
        self.metric = metric

class Reach(Metric):
    name = "reach"
    def __init__(self, less: bool | None = True) -> None:
        self.lower_is_better = less
    def __call__(self, outputs, targets):
        return Total(outputs.sum(), len(outputs))

class Root(Reach):
    def finish(self, sum, count):
        return float((sum / count) ** 2)

class Own(Task):
    def __init__(self, metrics: list[Metric]) -> None:
        self._metrics = metrics
    def loss(self, model, batch):
        outputs = model(batch[0])
        return outputs.sum(), outputs
    def metrics(self, outputs, batch):
        return {metric.name: metric(outputs, batch[1]) for metric in self._metrics}
"""


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Chosen]:
    """Returns a function that builds the parts of the recipe under `sets` as before a launch, and raises any
    problem."""
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(RECIPE)
    Path("mine.py").write_text(CODE)

    def make(*sets: str) -> Chosen:
        chosen, problems = choose_and_check("run.toml", sets, 1, "cpu")
        problems.raise_if_any()
        return chosen

    return make


def reach(**options: bool) -> str:
    """Returns the setting for the metrics of the task."""
    told = "".join(f", {key}={str(value).lower()}" for key, value in options.items())
    return f"task.metrics=['accuracy', {{use='./mine.py:Reach'{told}}}]"


@pytest.mark.parametrize(("less", "mode"), [(True, "min"), (False, "max")])
def test_the_declared_direction_is_part_of_the_resolved_recipe(
    parts: Callable[..., Chosen], less: bool, mode: str
) -> None:
    built = parts(reach(less=less))
    assert built.recipe.checkpoint.keep.mode == built.recipe.callbacks["early_stopping"].options["mode"] == mode
    assert built.callbacks["early_stopping"]._best._sign == (-1.0 if less else 1.0)  # type: ignore[attr-defined]
    again = load_recipe(_written(built), registry=Registry.installed())
    assert again.recipe.checkpoint.keep == built.recipe.checkpoint.keep
    assert again.tables == built.loaded.tables


def _written(built: Chosen) -> Path:
    Path("resolved.toml").write_text(built.loaded.dumps())
    return Path("resolved.toml")


def test_the_direction_applies_to_all_values_and_sets_of_a_metric(parts: Callable[..., Chosen]) -> None:
    Path("run.toml").write_text(
        RECIPE.replace("[data.eval]", "[data.eval.far]").replace("eval/reach", "eval/far/reach/most")
    )
    assert parts().recipe.checkpoint.keep.mode == "min"


@pytest.mark.parametrize("mode", ["min", "max"])
def test_the_mode_of_the_recipe_overrides_the_metric(parts: Callable[..., Chosen], mode: str) -> None:
    assert parts(f"checkpoint.keep.mode={mode}").recipe.checkpoint.keep.mode == mode


def test_a_metric_with_a_known_direction_needs_no_mode(parts: Callable[..., Chosen]) -> None:
    built = parts("checkpoint.keep.monitor=eval/accuracy", "callbacks.early_stopping.metric=eval/loss")
    assert built.recipe.checkpoint.keep.mode is None
    assert "mode" not in built.loaded.tables["callbacks"]["early_stopping"]


def test_a_callback_without_a_mode_option_is_unchanged(parts: Callable[..., Chosen]) -> None:
    built = parts("callbacks.own={use='./mine.py:Shows', metric='eval/reach'}")
    assert built.recipe.callbacks["own"].options == {"metric": "eval/reach"}


def test_the_mode_is_required_if_the_direction_is_unknown(parts: Callable[..., Chosen]) -> None:
    silent = "task.metrics=['accuracy']"
    with pytest.raises(RecipeError) as refused:
        parts(silent)
    assert {problem.key for problem in refused.value.problems} == {
        "checkpoint.keep.monitor",
        "callbacks.early_stopping",
    }
    assert all('less or more of "eval/reach" is better' in problem.message for problem in refused.value.problems)
    parts(silent, "checkpoint.keep.mode=max", "callbacks.early_stopping.mode=min")


def test_a_changed_direction_of_a_metric_is_a_change_of_the_recipe(parts: Callable[..., Chosen]) -> None:
    before, after = (parts(reach(less=less)).loaded.tables for less in (True, False))
    changes = {change.path: (change.old, change.new) for change in recipe_changes(before, after)}
    assert changes["checkpoint.keep.mode"] == changes["callbacks.early_stopping.mode"] == ("min", "max")


def test_a_task_must_report_metrics_that_are_not_means(parts: Callable[..., Chosen]) -> None:
    """Plain means need no such report."""
    parts("task={use='./mine.py:Own', metrics=['./mine.py:Reach']}", "checkpoint.keep.mode=min",
          "callbacks.early_stopping.mode=min")  # fmt: skip
    with pytest.raises(RecipeError, match=r"task `./mine.py:Own` does not report reach, which is not a mean"):
        parts("task={use='./mine.py:Own', metrics=['./mine.py:Root']}", "checkpoint.keep.mode=min",
              "callbacks.early_stopping.mode=min")  # fmt: skip
