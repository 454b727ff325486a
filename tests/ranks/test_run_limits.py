"""Run limits: a whole run stops after its maximum time, or on request by a file in its folder."""

import os
from pathlib import Path

import pytest
from support.doubles import Clock

from ddpforge.errors import UsageError
from ddpforge.ranks.run_limits import STOP, RunLimits, seconds_of


def test_max_time_counts_from_the_launch_also_after_restarts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPFORGE_STARTED", raising=False)
    clock = Clock()
    halt = RunLimits(tmp_path, "90s", clock)
    for passed, expected in ((0, False), (89, False), (1, True)):
        clock.now += passed
        assert halt.stop_requested() is expected
    monkeypatch.setenv("DDPFORGE_STARTED", str(clock.now - 60))
    again = RunLimits(tmp_path, "90s", clock)
    clock.now += 29
    assert not again.stop_requested()
    clock.now += 1
    assert again.stop_requested()


def test_stop_file_requests_a_stop_until_acknowledged_and_is_checked_once_a_second(tmp_path: Path) -> None:
    clock = Clock()
    halt = RunLimits(tmp_path, None, clock)
    assert not halt.stop_requested()
    (tmp_path / STOP).touch()
    assert not halt.stop_requested()
    clock.now += 1
    assert halt.stop_requested()
    halt.acknowledge()
    clock.now += 1
    assert not halt.stop_requested()
    assert not (tmp_path / STOP).exists()


def test_stop_file_of_an_earlier_attempt_is_removed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / STOP
    file.touch()
    os.utime(file, (100, 100))
    RunLimits(tmp_path, None, lambda: 200.0)
    assert not file.exists()
    assert "is older than this start: removed" in caplog.text


@pytest.mark.parametrize("text", ["5ep", "100st", "soon", "0s", "-1h", "90"])
def test_invalid_wall_times_are_rejected(text: str) -> None:
    with pytest.raises(UsageError, match=r"is not a time with a unit"):
        seconds_of(text)


def test_wall_times_are_converted_to_seconds() -> None:
    assert [seconds_of(text) for text in ("30s", "1.5m", "4h", None)] == [30, 90, 14_400, float("inf")]
