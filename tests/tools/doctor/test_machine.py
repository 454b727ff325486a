"""Checks of `ddpforge doctor` on one host: findings, their levels, and fixes."""

import os
import resource
import shutil
import signal
from collections import namedtuple
from collections.abc import Iterable
from pathlib import Path

import pytest

from ddpforge.launchers.network_interface import GLOO
from ddpforge.tools.doctor import machine
from ddpforge.tools.doctor.findings import Finding, error, merged, ok, warning

Usage = namedtuple("Usage", "total used free")


def levels(findings: Iterable[Finding]) -> list[str]:
    return [finding.level for finding in findings]


def only(findings: Iterable[Finding]) -> Finding:
    (finding,) = findings
    return finding


def test_unsuitable_packages_are_reported_with_the_install_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert levels(machine.packages()) == ["ok"]
    wanted = ["torch>=99", "nonsuch>=1,<2", "pytest>=1000; extra == 'dev'", "absent; extra == 'other'"]
    wanted.append("click==8.0; extra == 'bench'")  # records the measured version
    monkeypatch.setattr(machine, "requires", lambda _: wanted)
    torch, nonsuch, extra, _ = machine.packages()
    assert (torch.level, torch.fix) == ("error", "pip install 'torch>=99'")
    assert (nonsuch.level, nonsuch.what) == ("error", "nonsuch is not installed")
    assert nonsuch.fix == "pip install 'nonsuch<2,>=1'"
    assert extra.level == "warning"


@pytest.mark.parametrize(
    ("size", "workers", "level"),
    [(64 << 20, 4, "warning"), (64 << 20, None, "warning"), (64 << 20, 0, "note"), (8 << 30, 4, "ok")],
)
def test_small_shared_memory_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int, workers: int | None, level: str
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(size, 0, size))
    found = only(machine.shared_memory(workers, tmp_path))
    assert found.level == level
    assert ("--shm-size" in found.fix) == (level == "warning")


@pytest.mark.parametrize(
    ("soft", "hard", "fix"),
    [(1024, 4096, "ulimit -n 4096"), (256, 256, "raise the hard limit: docker run --ulimit nofile=65536")],
)
def test_low_limit_of_open_files_is_a_warning(monkeypatch: pytest.MonkeyPatch, soft: int, hard: int, fix: str) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(machine, "_INFINIBAND", Path("/nowhere"))
    found = next(iter(machine.limits()))
    assert (found.level, found.what, found.fix) == ("warning", f"a process may open {soft} files", fix)


def test_more_processes_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    assert only(machine._cores(2)) == ok("2 of 8 CPU cores")
    found = only(machine._cores(6))
    assert (found.level, found.what) == ("warning", "2 of 8 CPU cores for 6 processes")


@pytest.mark.parametrize(
    ("addresses", "best", "level"),
    [
        (["10.0.0.1"], None, "ok"),
        (["127.0.1.1"], "eth0", "note"),
        (["127.0.1.1"], None, "warning"),
        ([], None, "warning"),
    ],
)
def test_host_name_that_resolves_to_loopback_is_reported(
    monkeypatch: pytest.MonkeyPatch, addresses: list[str], best: str | None, level: str
) -> None:
    monkeypatch.delenv(GLOO, raising=False)
    monkeypatch.setattr(machine, "addresses_of", lambda _: addresses)
    monkeypatch.setattr(machine, "best_interface", lambda _: best)
    monkeypatch.setattr(machine, "interfaces", lambda: {"eth0": ["10.0.0.1"], "eth1": ["10.1.0.1"]})
    found = only(machine.names())
    assert found.level == level
    if level == "warning":
        assert found.fix == "export GLOO_SOCKET_IFNAME=… (eth0, eth1), or correct /etc/hosts"


def test_long_path_of_the_temporary_folder_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", "/" + 100 * "x")
    assert any("temporary files is too long for loader processes" in found.what for found in machine.limits())
    assert not any("temporary files" in found.what for found in machine.limits(workers=0))


def test_missing_interfaces_in_variables_are_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(GLOO, "nope0")
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "l,^docker")  # NCCL matches prefixes: lo
    assert [each.what for each in machine.names() if each.level == "error"] == [
        "GLOO_SOCKET_IFNAME=nope0, but there is no interface nope0",
        "NCCL_SOCKET_IFNAME=l,^docker, but there is no interface ^docker",
    ]


def test_slow_variables_are_warnings_and_others_are_listed() -> None:
    environ = {
        **{"CUDA_LAUNCH_BLOCKING": "1", "NCCL_P2P_DISABLE": "0", "TORCH_DISTRIBUTED_DEBUG": "DETAIL"},
        **{"NCCL_SOCKET_IFNAME": "ib0", "HOME": "/root", "OMP_NUM_THREADS": "1", "TORCHELASTIC_RUN_ID": "x"},
    }
    blocking, debug, rest = machine.variables(environ)
    assert blocking == warning(
        "CUDA_LAUNCH_BLOCKING=1: the CPU waits for every kernel, which makes training slow",
        "unset CUDA_LAUNCH_BLOCKING",
    )
    assert debug.fix == "unset TORCH_DISTRIBUTED_DEBUG"
    assert rest.what == "set: NCCL_P2P_DISABLE=0 NCCL_SOCKET_IFNAME=ib0"
    assert list(machine.variables({"HOME": "/root"})) == []


def test_free_space_for_checkpoints_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(0, 0, 3 << 30))
    monkeypatch.setattr(machine, "writing_speed", lambda _: 100 * 2.0**20)
    folder = tmp_path / "new/runs"
    assert only(machine.files(folder, None, 0)) == ok(f"3.0 GiB are free for {folder}, written at 100 MiB/s")
    fits = only(machine.files(folder, 1 << 30, 2))
    assert (fits.level, "10.24 s for a checkpoint of at most 1,024.0 MiB" in fits.what) == ("ok", True)
    full = only(machine.files(folder, 1 << 30, 3))
    assert (full.level, "4 checkpoints of 1,024.0 MiB do not fit" in full.what) == ("error", True)


def test_writing_speed_leaves_no_files(tmp_path: Path) -> None:
    assert machine.writing_speed(tmp_path) > 1 << 20
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGRTMIN"), reason="only Linux has /proc, where root cannot write either")
def test_folder_that_cannot_be_written_is_an_error() -> None:
    assert only(machine.files(Path("/proc/nowhere"), None, 0)).level == "error"


def test_same_finding_of_several_hosts_is_reported_once() -> None:
    told = [("a", [ok("x"), error("y", "mend")]), ("b", [ok("x")]), ("b", [])]
    assert merged(told) == [Finding("ok", "x", "", ("a", "b")), Finding("error", "y", "mend", ("a",))]
