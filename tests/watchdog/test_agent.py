"""A rank that stands still or dies while it starts is named, by a process that has no folder to write to."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from support.doubles import Clock

from ddpforge.errors import ExitCode
from ddpforge.watchdog import agent
from ddpforge.watchdog.agent import EarlyReporter
from ddpforge.watchdog.culprit import Culprit
from ddpforge.watchdog.status_board import RankStatus

HUNG = Culprit([1], "made no progress in import; the others waited for it")
ROWS = {rank: RankStatus(rank, f"node{rank}", 100 + rank, "start", 0, 1, 9.0) for rank in range(2)}


class Told:
    """The place where ranks show what has failed; another rank may have been first."""

    def __init__(self, first: Mapping[str, Any] | None = None, place: str | None = None) -> None:
        self.first, self.place = first, place

    def cause(self) -> Any:
        return self.first

    def record_cause(self, cause: Mapping[str, Any]) -> bool:
        self.first = self.first or cause
        return self.first == cause


@pytest.fixture(autouse=True)
def verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a launch is told how ranks ended."""
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


def test_a_rank_is_asked_to_stop_once_where_another_has_failed_and_not_for_a_failure_of_its_own(
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


def test_what_a_rank_has_said_itself_others_may_be_about_to_say(
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


def test_the_rank_that_the_others_wait_for_is_told_and_shown_unless_another_failed_first(
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


def test_without_a_launch_the_error_is_printed_too(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
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
def test_a_rank_that_is_ended_has_the_exit_code_of_the_first_that_failed(
    rank: int, cause: dict[str, Any], printed: bool, verdict: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of a recipe that is wrong for all, rank 0 says what the first has found, where it has not found it itself."""
    of(Told({"rank": 3, "error": "no such key", **cause}), rank).report_end("asked")
    assert words(verdict) == [{"rank": rank, "code": cause["code"], "spoke": False}]
    assert capsys.readouterr().err == "error: rank 3 failed first: no such key\n" * printed


def test_a_rank_that_is_ended_for_nothing_known_has_failed(verdict: Path) -> None:
    of(Told()).report_end("asked")
    assert [word["code"] for word in words(verdict)] == [1]


def test_the_place_where_ranks_without_a_store_meet_is_cleared_up(tmp_path: Path) -> None:
    place = tmp_path / "meeting"
    place.mkdir()
    of(Told()).leave()
    assert place.exists()
    of(Told(place=str(place))).leave()
    assert not place.exists()
