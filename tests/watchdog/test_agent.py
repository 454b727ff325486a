"""Watchdog agent: a rank that hangs or dies at startup is reported by a process without a run folder."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.doubles import Clock

from ddpforge.errors import ExitCode
from ddpforge.ranks.heartbeat import RankStatus
from ddpforge.watchdog import agent
from ddpforge.watchdog.agent import EarlyReporter
from ddpforge.watchdog.culprit import Culprit

HUNG = Culprit([1], "made no progress in import; the others waited for it")
ROWS = {rank: RankStatus(rank, f"node{rank}", 100 + rank, "start", 0, 1, 9.0) for rank in range(2)}


class Told:
    """Fake status board for causes; another rank may have been first."""

    def __init__(self, first: Mapping[str, Any] | None = None, place: str | None = None) -> None:
        self.first, self.place = first, place

    def cause(self) -> Any:
        return self.first

    def record_cause(self, cause: Mapping[str, Any]) -> bool:
        self.first = self.first or cause
        return self.first == cause


@pytest.fixture(autouse=True)
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Sets the file with the exit records of ranks, and returns its path."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("DDPFORGE_VERDICT", str(tmp_path / "verdict"))
    return tmp_path / "verdict"


def words(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of(board: Told, rank: int = 0) -> EarlyReporter:
    return EarlyReporter(board, rank, 4321)  # type: ignore[arg-type]


@pytest.fixture
def signals(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    monkeypatch.setattr(agent.os, "kill", lambda pid, number: found.append((pid, number)))
    return found


def test_rank_receives_sigterm_once_after_a_failure_of_another_rank(
    signals: list[tuple[int, int]],
) -> None:
    board = Told()
    ours = of(board)
    assert not ours.any_failed()
    board.first = {"rank": 1, "error": "killed"}
    assert [ours.any_failed(), ours.any_failed()] == [True, True]
    assert signals == [(4321, signal.SIGTERM)]
    assert of(board, rank=1).any_failed()
    assert len(signals) == 1


def test_failure_reported_by_its_rank_stops_other_ranks_with_a_delay(
    signals: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    monkeypatch.setattr(agent.time, "monotonic", clock)
    ours = of(Told({"rank": 1, "error": "no such key", "told": True}))
    assert not ours.any_failed()
    clock.now += 3.9
    assert not ours.any_failed()
    assert signals == []
    clock.now += 0.2
    assert ours.any_failed()
    assert signals == [(4321, signal.SIGTERM)]


def test_culprit_is_recorded_and_printed_unless_another_rank_failed_first(
    verdict: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    board = Told()
    of(board).report_hang(HUNG, ROWS)
    error = "rank 1 made no progress in import; the others waited for it"
    assert board.first == {"rank": 1, "error": error, "code": 1, "by": 0}
    assert words(verdict) == [{"rank": 0, "code": 1, "spoke": False, "error": error, "by_watch": True}]
    assert capsys.readouterr().err == f"  {ROWS[0]}\n  {ROWS[1]}  <-\n"

    of(Told({"rank": 0, "error": "killed"})).report_hang(HUNG, ROWS)
    assert len(words(verdict)) == 1
    assert capsys.readouterr().err == ""


def test_error_is_printed_without_a_launch(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDPFORGE_VERDICT")
    of(Told()).report_hang(Culprit([0], "made no progress in import"), {0: ROWS[0]})
    assert capsys.readouterr().err == "error: rank 0 made no progress in import\n"


@pytest.mark.parametrize(
    ("rank", "cause", "printed"),
    [
        (0, {"code": int(ExitCode.USAGE), "told": True}, True),
        (1, {"code": int(ExitCode.USAGE), "told": True}, False),
        (0, {"code": int(ExitCode.USAGE)}, False),
        (0, {"code": int(ExitCode.ENVIRONMENT), "told": True}, False),
    ],
)
def test_killed_rank_records_the_exit_code_of_the_first_failed_rank(
    rank: int, cause: dict[str, Any], printed: bool, verdict: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prints an error of the recipe on rank 0 if rank 0 is killed before it finds the error itself."""
    of(Told({"rank": 3, "error": "no such key", **cause}), rank).report_end("asked")
    assert words(verdict) == [{"rank": rank, "code": cause["code"], "spoke": False}]
    assert capsys.readouterr().err == "error: rank 3 failed first: no such key\n" * printed


def test_rank_killed_without_a_known_cause_records_exit_code_1(verdict: Path) -> None:
    of(Told()).report_end("asked")
    assert [word["code"] for word in words(verdict)] == [1]


def test_folder_for_ranks_without_a_store_is_removed(tmp_path: Path) -> None:
    place = tmp_path / "meeting"
    place.mkdir()
    of(Told()).leave()
    assert place.exists()
    of(Told(place=str(place))).leave()
    assert not place.exists()
