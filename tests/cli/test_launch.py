"""`ddpforge launch`: its command lines, errors and status, with a fake launcher; tests/launchers starts processes."""

import json
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.launchers.exit_record import LaunchExit, RankDeath
from ddpforge.runs.folder import RunFolder, Status


class Launcher:
    """Fake of `ddpforge.launchers.process.start` that records calls and returns `ended`, by default a preempted run."""

    def __init__(self) -> None:
        self.started: list[tuple[list[str], int]] = []
        self.patience = 0.0
        self.nodes: dict[str, str] = {}
        self.ended = LaunchExit(ExitCode.PREEMPTED)

    def __call__(
        self, command: list[str], *, nproc: int, patience: float, variables: Mapping[str, str], store: object
    ) -> LaunchExit:
        self.nodes = {name: value for name, value in variables.items() if name != "DDPFORGE_STARTED"}
        assert len(variables) == len(self.nodes) + 1
        self.patience = patience
        self.started.append((command, nproc))
        return self.ended


@pytest.fixture(autouse=True)
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launcher = Launcher()
    monkeypatch.setattr("ddpforge.launchers.process.start", launcher)
    monkeypatch.chdir(tmp_path)
    return launcher


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments])


def test_launch_passes_its_options_to_the_ranks_and_to_torchrun(launcher: Launcher) -> None:
    options = ["-s", "train.seed=1", "--set=train.eval_batch=8", "--out", "here", "--fresh", "--json"]
    changes = ["--allow-change", "train.seed", "--allow-change", "data"]
    result = invoke("digits", "-n", "2", "name=b", *options, *changes, "--", "--max-restarts=3", "--role", "scientist")

    assert result.exit_code == ExitCode.PREEMPTED  # the exit code of the run
    ((command, nproc),) = launcher.started
    assert nproc == 2
    torchrun, ranks = command[: command.index("run")], command[command.index("run") + 1 :]
    assert torchrun[torchrun.index("--max-restarts=3") :] == [
        *("--max-restarts=3", "--role", "scientist"),
        *("--no-python", sys.executable, "-P", "-u", "-m", "ddpforge"),
    ]
    assert ranks == [
        *("digits", "--set=train.seed=1", "--set=train.eval_batch=8", "--set=name=b"),
        *("--allow-change=train.seed", "--allow-change=data", "--out=here", "--fresh", "--json"),
    ]


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (4, 4)])
def test_launch_starts_one_process_per_gpu_or_one_without_gpus(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch, gpus: int, expected: int
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    invoke("digits")
    assert [nproc for _, nproc in launcher.started] == [expected]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["nowhere.toml"], "no such recipe: `nowhere.toml`"),
        (["digits", "--set", "train.lenght=1ep"], "unknown key `lenght` in [train]"),
        (["digits", "--nproc", "3"], "cannot be divided evenly among 3 ranks"),
        (["digits", "--nproc", "0"], "expected 1 to 1024, not 0"),
        (["digits", "--nproc", "1000000"], "expected 1 to 1024, not 1000000"),
        (["digits", "cnn"], "Got unexpected extra argument (cnn)"),
    ],
)
def test_a_usage_error_is_printed_once_and_nothing_is_started(
    launcher: Launcher, arguments: list[str], complaint: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert complaint in result.stderr
    assert result.stdout == ""
    assert not launcher.started
    assert not list(Path().iterdir())


def test_json_also_reports_a_usage_error() -> None:
    said = json.loads(invoke("digits", "--json", "--nproc", "3").stdout)
    assert (said["state"], said["exit_code"]) == ("failed", ExitCode.USAGE)
    assert "cannot be divided evenly among 3 ranks" in said["error"]


def test_launch_passes_the_profiled_steps_to_the_ranks(launcher: Launcher) -> None:
    invoke("digits", "--profile", "20..25,all")
    ((command, _),) = launcher.started
    assert command[-1] == "--profile=20..25,all"
    assert "the window of the profile, 25..20, has no steps" in invoke("digits", "--profile", "25..20").stderr
    assert len(launcher.started) == 1


# ---------------------------------------------------------------------------------------------- after the end
@pytest.fixture
def folder() -> RunFolder:
    """Makes the folder of a failed run whose rank 0 reported only that rank 1 ended."""
    folder = RunFolder(Path("runs/digits"))
    folder.create(text="", resolved="", local_files={})
    status = {
        **{"state": "failed", "exit_code": 1, "step": 7, "samples": 9, "world_size": 2, "strategy": "ddp"},
        **{"metrics": {"train/loss": 1.0}, "error": "rank 1: process 4711 on node ended without a report"},
    }
    folder.write_status(status)  # type: ignore[arg-type]
    return folder


def status(folder: RunFolder) -> Any:
    found: Status | None = folder.status()
    return found


KILLED = LaunchExit(1, RankDeath(1, 9), frozenset({0}))


def test_the_error_names_a_killed_rank_and_the_signal(launcher: Launcher, folder: RunFolder) -> None:
    launcher.ended = KILLED
    result = invoke("digits", "--nproc", "2")
    assert result.exit_code == 1
    assert "error: rank 1 was ended by signal 9 (SIGKILL)" in result.stderr
    assert "out of memory" in result.stderr
    assert status(folder)["error"] == "rank 1 was ended by signal 9 (SIGKILL)"
    assert (status(folder)["step"], status(folder)["metrics"]) == (7, {"train/loss": 1.0})


def test_a_failure_report_of_the_rank_overrides_the_signal_seen_by_the_launcher(
    launcher: Launcher, folder: RunFolder
) -> None:
    report = {"token": "x", "rank": 1, "error": "KeyError: 'x'", "exit_code": 1, "symptom": False}
    (folder.logs / "failure-rank-1.json").write_text(json.dumps(report))
    launcher.ended = KILLED
    before = status(folder)
    assert "SIGKILL" not in invoke("digits", "--nproc", "2").stderr
    assert status(folder) == before


@pytest.mark.parametrize("spoke", [True, False])
def test_the_launcher_prints_json_only_if_rank_0_did_not(launcher: Launcher, folder: RunFolder, spoke: bool) -> None:
    launcher.ended = LaunchExit(1, RankDeath(0, 11), frozenset({0, 1} if spoke else {1}))
    said = invoke("digits", "--nproc", "2", "--json").stdout
    assert status(folder)["error"] == "rank 0 was ended by signal 11 (SIGSEGV)"
    assert said == ("" if spoke else json.dumps(status(folder)) + "\n")


# ---------------------------------------------------------------------------------------------- several machines
NODES = ["--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", "node01"]


def test_options_for_nodes_and_restarts_become_flags_of_torchrun(
    launcher: Launcher, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ddpforge.launchers.nodes.local_address", lambda *_, **__: "10.0.0.7")
    assert invoke("digits", "-n", "2", *NODES, "--rdzv-id", "x", "--max-restarts", "3").exit_code == ExitCode.PREEMPTED
    ((command, _),) = launcher.started
    assert command[5 : command.index("--no-python")] == [
        *("--nproc-per-node=2", "--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=node01:29500", "--rdzv-id=x"),
        *("--rdzv-conf=is_host=0,keep_alive_interval=5,keep_alive_max_attempt=9", "--local-addr=10.0.0.7"),
        "--max-restarts=3",
    ]
    assert launcher.nodes == {"DDPFORGE_NODES": "2", "DDPFORGE_ENDPOINT": "node01:29500"}
    assert launcher.patience == 615.0  # leaves time for the rendezvous after a restart
    invoke("digits", "-n", "2", *NODES)
    assert launcher.patience == 15.0
    (run_id,) = [word for word in launcher.started[1][0] if word.startswith("--rdzv-id=digits-")]
    assert run_id


def test_options_default_to_the_environment_of_torchrun(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddpforge.launchers.local.reject_held_ports", lambda endpoint: None)
    for name, value in {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "a", "NPROC_PER_NODE": "2"}.items():
        monkeypatch.setenv(f"PET_{name}", value)
    invoke("digits", "-n", "4", "--rdzv-endpoint", "b:7")
    ((command, nproc),) = launcher.started
    assert nproc == 4
    assert {"--nnodes=2", "--rdzv-endpoint=b:7"} <= set(command)
    assert any(word.startswith("--rdzv-conf=is_host=1,") for word in command)
    assert launcher.nodes == {"DDPFORGE_NODES": "2"}


def test_an_endpoint_with_a_port_in_use_is_refused_before_ranks_start(launcher: Launcher) -> None:
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
        result = invoke("digits", "--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", f"127.0.0.1:{port}")
    assert result.exit_code == ExitCode.ENVIRONMENT
    assert f"cannot listen on port {port} of {socket.gethostname()}: Address already in use" in result.stderr
    assert launcher.started == []


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nnodes", "2"], "2 nodes need an endpoint"),
        (
            ["--nnodes", "1:5", "--node-rank", "0", "--rdzv-endpoint", "a", "-n", "1"],
            "cannot be divided evenly among 3 ranks",
        ),
        ([*NODES, "-n", "3"], "cannot be divided evenly among 6 ranks"),
        ([*NODES, "--", "--nnodes=2"], "--nnodes and torchrun's flags both set a rendezvous"),
        (
            ["--nnodes", "1:2", "--node-rank", "0", "--rdzv-endpoint", "a", "-n", "1", "--fresh"],
            "would start from scratch",
        ),
        (["--max-time", "5ep"], "the maximum time 5ep is not a time with a unit"),
    ],
)
def test_invalid_options_for_several_nodes_are_refused(
    launcher: Launcher, arguments: list[str], complaint: str
) -> None:
    result = invoke("digits", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert complaint in result.stderr
    assert not launcher.started


def test_a_dry_run_does_not_change_the_status_of_the_run(launcher: Launcher, folder: RunFolder) -> None:
    """Holds also if a rank was killed, which otherwise sets the status to failed."""
    before = folder.status()
    launcher.ended = KILLED
    result = invoke("digits", "--nproc", "2", "--dry-run", "3")
    ((command, _),) = launcher.started
    assert command[-1] == "--dry-run=3"
    assert "rank 1 was ended by signal 9" in result.stderr
    assert folder.status() == before


def test_dry_run_prints_a_command_that_a_shell_can_run(launcher: Launcher, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    result = invoke("digits", "-n", "2", *NODES, "--max-time", "4h", "--out", "a b", "--dry-run")
    words = shlex.split(result.stdout)
    assert {"OMP_NUM_THREADS=3", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"} <= set(words)
    assert words[-5:] == ["ddpforge", "run", "digits", "--out=a b", "--max-time=4h"]
    assert not launcher.started


def test_a_usage_error_of_the_ranks_after_a_restart_sets_the_status_to_failed(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks stop to restart with one more node; then their number does not divide the batch."""
    told = LaunchExit(2, reported=True, error="RecipeError: cannot be divided evenly among 3 ranks")

    def start(*_: Any, **__: Any) -> LaunchExit:
        folder.write_status({**status(folder), "state": "preempted", "exit_code": 75, "step": 8})
        return told

    monkeypatch.setattr("ddpforge.launchers.process.start", start)
    assert invoke("digits", "--nproc", "2").exit_code == 2
    found = status(folder)
    assert (found["state"], found["exit_code"], found["step"], found["error"]) == ("failed", 2, 8, told.error)


def test_the_division_of_the_batch_is_not_checked_with_nnodes_of_torchrun(launcher: Launcher) -> None:
    assert invoke("digits", "--nproc", "3", "--", "--nnodes=64").exit_code == ExitCode.PREEMPTED
    assert launcher.nodes == {"DDPFORGE_NODES": "64"}  # fewer are refused
    assert len(launcher.started) == 1
