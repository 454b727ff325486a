"""Fixtures for hosts and Slurm: they work as documented, and leave nothing behind."""

import os
import signal
import sys
import threading
from pathlib import Path

import psutil
from support.forked import in_ranks
from support.hosts import Hosts, needs_root, new_hosts
from support.slurm import Slurm, until


def test_hosts_have_separate_names_addresses_processes_and_disks(hosts: Hosts, tmp_path: Path) -> None:
    a, b = hosts["a"], hosts["b"]
    assert a.run("hostname").strip() == "nodea"
    assert b.run("getent", "hosts", "nodea").split() == ["10.77.0.1", "nodea"]
    assert a.run("bash", "-c", "echo /proc/[1-9]*").split()[0] == "/proc/1"
    a.own_disk(tmp_path / "runs", tmp_path / "disk")
    a.run("touch", "runs/mine", cwd=tmp_path)
    assert b.run("ls", "runs", cwd=tmp_path) == ""

    a.resolves_itself_to("127.0.1.1")
    assert a.run("getent", "hosts", "nodea").split() == ["127.0.1.1", "nodea"]


def test_network_of_a_host_can_be_cut_and_healed(hosts: Hosts, tmp_path: Path) -> None:
    serve = "import socket; s = socket.create_server(('', 999)); print('up', flush=True); s.accept()"
    connect = [sys.executable, "-c", "import socket, sys; socket.create_connection(('nodeb', 999), float(sys.argv[1]))"]
    server = hosts["b"].start(sys.executable, "-c", serve, cwd=tmp_path)
    assert server.stdout is not None
    assert server.stdout.readline() == "up\n"
    hosts.cut("b")
    assert "TimeoutError" in hosts["a"].start(*connect, "0.1", cwd=tmp_path).ended()[1]
    hosts.heal("b")
    assert hosts["a"].run(*connect, "20") == ""
    assert server.ended() == (0, "")


def test_signal_reaches_a_command_and_its_exit_code_is_returned(hosts: Hosts, tmp_path: Path) -> None:
    command = hosts["a"].start("bash", "-c", "trap 'exit 75' USR1; echo up; while :; do sleep 0.05; done", cwd=tmp_path)
    assert command.stdout is not None
    assert command.stdout.readline() == "up\n"
    command.signal(signal.SIGUSR1)
    assert command.ended() == (75, "")


def test_a_fork_of_the_tests_process_enters_a_host(hosts: Hosts) -> None:
    """Starts a thread in the fork, as OpenTelemetry does after a fork."""

    def where(rank: int) -> str:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
        hosts["ab"[rank]].enter()
        return os.uname().nodename

    assert in_ranks(2, where, forking=lambda rank: hosts["ab"[rank]].numbering()) == ["nodea", "nodeb"]


def test_hosts_leave_no_processes_when_the_test_is_killed(tmp_path: Path) -> None:
    needs_root()
    if (child := os.fork()) == 0:
        with new_hosts("ab", tmp_path) as hosts:
            sleeping = hosts["a"].start("bash", "-c", "echo up; sleep 1000", cwd=tmp_path)
            assert sleeping.stdout is not None
            sleeping.stdout.readline()
            inside = psutil.Process(sleeping.pid).children()
            pids = [hosts["a"].pid, hosts["b"].pid, *(process.pid for process in inside)]
            (tmp_path / "pids").write_text(" ".join(map(str, pids)))
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    pids = list(map(int, (tmp_path / "pids").read_text().split()))
    assert len(pids) == 3
    until(lambda: not any(map(psutil.pid_exists, pids)), 10)


def test_slurm_runs_a_job_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\nsrun --ntasks=2 --nodes=2 bash -c 'echo $SLURM_PROCID $SLURMD_NODENAME'\n")
    job = slurm.submit(script, "--nodes=2", "--output=out.txt", cwd=tmp_path)
    assert job.wait() == "COMPLETED"
    assert sorted((tmp_path / "out.txt").read_text().splitlines()) == ["0 n1", "1 n2"]
