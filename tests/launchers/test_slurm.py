"""Jobs of `ddpforge slurm` on a real Slurm: stop signals, requeues and cancellation. The environment of ranks from the
variables of a step needs no Slurm.
"""

import sys
from pathlib import Path
from typing import Any

import pytest
from support.slurm import Job, Slurm, until

from ddpforge.errors import SetupError
from ddpforge.launchers import slurm as scripts
from ddpforge.launchers.slurm import export_slurm_env

# Replaces ddpforge: handles stop signals like it, prints its arguments, and runs until a stop request, or until the
# file `go` contains its exit code.
_STAND_IN = f"""#!{sys.executable} -S
import os, signal, sys, time


def stop(*_):
    time.sleep(0.2)
    print("saved by", os.environ["SLURM_PROCID"], flush=True)
    os._exit(75)


for number in (signal.SIGUSR1, signal.SIGTERM):
    signal.signal(number, stop)
signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])  # the script blocks it until there is a handler
job, attempt = os.environ.get("SLURM_ARRAY_TASK_ID", "alone"), os.environ.get("SLURM_RESTART_COUNT", "0")
print(f"job {{job}}, attempt {{attempt}}: {{' '.join(sys.argv[1:])}}", flush=True)
while not os.path.exists("go"):
    time.sleep(0.05)
sys.exit(int(open("go").read()))
"""


def submitted(slurm: Slurm, folder: Path, *flags: str, setup: str = "", **options: Any) -> Job:
    """Submits a job of two nodes; its output goes to `out.txt`, or to `out-N.txt` in an array."""
    (folder / "ddpforge").write_text(_STAND_IN)
    (folder / "ddpforge").chmod(0o755)
    job = scripts.Job(
        name="test",
        arguments=["recipe.toml"],
        setup=f"export PATH={folder}:$PATH\n{setup}",
        sbatch=["output=out-%a.txt" if "array" in options else "output=out.txt"],
        nodes=2,
        **options,
    )
    (folder / "job.sh").write_text(scripts.script(job, ["ddpforge", "slurm"]))
    return slurm.submit(folder / "job.sh", *flags, cwd=folder)


def says(folder: Path, text: str, times: int = 1, file: str = "out.txt") -> None:
    """Waits until a job has printed `text` `times` times."""
    path = folder / file
    until(lambda: path.exists() and path.read_text().count(text) >= times, 20, lambda: path.read_text())


def test_preempted_job_saves_is_requeued_and_completes(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, "--exclusive")
    says(tmp_path, "attempt 0: launch recipe.toml --nproc=1 --nnodes=2", times=2)
    (tmp_path / "urgent.sh").write_text("#!/bin/bash\ntrue\n")
    slurm.submit(tmp_path / "urgent.sh", "--partition=high", "--nodes=2", "--exclusive", cwd=tmp_path).wait()
    says(tmp_path, "saved by", times=2)

    job.wait("PENDING")
    (tmp_path / "go").write_text("0")
    job.begin()
    assert job.wait() == "COMPLETED"
    assert job.restarts == 1
    assert (tmp_path / "out.txt").read_text().count("attempt 1: launch") == 2


def test_cancelled_job_saves_and_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path)
    says(tmp_path, "attempt 0", times=2)
    slurm.run("scancel", job.number)
    says(tmp_path, "saved by", times=2)
    assert job.wait() == "CANCELLED"


@pytest.mark.full
def test_job_is_requeued_before_its_time_limit_up_to_max_requeues(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, max_requeues=1)
    for attempt in (0, 1):
        says(tmp_path, f"attempt {attempt}", times=2)
        slurm.run("scancel", "--batch", "--signal=USR1", job.number)  # as --signal=B:USR1@120 does
        job.wait("PENDING")
        if attempt == 0:
            job.begin()
    assert job.wait() == "FAILED"
    assert job.facts["ExitCode"] == "75:0"
    assert "not requeued: the limit of 1 requeues is reached" in (tmp_path / "out.txt").read_text()


@pytest.mark.full
def test_job_with_a_stop_request_during_setup_is_requeued(slurm: Slurm, tmp_path: Path) -> None:
    job = submitted(slurm, tmp_path, setup="echo setting up; while [ ! -e ready ]; do sleep 0.05; done")
    says(tmp_path, "setting up")
    slurm.run("scancel", "--batch", "--signal=USR1", job.number)
    (tmp_path / "ready").touch()
    job.wait("PENDING")
    assert job.restarts == 1
    assert "attempt" not in (tmp_path / "out.txt").read_text()


@pytest.mark.full
def test_failed_job_is_not_requeued(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "go").write_text("3")
    job = submitted(slurm, tmp_path)
    assert job.wait() == "FAILED"
    assert (job.facts["ExitCode"], job.restarts) == ("3:0", 0)


@pytest.mark.full
def test_one_job_of_an_array_is_requeued_separately(slurm: Slurm, tmp_path: Path) -> None:
    array = submitted(slurm, tmp_path, array="0-1", task_per_rank=True)
    for number in (0, 1):
        says(tmp_path, f"job {number}, attempt 0: run recipe.toml", times=2, file=f"out-{number}.txt")
    first, second = Job(slurm, f"{array.number}_0"), Job(slurm, f"{array.number}_1")
    slurm.run("scancel", "--batch", "--signal=USR1", second.number)
    second.wait("PENDING")
    assert (first.restarts, second.restarts) == (0, 1)
    assert first.state == "RUNNING"


# ---------------------------------------------------------------------------------------------- in a step
STEP = {
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3),1",
    "SLURM_STEP_NODELIST": "n[01-03],m7",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_NTASKS": "64",
}


@pytest.fixture(autouse=True)
def _names_resolve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scripts.socket, "getaddrinfo", lambda *_: [])


def test_each_task_of_a_step_becomes_a_rank() -> None:
    environ = dict(STEP)
    assert export_slurm_env(environ)
    assert {name: environ[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK")} == {
        **{"RANK": "5", "LOCAL_RANK": "1", "WORLD_SIZE": "7", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "2"},
    }
    assert environ["MASTER_ADDR"] == "n01"
    assert 20_000 <= int(environ["MASTER_PORT"]) < 32_000


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("n1", "n1"),
        ("n[1-2,5],m3", "n1"),
        ("n[007,9]", "n007"),
        ("a,b", "a"),
        ("r[1-2]n[3-4]", "r1n3"),
        ("g[1-2]-ib", "g1-ib"),
    ],
)
def test_master_address_is_the_first_node(nodes: str, first: str) -> None:
    environ = STEP | {"SLURM_STEP_NODELIST": nodes}
    export_slurm_env(environ)
    assert environ["MASTER_ADDR"] == first


@pytest.mark.parametrize("other", [{"SLURM_STEP_ID": "1"}, {"SLURM_JOB_ID": "4712"}, {"SLURM_RESTART_COUNT": "1"}])
def test_concurrent_steps_have_different_master_ports(other: dict[str, str]) -> None:
    one, another = dict(STEP), STEP | other
    export_slurm_env(one)
    export_slurm_env(another)
    assert one["MASTER_PORT"] != another["MASTER_PORT"]


@pytest.mark.parametrize(
    "environ",
    [
        STEP | {"RANK": "0"},  # of torchrun, started by srun
        STEP | {"SLURM_STEP_NUM_TASKS": "1"},  # one launcher on each node, or one process alone
        {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"},  # a batch script
        {},
    ],
)
def test_environment_of_other_launchers_and_single_tasks_is_not_changed(environ: dict[str, str]) -> None:
    before = dict(environ)
    assert not export_slurm_env(environ)
    assert environ == before


@pytest.mark.parametrize("missing", ["SLURM_STEP_NODELIST", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"])
def test_missing_step_variable_raises_an_error_for_several_tasks(missing: str) -> None:
    environ = {name: value for name, value in STEP.items() if name != missing}
    with pytest.raises(SetupError, match="one of 7 tasks of a Slurm step"):
        export_slurm_env(environ)


def test_node_name_that_cannot_be_resolved_is_replaced_by_its_slurm_address(monkeypatch: pytest.MonkeyPatch) -> None:
    def unknown(*_: object) -> None:
        raise OSError("not known")

    class Shown:
        stdout = "NodeName=n01 NodeAddr=10.0.0.7 State=IDLE"

    monkeypatch.setattr(scripts.socket, "getaddrinfo", unknown)
    monkeypatch.setattr(scripts.subprocess, "run", lambda *_, **__: Shown)
    environ = dict(STEP)
    export_slurm_env(environ)
    assert environ["MASTER_ADDR"] == "10.0.0.7"
