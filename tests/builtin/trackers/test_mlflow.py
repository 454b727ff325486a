"""MLflow's own client reads one run per run folder, with metrics by step; MLflow errors never end training."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ddpforge.builtin.trackers.mlflow import MLflowTracker
from ddpforge.interfaces import Histogram
from ddpforge.training.trackers import TrackerGroup


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    for name in ("MLFLOW_HTTP_REQUEST_TIMEOUT", "MLFLOW_HTTP_REQUEST_MAX_RETRIES"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # creating a database takes seconds
    return tmp_path


@pytest.fixture
def uri(folder: Path) -> str:
    return f"file:{folder}/mlflow"


CONFIG = {"optimizer": {"lr": 0.1, "use": "adamw"}, "name": "run", "vars": {}}


def started(folder: Path, uri: str, resumed_at: int | None = None, **options: Any) -> MLflowTracker:
    tracker = MLflowTracker(experiment=f"of {folder.name}", uri=uri, **options)
    tracker.start(name="run", folder=folder, config=CONFIG, resumed_at=resumed_at)
    return tracker


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient  # 1 second, when the first test needs it

    return MlflowClient(uri)


def run_of(folder: Path, uri: str) -> Any:
    """Returns the only run of the test's experiment."""
    client = client_of(uri)
    experiment = client.get_experiment_by_name(f"of {folder.name}")
    (run,) = client.search_runs([experiment.experiment_id])
    return run


def history(folder: Path, uri: str, metric: str = "train/loss") -> list[tuple[int, float]]:
    found = client_of(uri).get_metric_history(run_of(folder, uri).info.run_id, metric)
    return [(one.step, one.value) for one in sorted(found, key=lambda one: one.timestamp)]


def test_mlflow_has_metrics_by_step_recipe_tags_and_final_status(folder: Path, uri: str) -> None:
    tracker = started(folder, uri, tags={"team": "a"})
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0 / step, "lr": 0.5})
    tracker.finish(state="done", summary={})
    run = run_of(folder, uri)
    assert dict(history(folder, uri)) == pytest.approx({1: 1.0, 2: 0.5, 3: 1 / 3})
    assert run.data.params == {"optimizer.lr": "0.1", "optimizer.use": "adamw", "name": "run"}
    assert (run.info.status, run.info.run_name, run.data.tags["team"]) == ("FINISHED", "run", "a")
    config = client_of(uri).download_artifacts(run.info.run_id, "config.json")
    assert json.loads(Path(config).read_text()) == CONFIG


@pytest.mark.parametrize(("state", "status"), [("preempted", "KILLED"), ("failed", "FAILED"), ("diverged", "FAILED")])
def test_mlflow_status_follows_the_state_of_the_run(folder: Path, uri: str, state: str, status: str) -> None:
    started(folder, uri).finish(state=state, summary={})
    assert (run_of(folder, uri).info.status, run_of(folder, uri).data.tags["state"]) == (status, state)


def test_resume_continues_the_mlflow_run_and_later_values_win(folder: Path, uri: str) -> None:
    tracker = started(folder, uri)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.finish(state="preempted", summary={})
    tracker = started(folder, uri, resumed_at=2)
    tracker.log(3, {"train/loss": 3.0})
    tracker.finish(state="done", summary={})
    assert dict(history(folder, uri)) == {1: 1.0, 2: 1.0, 3: 3.0}
    run = run_of(folder, uri)
    assert (run.info.status, run.data.tags["resumed_at"], run.data.metrics["train/loss"]) == ("FINISHED", "2", 3.0)


def test_media_are_mlflow_artifacts(folder: Path, uri: str) -> None:
    tracker = started(folder, uri)
    image = np.arange(24, dtype=np.uint8).reshape(2, 4, 3)
    tracker.log_media(7, "samples/ema", image, "image")
    tracker.log_media(7, "gradients", Histogram((1, 2), (0.0, 0.5, 1.0)), "histogram")
    tracker.log_media(7, "story", "once", "text")
    tracker.log_media(7, "worst", [{"id": 3, "loss": 0.5}, {"id": 4, "loss": None}], "table")
    tracker.finish(state="done", summary={})
    run = run_of(folder, uri).info.run_id
    shown = Path(client_of(uri).download_artifacts(run, "shown"))
    assert np.array_equal(np.asarray(Image.open(shown / "samples/ema/step-000000007.png")), image)
    histogram = json.loads((shown / "gradients/step-000000007.json").read_text())
    assert histogram == {"counts": [1, 2], "edges": [0.0, 0.5, 1.0], "nonfinite": 0}
    assert (shown / "story/step-000000007.txt").read_text() == "once"
    table = json.loads((shown / "worst/step-000000007.json").read_text())
    assert table == {"columns": ["id", "loss"], "data": [[3, 0.5], [4, None]]}


def test_environment_overrides_the_recipe(folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", f"of {folder.name}")
    tracker = MLflowTracker(experiment="another", uri="http://127.0.0.1:9")
    tracker.start(name="run", folder=folder, config=CONFIG, resumed_at=None)
    tracker.finish(state="done", summary={})
    assert run_of(folder, uri).info.status == "FINISHED"


def test_unreachable_server_disables_the_tracker_only(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    group = TrackerGroup({"mlflow": MLflowTracker(experiment="e", uri="http://127.0.0.1:9")})
    group.start(name="run", folder=folder, config={}, resumed_at=None)
    group.log(1, {"train/loss": 1.0})
    group.finish(state="done", summary={})
    assert [text.partition(":")[0] for text in caplog.messages if "tracker" in text] == [
        "tracker mlflow failed and is off for the rest of the run"
    ]


def test_failed_request_raises_at_the_next_row(folder: Path, uri: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(folder, uri)

    def fail(*_: Any, **__: Any) -> None:
        raise ConnectionError("gone")

    monkeypatch.setattr("mlflow.MlflowClient.log_batch", fail)
    tracker.log(1, {"train/loss": 1.0})
    tracker._queue.shutdown(wait=True)
    with pytest.raises(ConnectionError, match="gone"):
        tracker.log(2, {"train/loss": 1.0})
