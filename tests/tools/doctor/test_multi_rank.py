"""Checks of `ddpforge doctor` with several ranks, and the command's output."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner
from support.hosts import Hosts
from support.launched import Ranks

from ddpforge.cli import main
from ddpforge.testing.doubles import in_threads
from ddpforge.tools.doctor import multi_rank
from ddpforge.tools.doctor.checks import run_checks


def test_ranks_measure_their_communication(tmp_path: Path, ddpforge: Callable[..., Ranks]) -> None:
    said = ddpforge("doctor", "--out", str(tmp_path / "runs"), "--json", nproc=2)
    report = json.loads(said.stdout)  # output of rank 0 only
    assert report["ok"], report
    texts = [finding["what"] for finding in report["findings"] if finding["level"] != "error"]
    for part in ("all ranks have the same software and recipe", "runs is shared by all ranks", "clocks differ by"):
        assert any(part in text for text in texts), part
    assert [text.split(" takes")[0] for text in texts if "all-reduce" in text] == [
        f"an all-reduce of {size} MiB" for size in (1, 16, 64)
    ]
    assert any(text.startswith("rank 0 on ") and "GiB/s" in text for text in texts)
    assert not (tmp_path / "runs").exists()


def test_hosts_without_a_shared_folder_are_an_error(
    hosts: Hosts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts["b"].own_disk(tmp_path / "runs", tmp_path / "disk")
    hosts["b"].resolves_itself_to("127.0.1.1")
    monkeypatch.setattr("ddpforge.guard.node_consistency._CACHED", 0.0)
    monkeypatch.setattr(multi_rank, "_SIZES", (1,))

    def look(rank: int) -> list[dict[str, object]] | None:
        found = run_checks(None, [], str(tmp_path / "runs"))
        return None if found is None else [finding.as_dict() for finding in found]

    found, nothing = hosts.in_ranks("ab", look)
    assert nothing is None
    (sick,) = [finding for finding in found if finding["level"] == "error"]
    assert "is not visible to rank 1 on nodeb" in sick["what"]
    assert "--out DIR" in sick["fix"]
    (loopback,) = [finding for finding in found if "only a local address" in finding["what"]]
    assert loopback["hosts"] == ["nodeb"]


def test_clock_difference_names_hosts_and_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(ranks: object) -> list[str]:
        off = 90.0 if ranks.rank == 1 else 0.0  # type: ignore[attr-defined]
        gather = ranks.all_gather_object  # type: ignore[attr-defined]
        host = f"node{ranks.rank}"  # type: ignore[attr-defined]
        ranks.all_gather_object = lambda told: gather((host, told[1] + off))  # type: ignore[attr-defined]
        return [finding.what for finding in multi_rank.clocks(ranks)]  # type: ignore[arg-type]

    assert in_threads(3, look)[0] == ["the clock of node1 (rank 1) is 90.0 s ahead of that of node0 (rank 0)"]


def test_slow_link_is_a_warning() -> None:
    (slow,) = multi_rank._judged({"a and b": 9.0, "a and c": 8.0, "b and c": 1.0})
    assert (slow.level, slow.what) == ("warning", "b and c exchange 1.00 GiB/s, and the median is 8.00")
    (even,) = multi_rank._judged({"a and b": 9.0, "a and c": 8.0})
    assert even.level == "note"


def test_errors_are_printed_first_and_set_the_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nope0")
    result = CliRunner().invoke(main, ["doctor", "digits", "--out", str(tmp_path)])
    assert result.exit_code == 3
    lines = result.stdout.splitlines()
    assert lines[1].startswith("error ")
    assert "there is no interface nope0" in lines[1]
    assert any("for a checkpoint of at most" in line for line in lines)
