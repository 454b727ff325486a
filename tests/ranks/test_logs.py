"""Logs of ranks: rank 0's messages and other ranks' warnings on stderr, all messages in the log files."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import BinaryIO

import pytest

from ddpforge.errors import SetupError
from ddpforge.ranks.logs import setup_logging

logger = logging.getLogger("ddpforge")


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("GROUP_WORLD_SIZE", "SLURM_NNODES"):
        monkeypatch.delenv(name, raising=False)
    logger.handlers.clear()


def log_all() -> None:
    logger.debug("a detail")
    logger.info("saved step 10")
    logger.warning("step 11 was left out")
    logger.error("the disk is full")


def test_rank_0_logs_without_a_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    log_all()
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "saved step 10\nwarning: step 11 was left out\nerror: the disk is full\n"


def test_other_ranks_log_only_warnings_with_their_rank(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(3)
    log_all()
    assert capsys.readouterr().err == "[rank 3] warning: step 11 was left out\n[rank 3] error: the disk is full\n"


@pytest.mark.parametrize("variable", ["GROUP_WORLD_SIZE", "SLURM_NNODES"])
def test_prefix_has_the_host_name_on_several_nodes(
    variable: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(variable, "2")
    monkeypatch.setattr("socket.gethostname", lambda: "node07")
    setup_logging(3)
    logger.warning("slow")
    assert capsys.readouterr().err == "[rank 3 node07] warning: slow\n"


@pytest.mark.parametrize("rank", [0, 3])
def test_every_rank_has_its_own_complete_file(rank: int, tmp_path: Path) -> None:
    setup_logging(rank, tmp_path)
    log_all()
    text = (tmp_path / "logs" / f"rank-{rank}.log").read_text()
    assert re.sub(r"^\S+ \S+ ", "", text, flags=re.MULTILINE) == (
        "DEBUG a detail\nINFO saved step 10\nWARNING step 11 was left out\nERROR the disk is full\n"
    )


def test_level_applies_to_stderr_and_the_log_file_has_all_messages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    setup_logging(0, tmp_path, logging.ERROR)
    log_all()
    assert capsys.readouterr().err == "error: the disk is full\n"
    setup_logging(0, tmp_path, logging.DEBUG)
    log_all()
    assert capsys.readouterr().err.startswith("a detail\nsaved step 10\n")

    levels = [line.split()[2] for line in (tmp_path / "logs" / "rank-0.log").read_text().splitlines()]
    assert levels == ["DEBUG", "INFO", "WARNING", "ERROR"] * 2


def _full(*_: object) -> BinaryIO:
    return Path("/dev/full").open("ab")


def test_log_file_that_cannot_be_written_is_reported_once_without_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpforge.disk.open_plain", _full)
    setup_logging(0, tmp_path)
    log_all()
    err = capsys.readouterr().err
    assert err.count("warning: cannot write") == 1
    assert "No space left on device" in err
    assert "Traceback" not in err
    assert "error: the disk is full\n" in err


@pytest.mark.parametrize("kind", ["link", "pipe"])
def test_log_file_that_is_a_link_or_a_pipe_is_rejected(tmp_path: Path, kind: str) -> None:
    (tmp_path / "logs").mkdir()
    path = tmp_path / "logs" / "rank-0.log"
    path.symlink_to(tmp_path / "elsewhere") if kind == "link" else os.mkfifo(path)
    with pytest.raises(SetupError, match=r"rank-0\.log cannot be written: it is a link or a special file"):
        setup_logging(0, tmp_path)
    assert not (tmp_path / "elsewhere").exists()


def test_in_file_only_messages_are_not_on_stderr(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0, tmp_path)
    logger.error("a traceback", extra={"in_file_only": True})
    assert capsys.readouterr().err == ""
    assert "a traceback" in (tmp_path / "logs" / "rank-0.log").read_text()


def test_setting_up_again_does_not_repeat_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    setup_logging(0, tmp_path)
    logger.info("once")
    assert capsys.readouterr().err == "once\n"
    assert len((tmp_path / "logs" / "rank-0.log").read_text().splitlines()) == 1


def test_an_error_shows_its_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    setup_logging(0)
    try:
        raise ValueError("no such class")
    except ValueError:
        logger.exception("the loader failed")
    err = capsys.readouterr().err
    assert err.startswith("error: the loader failed\nTraceback")
    assert err.endswith("ValueError: no such class\n")


def test_neither_logging_nor_trackers_import_torch() -> None:
    code = "import sys, ddpforge.ranks.logs, ddpforge.training.trackers; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout == b"False\n"
