"""Status board: rows reach all ranks by the launcher's store, or by files without a reachable store."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from support.doubles import Clock

from ddpforge.launchers.nodes import Nodes
from ddpforge.launchers.store import ADDRESS, Attempts, serving, store_at
from ddpforge.ranks.heartbeat import RankStatus
from ddpforge.watchdog import agent
from ddpforge.watchdog.status_board import StatusBoard, within


def row(rank: int, marks: int = 1, seconds: float = 9.0, **more: Any) -> RankStatus:
    return RankStatus(rank, f"node{rank}", 100 + rank, "data", 5, marks, seconds, **more)


def boards(logs: Path, store: str, *attempts: str) -> list[StatusBoard]:
    logs.mkdir(exist_ok=True)
    return [StatusBoard(str(logs), attempt, store, seldom=10.0) for attempt in attempts]


@pytest.mark.parametrize("stored", [True, False], ids=["store", "files"])
def test_published_rows_are_visible_to_other_ranks(tmp_path: Path, stored: bool) -> None:
    with serving() as port:
        store = f"127.0.0.1:{port}" if stored else ""
        one, two, earlier = boards(tmp_path / "logs", store, "now", "now", "before")
        earlier.publish(row(7))
        one.publish(row(0))
        two.publish(row(1, answers=True))
        found = one.rows()
        assert {rank: (each.host, each.answers) for rank, each in found.items()} == {
            0: ("node0", False),
            1: ("node1", True),
        }
        assert not two.called()
        one.call()
        two.publish(row(1, marks=2))
        assert two.called()
        assert two.cut_off == 0.0


@pytest.mark.parametrize("stored", [True, False], ids=["store", "files"])
def test_all_ranks_read_the_first_of_two_causes(tmp_path: Path, stored: bool) -> None:
    with serving() as port:
        store = f"127.0.0.1:{port}" if stored else ""
        one, two, earlier = boards(tmp_path / "logs", store, "now", "now", "before")
        assert two.cause() is None
        assert one.record_cause({"rank": 0, "error": "first"})
        assert not two.record_cause({"rank": 1, "error": "second"})
        one.rows()
        assert [one.cause(), two.cause()] == [{"rank": 0, "error": "first"}] * 2
        earlier.rows()
        if stored:
            assert earlier.cause() is None


def test_rows_are_visible_also_on_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    one, two, earlier = boards(tmp_path / "logs", "", "now", "now", "before")
    monkeypatch.setattr("ddpforge.watchdog.status_board.json.dump", full)
    earlier.publish(row(7, answers=True))
    line = "a/rather/long/path/of/a/dataset/that/hangs/" * 3 + "data.py:12 in __getitem__"
    one.publish(row(0, answers=True, at=line, frozen=True, time=1e9))
    two.publish(row(1, marks=3, answers=True, left=True))
    found = two.rows()
    assert sorted(found) == [0, 1]
    assert (found[0].answers, found[0].frozen, found[0].left, found[0].pid) == (True, True, False, 100)
    assert found[0].at.endswith("data.py:12 in __getitem__")
    assert (found[1].beats, found[1].left, found[1].phase) == (3, True, "data")


def test_board_without_store_and_folder_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = StatusBoard("", "now", "", seldom=0.0)
    board.publish(row(0, answers=True))
    board.call()
    assert not board.record_cause({"rank": 0})
    assert (board.called(), board.rows(), board.cause(), list(tmp_path.iterdir())) == (True, {}, None, [])


def test_call_reaches_boards_with_only_files_and_boards_with_only_the_store(tmp_path: Path) -> None:
    with serving() as port:
        store = f"127.0.0.1:{port}"
        both, files = boards(tmp_path / "one", store, "now")[0], boards(tmp_path / "one", "", "now")[0]
        other_disk = boards(tmp_path / "two", store, "now")[0]
        both.call()
        other_disk.publish(row(1))
        assert files.called()
        assert other_disk.called()


def test_file_is_written_at_once_for_a_stalled_rank_and_seldom_otherwise(tmp_path: Path) -> None:
    clock = Clock()
    board = StatusBoard(str(tmp_path), "now", "", seldom=10.0, clock=clock)
    file = tmp_path / "phase-rank-0.json"

    def marks() -> int | None:
        return json.loads(file.read_text())["row"]["beats"] if file.exists() else None

    board.publish(row(0, 1, seconds=0.2))
    assert marks() is None
    board.publish(row(0, 2, seconds=1.2))
    assert marks() == 2
    board.publish(row(0, 3, seconds=0.2))
    assert marks() == 2
    clock.now += 11
    board.publish(row(0, 4, seconds=0.2))
    assert marks() == 4


def test_cut_off_counts_the_seconds_without_the_store(tmp_path: Path) -> None:
    clock = Clock()
    with serving() as port:
        board = StatusBoard(str(tmp_path), "now", f"127.0.0.1:{port}", seldom=10.0, clock=clock)
        board.publish(row(0))
        assert board.cut_off == 0.0
        board._connection.close()
    later = StatusBoard(str(tmp_path), "now", f"127.0.0.1:{port}", seldom=10.0, clock=clock)
    clock.now += 7
    for one in (board, later):
        one.publish(row(0, marks=2))
        assert list(one.rows()) == [0]  # read from its file
    assert board.cut_off == 7.0
    assert later.cut_off == 0.0  # it never reached a store


def test_invalid_files_are_ignored(tmp_path: Path) -> None:
    (board,) = boards(tmp_path / "logs", "", "now")
    for number, text in enumerate(["", "{", "[]", '{"attempt": "now", "row": {"rank": 1}}', '{"attempt": "now"}']):
        (tmp_path / "logs" / f"phase-rank-{number}.json").write_text(text)
    assert board.rows() == {}


def test_store_separates_attempts_drops_the_oldest_and_survives_invalid_requests() -> None:
    store = Attempts()
    store.answer({"attempt": "a", "row": {"rank": 0}, "alarm": True})
    assert store.answer({"attempt": "a", "ask": True}) == {"alarm": True, "rows": [{"rank": 0}]}
    assert store.answer({"attempt": "b", "ask": True}) == {"alarm": False, "rows": []}
    for number in range(8):
        store.answer({"attempt": str(number)})
    assert store.answer({"attempt": "a", "ask": True}) == {"alarm": False, "rows": []}
    with serving() as port:
        for text in (b"no json\n", b"{}\n", b"[1]\n", b"x" * 100_000 + b"\n"):
            with socket.create_connection(("127.0.0.1", port)) as talk:
                talk.sendall(text)
                assert talk.makefile("rb").readline() in (b"",)
        with socket.create_connection(("127.0.0.1", port)) as talk:
            talk.sendall(b'{"attempt": "a"}\n')
            assert json.loads(talk.makefile("rb").readline()) == {"alarm": False}


def test_within_returns_none_after_its_timeout() -> None:
    pipe = os.pipe()
    assert within(0.01, lambda: os.read(pipe[0], 1)) is None
    assert within(5.0, lambda: 3) == 3


def test_first_node_hosts_the_store_at_the_port_after_the_endpoint() -> None:
    first, second = (Nodes.of(2, rank, "node7:29500") for rank in (0, 1))
    assert [(node.store, node.is_first) for node in (first, second)] == [("node7:29501", True), ("node7:29501", False)]
    assert (Nodes().store, Nodes().is_first) == (None, True)


def test_variables_name_a_local_store_a_remote_store_or_none(capsys: pytest.CaptureFixture[str]) -> None:
    with store_at("node7:29501", here=False) as variables:
        assert variables == {ADDRESS: "node7:29501"}
    with store_at(None, here=True) as variables:
        host, _, port = variables[ADDRESS].partition(":")
        assert host == "127.0.0.1"
        with socket.create_connection((host, int(port))):
            pass
        with serving("", 0) as taken, store_at(f"node7:{taken}", here=True) as without:
            assert without == {}
    assert f"cannot serve the watchdogs' store at node7:{taken}: " in capsys.readouterr().err


def test_agent_imports_only_the_standard_library_at_first() -> None:
    """Runs without site-packages: an import of another package would end the agent, and leave no watchdog."""
    command = [sys.executable, "-S", "-E", agent.__file__]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "IndexError" in ended.stderr  # it reached its missing settings
    assert "ModuleNotFoundError" not in ended.stderr


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_row_file_that_is_a_link_or_a_pipe_is_ignored(tmp_path: Path, kind: str) -> None:
    row = tmp_path / "phase-rank-0.json"
    row.symlink_to("/dev/zero") if kind == "link" else os.mkfifo(row)
    assert StatusBoard(str(tmp_path), "a", "", seldom=0.0).rows() == {}


def test_row_that_answers_a_call_takes_precedence_over_a_later_row(tmp_path: Path) -> None:
    """Covers a watchdog that has answered by the store while its file still has an earlier row."""
    with serving() as port:
        (one,) = boards(tmp_path / "logs", f"127.0.0.1:{port}", "now")
        (other,) = boards(tmp_path / "logs", "", "now")
        one.publish(row(1, marks=1, answers=True))
        other.publish(row(1, marks=5))
        assert one.rows()[1].answers
