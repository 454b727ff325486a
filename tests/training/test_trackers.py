"""A group of trackers: a broken tracker is dropped with a warning; failing to write metrics ends the run."""

import logging
from collections.abc import Mapping
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest

from ddpforge.errors import SetupError
from ddpforge.interfaces import Tracker
from ddpforge.runs.metrics import JSONLTracker, read_metrics
from ddpforge.training.trackers import TrackerGroup


class Recorder(Tracker):
    """Tracker that records its calls, and raises at the call `breaks`."""

    def __init__(self, breaks: str = "") -> None:
        self.breaks = breaks
        self.calls: list[str] = []

    def _call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.breaks:
            raise ConnectionResetError("the helper process is gone")

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        self._call("start")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self._call(f"log {step}")

    def rewind(self, step: int) -> None:
        self._call(f"rewind {step}")

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        self._call(f"finish {state}")


def train(tracker: Tracker, folder: Path) -> None:
    tracker.start(name="run", folder=folder, config={}, resumed_at=None)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 0.5})
    tracker.rewind(2)
    tracker.finish(state="done", summary={})


ALL = ["start", "log 1", "log 2", "log 3", "rewind 2", "finish done"]


def test_every_tracker_receives_all_calls(tmp_path: Path) -> None:
    one, two = Recorder(), Recorder()
    train(TrackerGroup({"one": one, "two": two}), tmp_path)
    assert one.calls == two.calls == ALL


@pytest.mark.parametrize("call", ALL)
def test_a_broken_tracker_is_reported_once_and_dropped(
    call: str, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    broken, sound = Recorder(breaks=call), Recorder()
    train(TrackerGroup({"broken": broken, "sound": sound}), tmp_path)

    assert sound.calls == ALL
    assert broken.calls == ALL[: ALL.index(call) + 1]
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert "broken" in record.getMessage()
    assert "the helper process is gone" in record.getMessage()


def test_a_failure_to_write_metrics_stops_the_run(tmp_path: Path) -> None:
    trackers = TrackerGroup({"jsonl": JSONLTracker(), "other": Recorder(breaks="log 1")})
    trackers.start(name="run", folder=tmp_path, config={}, resumed_at=None)
    trackers.log(1, {"train/loss": 0.5})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]

    rmtree(tmp_path)
    with pytest.raises(SetupError, match=r"cannot write .*metrics\.jsonl: No such file"):
        trackers.log(2, {"train/loss": 0.5})


def test_a_run_that_fails_before_it_starts_can_finish() -> None:
    tracker = Recorder()
    TrackerGroup({"one": tracker}).finish(state="failed", summary={})
    assert tracker.calls == []


def test_an_interruption_by_the_user_is_not_a_broken_tracker(tmp_path: Path) -> None:
    class Interrupted(Tracker):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(TrackerGroup({"one": Interrupted()}), tmp_path)
