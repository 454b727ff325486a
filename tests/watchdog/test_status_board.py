"""Rows are shown to everybody: by the launcher's store, and by files where there is none, or it is out of reach."""

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
from ddpforge.watchdog import agent
from ddpforge.watchdog.status_board import RankStatus, StatusBoard, within


def row(rank: int, marks: int = 1, seconds: float = 9.0, **more: Any) -> RankStatus:
    return RankStatus(rank, f"node{rank}", 100 + rank, "data", 5, marks, seconds, **more)


def boards(logs: Path, store: str, *attempts: str) -> list[StatusBoard]:
    logs.mkdir(exist_ok=True)
    return [StatusBoard(str(logs), attempt, store, seldom=10.0) for attempt in attempts]


@pytest.mark.parametrize("stored", [True, False], ids=["store", "files"])
def test_what_one_shows_the_others_see(tmp_path: Path, stored: bool) -> None:
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
def test_of_two_failures_all_know_the_first(tmp_path: Path, stored: bool) -> None:
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


def test_on_a_full_disk_rows_are_seen_all_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_without_store_and_folder_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    board = StatusBoard("", "now", "", seldom=0.0)
    board.publish(row(0, answers=True))
    board.call()
    assert not board.record_cause({"rank": 0})
    assert (board.called(), board.rows(), board.cause(), list(tmp_path.iterdir())) == (True, {}, None, [])


def test_a_call_reaches_those_that_only_see_files_and_those_that_only_see_the_store(tmp_path: Path) -> None:
    with serving() as port:
        store = f"127.0.0.1:{port}"
        both, files = boards(tmp_path / "one", store, "now")[0], boards(tmp_path / "one", "", "now")[0]
        other_disk = boards(tmp_path / "two", store, "now")[0]
        both.call()
        other_disk.publish(row(1))
        assert files.called()
        assert other_disk.called()


def test_a_file_is_written_by_a_rank_that_stands_still_and_seldom_by_one_that_gets_on(tmp_path: Path) -> None:
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


def test_a_store_out_of_reach_is_no_error_and_is_known(tmp_path: Path) -> None:
    clock = Clock()
    with serving() as port:
        board = StatusBoard(str(tmp_path), "now", f"127.0.0.1:{port}", seldom=10.0, clock=clock)
        board.publish(row(0))
        assert board.cut_off == 0.0
        board._talk.close()
    later = StatusBoard(str(tmp_path), "now", f"127.0.0.1:{port}", seldom=10.0, clock=clock)
    clock.now += 7
    for one in (board, later):
        one.publish(row(0, marks=2))
        assert list(one.rows()) == [0]  # from its file
    assert board.cut_off == 7.0
    assert later.cut_off == 0.0  # there may never have been one


def test_rubbish_is_not_shown(tmp_path: Path) -> None:
    (board,) = boards(tmp_path / "logs", "", "now")
    for number, text in enumerate(["", "{", "[]", '{"attempt": "now", "row": {"rank": 1}}', '{"attempt": "now"}']):
        (tmp_path / "logs" / f"phase-rank-{number}.json").write_text(text)
    assert board.rows() == {}


def test_a_store_keeps_attempts_apart_forgets_the_oldest_and_survives_what_it_cannot_read() -> None:
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


def test_a_disk_that_never_answers_is_given_up() -> None:
    pipe = os.pipe()
    assert within(0.01, lambda: os.read(pipe[0], 1)) is None
    assert within(5.0, lambda: 3) == 3


def test_the_first_machine_has_the_store_one_port_after_the_endpoint() -> None:
    first, second = (Nodes.of(2, rank, "node7:29500") for rank in (0, 1))
    assert [(node.store, node.is_first) for node in (first, second)] == [("node7:29501", True), ("node7:29501", False)]
    assert (Nodes().store, Nodes().is_first) == (None, True)


def test_ranks_find_a_store_here_or_elsewhere_or_do_without(capsys: pytest.CaptureFixture[str]) -> None:
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


def test_the_process_beside_a_rank_begins_with_the_standard_library_alone() -> None:
    """It has no site-packages: a module that imports one of those would end it, and a run would go unwatched."""
    command = [sys.executable, "-S", "-E", agent.__file__]
    ended = subprocess.run(command, capture_output=True, text=True)
    assert "IndexError" in ended.stderr  # it came as far as its settings, which are missing
    assert "ModuleNotFoundError" not in ended.stderr


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_a_row_that_is_a_link_or_a_pipe_is_no_row(tmp_path: Path, kind: str) -> None:
    row = tmp_path / "phase-rank-0.json"
    row.symlink_to("/dev/zero") if kind == "link" else os.mkfifo(row)
    assert StatusBoard(str(tmp_path), "a", "", seldom=0.0).rows() == {}


def test_a_row_that_answers_counts_before_a_later_one_that_does_not(tmp_path: Path) -> None:
    """Of a rank whose watch has answered by the store, and whose file still says where it stood before."""
    with serving() as port:
        (one,) = boards(tmp_path / "logs", f"127.0.0.1:{port}", "now")
        (other,) = boards(tmp_path / "logs", "", "now")
        one.publish(row(1, marks=1, answers=True))
        other.publish(row(1, marks=5))
        assert one.rows()[1].answers
