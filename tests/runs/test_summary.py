"""Summaries of runs from their folders: state, progress, speed, and differences between runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.run_folders import made, trained

from ddpforge.errors import RecipeError, UsageError
from ddpforge.runs.summary import chosen, differences, find_runs, notable, sorted_by, summarize


# ---------------------------------------------------------------------------------------------- one run
@pytest.mark.parametrize("state", ["done", "preempted", "failed", "diverged"])
def test_a_finished_run_has_the_state_of_its_status(tmp_path: Path, state: str) -> None:
    run = summarize(made(tmp_path / "a", state=state, metrics={"eval/loss": 0.5}, error="rank 1: lost"))
    assert (run.state, run.step, run.total_steps, run.attempt) == (state, 10, 10, 1)
    assert run.metrics == {"eval/loss": 0.5}
    assert run.error == "rank 1: lost"
    assert (run.rate, run.seconds_left) == (None, None)


def test_a_running_status_without_a_process_means_killed(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", state="running", step=0)
    with trained(folder):
        assert summarize(folder).state == "running"
    assert summarize(folder).state == "killed"


@pytest.mark.parametrize("state", ["running", "done", "preempted"])
def test_a_run_on_another_host_without_locks_has_the_state_of_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    """It is unknown whether a process holds the lock: the run is neither called killed nor starting."""
    folder = made(tmp_path / "a", state=state)
    monkeypatch.setattr(type(folder), "is_claimed", lambda _: None)
    assert summarize(folder).state == state


def test_a_run_is_new_until_a_process_starts_it(tmp_path: Path) -> None:
    folder = made(tmp_path / "a", state=None)
    assert summarize(folder).state == "new"
    with trained(folder):
        assert summarize(folder).state == "starting"
    stopped = made(tmp_path / "b", state="preempted")
    with trained(stopped):
        assert summarize(stopped).state == "starting"


def test_step_metrics_and_speed_of_a_running_run_come_from_its_rows(tmp_path: Path) -> None:
    """`status.json` is older than the rows, because it is written when an attempt begins."""
    rows: list[dict[str, Any]] = [
        {"step": 2, "time": 900.0, "attempt": 1, "train/loss": 9.0},
        {"step": 4, "time": 1000.0, "attempt": 2, "train/loss": 3.0},
        {"step": 6, "time": 1004.0, "attempt": 2, "train/loss": None, "nonfinite": ["train/loss"]},
        {"step": 6, "time": 1008.0, "attempt": 2, "eval/loss": 2.5},
    ]
    folder = made(tmp_path / "a", state="running", step=3, rows=rows, metrics={"lr": 0.1, "eval/loss": 7.0})
    with trained(folder):
        run = summarize(folder)
    assert (run.step, run.total_steps) == (6, 10)
    assert run.metrics == {"lr": 0.1, "eval/loss": 2.5, "train/loss": None}
    assert run.rate == 2 / 8  # of this attempt, including its evaluation
    assert run.seconds_left == 4 / (2 / 8)
    assert json.loads(json.dumps(run.as_dict()))["seconds_left"] == 16


def test_only_the_end_of_a_long_metrics_file_is_read(tmp_path: Path) -> None:
    rows = [{"step": step, "train/loss": 1 / step} for step in range(1, 5001)]
    folder = made(tmp_path / "a", state="running", step=0, total_steps=10_000, rows=rows)
    content = folder.metrics.read_bytes()
    folder.metrics.write_bytes(b"what is here is not read\n" + content + b'{"step": 5001, "atte')
    run = summarize(folder)
    assert (run.step, run.metrics["train/loss"]) == (5000, 1 / 5000)


def test_an_unreadable_run_does_not_affect_others(tmp_path: Path) -> None:
    made(tmp_path / "a")
    (made(tmp_path / "b").path / "status.json").write_text("{")
    a, b = map(summarize, find_runs([tmp_path]))
    assert (a.state, b.state) == ("done", "unreadable")
    assert "status.json cannot be read" in str(b.error)


def test_a_status_without_total_steps_is_accepted(tmp_path: Path) -> None:
    folder = made(tmp_path / "a")
    status = json.loads((folder.path / "status.json").read_text())
    del status["total_steps"]
    (folder.path / "status.json").write_text(json.dumps(status))
    assert (summarize(folder).state, summarize(folder).total_steps) == ("done", None)


# ---------------------------------------------------------------------------------------------- many runs
def test_runs_are_found_in_folders_or_by_path_but_not_inside_runs(tmp_path: Path) -> None:
    for name in ("b", "sweep/a", "b/inner", ".a.host-1.tmp", "1/2/3/too-deep"):
        made(tmp_path / "runs" / name)
    found = find_runs([tmp_path / "runs", tmp_path / "runs/sweep/a"])
    assert [folder.path.relative_to(tmp_path).as_posix() for folder in found] == ["runs/b", "runs/sweep/a"]
    with pytest.raises(UsageError, match="there is no folder nowhere"):
        find_runs(["nowhere"])


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    for number, (lr, seed, loss) in enumerate([(0.1, 0, 0.5), (0.01, 0, 0.25), (0.1, 1, None)]):
        recipe = {"optimizer": {"lr": lr}, "train": {"seed": seed}, "checkpoint": {"every": f"{number + 1}ep"}}
        made(tmp_path / f"r{number}", recipe=recipe, metrics={"eval/loss": loss, "train/loss": 1.0, "lr": lr})
    made(tmp_path / "text", state="failed", recipe={"model": {"use": "gpt"}}, step=3)
    return tmp_path


def test_differences_list_keys_that_affect_the_result_among_similar_runs(sweep: Path) -> None:
    told = differences([summarize(folder) for folder in find_runs([sweep])])
    assert told == [
        {"optimizer.lr": 0.1, "train.seed": 0},
        {"optimizer.lr": 0.01, "train.seed": 0},
        {"optimizer.lr": 0.1, "train.seed": 1},
        {},
    ]


def test_options_of_a_component_are_compared_only_between_runs_of_that_component(tmp_path: Path) -> None:
    """Regression: one run under another strategy added a column for every option of both strategies."""
    tables: list[dict[str, Any]] = [
        {"strategy": {"use": "ddp", "bucket_cap_mb": 25}},
        {"strategy": {"use": "fsdp", "replicas": 1}},
        {"strategy": {"use": "fsdp", "replicas": 2}},
    ]
    for number, recipe in enumerate(tables):
        made(tmp_path / f"r{number}", recipe=recipe)
    assert differences([summarize(folder) for folder in find_runs([tmp_path])]) == [
        {"strategy.use": "ddp", "strategy.replicas": None},
        {"strategy.use": "fsdp", "strategy.replicas": 1},
        {"strategy.use": "fsdp", "strategy.replicas": 2},
    ]


def test_runs_are_filtered_by_state_name_and_recipe(sweep: Path) -> None:
    runs = [summarize(folder) for folder in find_runs([sweep])]

    def names(**wanted: Any) -> list[str]:
        return [run.folder.path.name for run in chosen(runs, **wanted)]

    assert names(states=["failed"]) == ["text"]
    assert names(name="r[01]") == ["r0", "r1"]
    assert names(where=["optimizer.lr=1e-1", "train.seed=1"]) == ["r2"]
    assert names(where=["model.use=gpt"]) == ["text"]
    assert names(where=["no.such.key=1"]) == []
    with pytest.raises(RecipeError, match="is not KEY=VALUE"):
        names(where=["optimizer.lr"])


def test_runs_are_sorted_best_first_and_without_a_value_last(sweep: Path) -> None:
    runs = [summarize(folder) for folder in find_runs([sweep])]

    def names(by: str, reverse: bool = False) -> list[str]:
        return [run.folder.path.name for run in sorted_by(runs, by, reverse=reverse)]

    assert names("eval/loss") == ["r1", "r0", "r2", "text"]
    assert names("eval/loss", reverse=True) == ["r0", "r1", "r2", "text"]
    assert names("step") == ["r0", "r1", "r2", "text"]
    assert names("state", reverse=True)[0] == "text"
    assert names("name", reverse=True) == ["text", "r2", "r1", "r0"]
    with pytest.raises(UsageError, match="no run has a metric eval/f1"):
        names("eval/f1")
    with pytest.raises(UsageError, match="it is not known if a lower"):
        names("lr")


def test_a_list_shows_the_monitor_then_evaluations_then_the_training_loss(tmp_path: Path) -> None:
    metrics = {"train/loss": 1.0, "lr": 0.1, "eval/loss": 2.0, "eval/a/f1": 0.5, "eval/b/f1": 0.5}
    keep = {"checkpoint": {"keep": {"monitor": "eval/b/f1"}}}
    assert notable([summarize(made(tmp_path / "a", metrics=metrics))]) == ["eval/loss", "eval/a/f1", "eval/b/f1"]
    runs = [summarize(made(tmp_path / "b", metrics=metrics, recipe=keep))]
    assert notable(runs) == ["eval/b/f1", "eval/loss", "eval/a/f1"]
    assert notable([summarize(made(tmp_path / "c", metrics={"train/loss": 1.0}))]) == ["train/loss"]
