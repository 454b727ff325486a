"""Launchers: `accelerate launch`, torchrun and `ddpforge launch` train with the world size that the run reports."""

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from shutil import copy
from typing import Any

import psutil
import pytest
from support import SUPPORT
from support.launched import Zygote

from ddpforge.errors import ExitCode
from ddpforge.launchers.exit_record import ExitRecords, LaunchExit, RankDeath
from ddpforge.launchers.process import launch
from ddpforge.launchers.process import start as begin
from ddpforge.launchers.torchrun import torchrun_command
from ddpforge.testing.ranks import reserved_port

REPOSITORY = Path(__file__).parents[2]
RECIPE = """
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "train" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "3st", global_batch = 8 }
track.every = "1st"
"""
NOT_A_NUMBER = """
recipe = 2
name = "tiny"
model = { use = "./parts.py:Scalars" }
data.train = { use = "./parts.py:Values", values = [1.0, 1.0, 1.0, 1.0], nan = 3 }
task = { use = "./parts.py:SumOfLosses" }
optimizer = { use = "sgd", lr = 1.0 }
train = { length = "1ep", global_batch = 2 }
"""
FSDP = 'strategy.use="fsdp"'
FOREVER = "--set=train.length=100000ep"
STEP = re.compile(r"step (\d+)/")  # rank 0's progress line on stderr

Start = Callable[..., subprocess.CompletedProcess[str]]


# ---------------------------------------------------------------------------------------------- real launchers
@pytest.fixture
def environment(tmp_path: Path) -> Iterator[dict[str, str]]:
    """Yields a shell's environment without a configuration of Accelerate, with this installation first on the PATH."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    with reserved_port() as port:
        yield os.environ | {
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_HOME": str(tmp_path / "huggingface"),
            "PET_MASTER_PORT": str(port),  # torchrun's --master-port
            "OMP_NUM_THREADS": "1",
        }


@pytest.fixture
def start(tmp_path: Path, environment: dict[str, str]) -> Start:
    """Returns a function that runs a command to its end, by default in the test's folder, which has a recipe."""

    def run(command: str, cwd: Path = tmp_path) -> subprocess.CompletedProcess[str]:
        return subprocess.run(command.split(), cwd=cwd, env=environment, capture_output=True, text=True, timeout=300)

    return run


@pytest.fixture
def popen(tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Yields a function that starts a command in its own process group, as a shell does, and waits for 3 steps."""
    started: list[subprocess.Popen[str]] = []

    def begin(command: str) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            command.split(),
            cwd=tmp_path,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        started.append(process)
        assert process.stderr
        assert any(int(found[1]) >= 3 for line in process.stderr if (found := STEP.search(line)))
        return process

    yield begin
    for process in started:
        process.kill()
        process.communicate()


def status(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "status.json").read_text())
    return found


def losses(folder: Path) -> list[float]:
    rows = (json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines())
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.fixture(scope="module")
def curve(zygote: Zygote, tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """Returns the losses of the tiny recipe."""
    folder = tmp_path_factory.mktemp("curve")
    (folder / "tiny.toml").write_text(RECIPE)
    zygote.run(["run", "tiny.toml"], nproc=1, cwd=folder).check()
    return losses(folder / "runs/tiny")


SEVERAL = {1: "", 2: "--multi_gpu --num_processes 2 --main_process_port 0"}
ACCELERATE = "accelerate launch {several} -m ddpforge run tiny.toml"
TORCHRUN = "torchrun --nproc-per-node {nproc} -m ddpforge run tiny.toml"
LAUNCH = "ddpforge launch tiny.toml --nproc {nproc}"

slow, full = (pytest.mark.slow,), (pytest.mark.full,)


@pytest.mark.parametrize(
    ("form", "nproc"),
    [
        pytest.param(ACCELERATE, 1, marks=full),
        pytest.param(ACCELERATE, 2, marks=full),
        pytest.param(TORCHRUN, 1, marks=full),
        pytest.param(TORCHRUN, 2, marks=full),
        pytest.param(LAUNCH, 1, marks=full),
        pytest.param(LAUNCH, 2, marks=full),
    ],
)
def test_every_launcher_trains_the_same_curve(
    tmp_path: Path, start: Start, curve: list[float], form: str, nproc: int
) -> None:
    """All cases run in `make test-all` only. The tests below start processes of each launcher, and
    `tests/support/launched.py` starts ranks with the environment of torchrun.
    """
    ended = start(f"{form.format(nproc=nproc, several=SEVERAL[nproc])} --json")

    assert ended.returncode == 0, ended.stderr
    found = status(tmp_path / "runs/tiny")
    assert (found["state"], found["step"], found["world_size"]) == ("done", 3, nproc)
    assert losses(tmp_path / "runs/tiny") == pytest.approx(curve, rel=1e-5)
    assert json.loads(ended.stdout) == found  # one object, from one rank


@pytest.mark.parametrize(
    ("form", "strategy"),
    [
        pytest.param(ACCELERATE, "fsdp", marks=full),
        pytest.param(TORCHRUN, "deepspeed", marks=full),
        pytest.param(LAUNCH, "fsdp", marks=full),
        pytest.param(LAUNCH, "deepspeed", marks=full),
        pytest.param(
            "accelerate launch --use_deepspeed --zero_stage 2 {processes} -m ddpforge run tiny.toml",
            "deepspeed",
            marks=full,
        ),
    ],
)
def test_every_launcher_starts_every_strategy(
    tmp_path: Path, start: Start, curve: list[float], form: str, strategy: str
) -> None:
    """Trap 05: the configured strategy runs. Without GPUs, Accelerate itself would train with DDP, or not at all.

    All cases run in `make test-all` only. The tests of the end of `ddpforge launch` use the strategies too, a test
    below starts two processes of Accelerate, and tests with forked ranks cover its variables for DeepSpeed.
    """
    processes = SEVERAL[2].removeprefix("--multi_gpu ")
    command = form.format(several=SEVERAL[2], processes=processes, nproc=2)
    ended = start(f'{command} --set strategy.use="{strategy}" --json')
    assert ended.returncode == 0, ended.stderr
    found = status(tmp_path / "runs/tiny")
    assert json.loads(ended.stdout.splitlines()[-1]) == found  # DeepSpeed prints in the launcher first
    assert (found["state"], found["strategy"], found["world_size"]) == ("done", strategy, 2)
    assert losses(tmp_path / "runs/tiny") == pytest.approx(curve, rel=1e-5)


@pytest.mark.slow
def test_launch_restarts_ranks_by_the_same_command_line_and_ends_with_the_exit_code_and_error_of_the_run(
    tmp_path: Path, start: Start
) -> None:
    """Attempt 0 fails before step 1, and attempt 1 diverges: one launch, because each starts five processes."""
    copy(SUPPORT / "parts.py", tmp_path)
    (tmp_path / "words.py").write_text("""
import os, pathlib
from ddpforge.interfaces import Callback

class Words(Callback):
    def on_start(self, run):
        attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
        words = pathlib.Path("/proc/self/cmdline").read_bytes().decode().split("\\0")
        pathlib.Path(f"rank-{os.environ['RANK']}-{attempt}").write_text(" ".join(words[words.index("-m") :]))
        if attempt == "0":
            raise RuntimeError("once")
""")
    (tmp_path / "tiny.toml").write_text(NOT_A_NUMBER + '[callbacks.words]\nuse = "./words.py:Words"\n')
    ended = start(f"ddpforge launch tiny.toml --nproc 2 --max-restarts 1 --set {FSDP} -- --role=scientist")
    assert ended.returncode == ExitCode.DIVERGED, ended.stderr
    found = {path.name: path.read_text() for path in tmp_path.glob("rank-*")}
    assert set(found) == {f"rank-{rank}-{attempt}" for rank in (0, 1) for attempt in (0, 1)}
    assert all(words.startswith("-m ddpforge run tiny.toml") for words in found.values())
    ended_as = status(tmp_path / "runs/tiny")
    assert (ended_as["exit_code"], ended_as["strategy"], ended_as["world_size"]) == (ExitCode.DIVERGED, "fsdp", 2)
    assert "is not finite" in ended.stderr
    environment = json.loads((tmp_path / "runs/tiny/env.json").read_text())["environment"]
    assert environment["ROLE_NAME"] == "scientist"  # arguments after `--` go to torchrun


@pytest.mark.parametrize("nproc", [pytest.param(1, marks=full), pytest.param(2, marks=slow)])
def test_accelerate_can_launch_ddpforge_from_the_repository(tmp_path: Path, start: Start, nproc: int) -> None:
    """`accelerate launch ddpforge` treats the name as a script and runs the package's folder."""
    sets = "--set train.length=3st --set schedule.warmup=1st --set track.every=1st"
    command = f"accelerate launch {SEVERAL[nproc]} ddpforge run recipes/digits.toml --out {tmp_path} {sets}"
    ended = start(command, cwd=REPOSITORY)

    assert ended.returncode == 0, ended.stderr
    found = status(tmp_path / "digits")
    assert (found["state"], found["step"], found["world_size"]) == ("done", 3, nproc)
    assert losses(tmp_path / "digits")[-1] < losses(tmp_path / "digits")[0]


# ---------------------------------------------------------------------------------------------- too few processes
TWO = "compute_environment: LOCAL_MACHINE\ndistributed_type: 'NO'\nnum_processes: 2\nuse_cpu: true\n"
DEFAULT = "huggingface/accelerate/default_config.yaml"


@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        "--cpu --num_processes 2",
        "--num-processes=2",
        "--config_file two.yaml",
        "with its default configuration",
    ],
)
def test_accelerate_that_starts_one_process_instead_of_two_is_rejected(
    tmp_path: Path, environment: dict[str, str], start: Start, flags: str
) -> None:
    """Trap 05b: without GPUs, Accelerate starts one process and prints no warning."""
    (tmp_path / "two.yaml").write_text(TWO)
    if not flags.startswith("--"):
        flags = ""
        (tmp_path / DEFAULT).parent.mkdir(parents=True)
        (tmp_path / DEFAULT).write_text(TWO)

    ended = start(f"accelerate launch {flags} -m ddpforge run tiny.toml")
    assert ended.returncode != 0
    assert "should start 2 processes but started 1" in ended.stderr
    assert "ddpforge launch RECIPE --nproc 2" in ended.stderr
    assert "torchrun --nproc-per-node 2 -m ddpforge run RECIPE" in ended.stderr
    assert "accelerate launch --multi_gpu --num_processes 2 -m ddpforge run RECIPE" in ended.stderr
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "configured", "world_size", "expected"),
    [
        ("python accelerate launch --cpu --num_processes 2 -m ddpforge run", False, None, 2),
        ("python accelerate launch --num-processes=3 -m ddpforge run", True, None, 3),
        ("python accelerate launch --num_processes 1 -m ddpforge run", True, None, 1),
        ("python accelerate launch --config_file two.yaml -m ddpforge run", False, None, 2),
        ("python accelerate launch --config-file=two.yaml --cpu -m ddpforge run", False, None, 2),
        ("python accelerate launch -m ddpforge run", True, None, 2),
        ("python accelerate launch --cpu -m ddpforge run", True, None, 1),  # with --cpu it ignores its configuration
        ("python accelerate launch -m ddpforge run", False, None, 1),
        (
            "python accelerate launch --num_processes 2 -m ddpforge run",
            True,
            "2",
            1,
        ),  # the launcher started two processes
        ("bash -c experiment --num_processes 2", True, None, 1),
        ("", True, None, 1),  # the parent process has ended
    ],
)
def test_requested_number_of_processes_is_read_from_the_command_line_of_accelerate(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    configured: bool,
    world_size: str | None,
    expected: int,
) -> None:
    """Checks the same numbers as the test above, without a start of `accelerate launch`."""
    from ddpforge.ranks import join

    class Process:
        def parent(self) -> "Process | None":
            return self if words else None

        def cmdline(self) -> list[str]:
            return words.split()

    monkeypatch.chdir(tmp_path)
    for file in ("two.yaml", DEFAULT):
        if configured or file != DEFAULT:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).write_text(TWO)
    monkeypatch.setattr(join.psutil, "Process", Process)
    monkeypatch.setattr(join, "default_config_file", str(tmp_path / DEFAULT))
    monkeypatch.setattr("accelerate.commands.config.config_args.default_config_file", str(tmp_path / DEFAULT))
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    if world_size:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    assert join.processes_asked_for() == expected


def test_without_accelerate_one_process_is_requested(monkeypatch: pytest.MonkeyPatch) -> None:
    from ddpforge.ranks import join

    monkeypatch.setattr(join.psutil, "Process", None)  # must not be called
    monkeypatch.delenv("ACCELERATE_MIXED_PRECISION", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert join.processes_asked_for() == 1


# ---------------------------------------------------------------------------------------------- end of a launch
@pytest.mark.full  # under DeepSpeed, whose import takes seconds in each process; the launch that restarts has FSDP
def test_launch_ends_with_the_exit_code_and_error_message_of_the_run(tmp_path: Path, start: Start) -> None:
    copy(SUPPORT / "parts.py", tmp_path)
    (tmp_path / "tiny.toml").write_text(NOT_A_NUMBER)
    ended = start('ddpforge launch tiny.toml --nproc 2 --set strategy.use="deepspeed" -- --role=scientist')

    assert ended.returncode == ExitCode.DIVERGED
    found = status(tmp_path / "runs/tiny")
    assert (found["exit_code"], found["strategy"], found["world_size"]) == (ExitCode.DIVERGED, "deepspeed", 2)
    assert "is not finite" in ended.stderr
    assert "Traceback" not in ended.stderr
    environment = json.loads((tmp_path / "runs/tiny/env.json").read_text())["environment"]
    assert environment["ROLE_NAME"] == "scientist"  # arguments after `--` go to torchrun


def stopped(folder: Path, process: subprocess.Popen[str], curve: list[float]) -> dict[str, Any]:
    """Checks that a run stopped on request, with the expected losses, and returns its status."""
    told, said = process.communicate(timeout=300)
    assert process.returncode == ExitCode.PREEMPTED, said
    assert "Traceback" not in said
    found = status(folder)
    assert (found["state"], found["exit_code"]) == ("preempted", 75)
    assert json.loads(told) == found  # one object, from one rank
    assert losses(folder)[:3] == pytest.approx(curve, rel=1e-5)
    assert f"step-{found['step']:09}" in max((folder / "checkpoints").glob("step-*")).name
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("asked", "strategy"), [(signal.SIGTERM, "ddp"), pytest.param(signal.SIGINT, "fsdp", marks=full)]
)
def test_launch_passes_a_stop_request_on_to_the_ranks(
    tmp_path: Path,
    popen: Callable[[str], subprocess.Popen[str]],
    curve: list[float],
    asked: signal.Signals,
    strategy: str,
) -> None:
    """Schedulers send SIGTERM to the process that they started. Ctrl-C signals the terminal's whole process group."""
    process = popen(f'ddpforge launch tiny.toml --nproc 2 --set=strategy.use="{strategy}" --json {FOREVER}')
    if asked == signal.SIGINT:
        os.killpg(process.pid, asked)
    else:
        process.send_signal(asked)

    found = stopped(tmp_path / "runs/tiny", process, curve)
    assert (found["strategy"], found["world_size"]) == (strategy, 2)


@pytest.mark.slow
def test_data_workers_ignore_a_stop_signal_to_the_process_group(
    tmp_path: Path, popen: Callable[[str], subprocess.Popen[str]], curve: list[float]
) -> None:
    """torchrun and Slurm signal every process of a rank, including its data workers."""
    process = popen(f"ddpforge run tiny.toml --set=data.workers=1 --json {FOREVER}")
    os.killpg(process.pid, signal.SIGTERM)
    assert stopped(tmp_path / "runs/tiny", process, curve)["world_size"] == 1


@pytest.mark.parametrize(
    ("command", "killed"),
    [
        pytest.param("ddpforge launch tiny.toml --nproc 2", "all", marks=pytest.mark.slow),
        pytest.param("ddpforge launch tiny.toml --nproc 2", "first", marks=full),
        pytest.param("ddpforge launch tiny.toml --nproc 2", "second", marks=full),
        pytest.param("torchrun --nproc-per-node 2 -m ddpforge run tiny.toml", "first", marks=full),
    ],
)
def test_ranks_stop_with_a_checkpoint_when_their_launcher_is_killed(
    tmp_path: Path, popen: Callable[[str], subprocess.Popen[str]], curve: list[float], command: str, killed: str
) -> None:
    """Kills `ddpforge launch` (first), its torchrun (second), or both."""
    first = psutil.Process(popen(f"{command} {FOREVER}").pid)
    below = first.children(recursive=True)
    for process in [first, *first.children()][{"all": slice(2), "first": slice(1), "second": slice(1, 2)}[killed]]:
        process.kill()
    left = psutil.wait_procs([first, *below], timeout=60)[1]
    assert left == []
    found = status(tmp_path / "runs/tiny")
    assert (found["state"], found["exit_code"]) == ("preempted", ExitCode.PREEMPTED)
    assert losses(tmp_path / "runs/tiny")[:3] == pytest.approx(curve, rel=1e-5)


# ---------------------------------------------------------------------------------------------- launch() alone
def pretend(script: str) -> list[str]:
    """Returns the command of a fake launcher that runs `script`; `verdict(*codes)` writes exit records of its ranks."""
    prelude = """
import os, signal, sys
from ddpforge.launchers.exit_record import record_death, record_halt, record_start, record_exit
def verdict(*codes):
    for rank, code in enumerate(codes):
        os.environ["RANK"] = str(rank)
        record_exit(code)
"""
    return [sys.executable, "-c", prelude + script]


@pytest.mark.parametrize(
    ("codes", "ends_with", "expected"),
    [
        ([0, 0], 0, 0),
        ([0, 0], 1, 0),  # the launcher fails after all ranks have finished
        ([1, 1, 0, 0], 0, 0),  # torchrun has started the ranks a second time
        ([4, 4], 1, 4),
        ([0, 3], 1, 3),
        ([75, 75], 1, 75),
        ([0], 1, 1),  # one rank was killed and left no exit record
        ([], 1, 1),
    ],
)
def test_launch_returns_the_exit_code_that_the_ranks_recorded(
    codes: Sequence[int], ends_with: int, expected: int
) -> None:
    assert launch(pretend(f"verdict(*{codes}); sys.exit({ends_with})"), nproc=2) == expected


def test_only_exit_records_of_the_last_attempt_count(tmp_path: Path) -> None:
    """Failures of the first attempt do not decide the exit code of ranks that continued from the checkpoint."""
    first = "record_start(); record_start(); record_death(1, signal.SIGKILL); record_exit(1); "
    assert launch(pretend(f"{first}record_start(); record_start(); verdict(75, 75); sys.exit(1)"), nproc=2) == 75
    ended = begin(pretend(f"{first}record_start(); record_start(); verdict(3, 3); sys.exit(1)"), nproc=2)
    assert (ended.code, ended.death) == (3, None)


def test_incomplete_exit_record_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "verdict").write_text('{"rank": 0, "pid": 4}\n{"rank": 0, "co')
    assert ExitRecords(tmp_path / "verdict", 1).pids == [4]


def test_launcher_that_outlives_its_ranks_is_killed() -> None:
    """torchrun outlives its ranks for minutes if the node with its store is gone."""
    script = """
import subprocess
dead = subprocess.Popen(["true"])
dead.wait()
os.getpid = lambda: dead.pid
record_start(); record_exit(1)
signal.pause()
"""
    assert begin(pretend(script), nproc=1, patience=0.0).code == 1


@pytest.mark.parametrize("alive", [False, True])
def test_launcher_that_waits_for_a_lost_node_is_killed_when_all_ranks_are_done(
    monkeypatch: pytest.MonkeyPatch, alive: bool
) -> None:
    """torchrun waits five minutes for other launchers; a live rank on another node sends a heartbeat each second."""
    monkeypatch.setattr("ddpforge.launchers.process._PARTING", 0.2)
    shows = """
import json, socket, threading, time
host, port = os.environ["DDPFORGE_STORE"].split(":")
line = socket.create_connection((host, int(port))).makefile("rw")
def show():
    line.write(json.dumps({"attempt": "a", "row": {"rank": 1}}) + "\\n")
    line.flush()
    line.readline()
show()
"""
    waits = """
for _ in range(30):
    show()
    time.sleep(0.1)
record_death(0, 9); sys.exit(0)
"""
    script = f"""
import subprocess
{shows}
dead = subprocess.Popen(["true"])
dead.wait()
os.getpid = lambda: dead.pid
record_start(); record_exit(0)
{waits if alive else "signal.pause()"}
"""
    codes: list[int] = []
    conclude = ExitRecords.conclude
    monkeypatch.setattr(
        ExitRecords, "conclude", lambda self, code, asked: (codes.append(code), conclude(self, code, asked))[1]
    )
    assert begin(pretend(script), nproc=1, patience=1e9).code == 0
    assert codes == ([0] if alive else [-signal.SIGKILL])


def test_launcher_that_has_not_reaped_its_ranks_is_killed_sooner(monkeypatch: pytest.MonkeyPatch) -> None:
    """torchrun does not notice the end of its ranks while it waits for a store that the network no longer reaches."""
    monkeypatch.setattr("ddpforge.launchers.process._BLIND", 0.0)
    script = """
import subprocess
dead = subprocess.Popen(["true"])
os.getpid = lambda: dead.pid
record_start(); record_exit(1)
signal.pause()
"""
    assert begin(pretend(script), nproc=1, patience=1e9).code == 1


def test_launch_waits_for_ranks_that_are_still_saving() -> None:
    """Signals to all processes may have ended their launcher already."""
    rank = """
import os, sys, time
from ddpforge.launchers.exit_record import record_start, record_exit
record_start(); print(flush=True); sys.stdin.read(); record_exit(75)
"""
    script = f"""
import subprocess
rank = subprocess.Popen([sys.executable, "-c", {rank!r}], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
rank.stdout.readline()
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(pretend(script), nproc=1) == ExitCode.PREEMPTED


def test_launch_waits_for_the_watchdog_agent_of_a_dead_rank() -> None:
    """Ends the launcher at once, while the agent still needs a moment to record the death."""
    watch = """
import sys
from ddpforge.launchers.exit_record import record_exit
sys.stdin.read(); record_exit(3)
"""
    script = f"""
import subprocess
from ddpforge.launchers.exit_record import record_watch
watch = subprocess.Popen([sys.executable, "-c", {watch!r}], stdin=subprocess.PIPE)
record_watch(watch.pid)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert launch(pretend(script), nproc=1) == 3


def test_exit_code_of_a_killed_launcher_is_128_plus_the_signal() -> None:
    assert launch(pretend("os.kill(os.getpid(), signal.SIGKILL)"), nproc=1) == 128 + signal.SIGKILL


def test_launch_exit_names_the_rank_killed_by_a_signal_and_the_ranks_that_reported() -> None:
    script = "record_death(1, signal.SIGKILL); verdict(1); sys.exit(1)"
    ended = begin(pretend(script), nproc=2)
    assert ended == LaunchExit(1, RankDeath(1, signal.SIGKILL), frozenset({0}), reported=True)
    assert str(ended.death) == "ended by signal 9 (SIGKILL)"
    assert str(RankDeath(1, 99)) == "ended by signal 99"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP])
def test_every_stop_signal_reaches_the_launcher_as_one_sigterm(number: signal.Signals) -> None:
    """torchrun passes SIGTERM on to its ranks, but SIGUSR1 kills it and its ranks remain."""
    script = """
signal.signal(signal.SIGTERM, lambda *_: (verdict(75), sys.exit(1)))
os.kill(os.getppid(), int(sys.argv[1]))
signal.pause()
"""
    assert launch([*pretend(script), str(int(number))], nproc=1) == ExitCode.PREEMPTED


@pytest.mark.parametrize(
    ("asked", "began", "expected"),
    [
        ("SIGTERM", False, ExitCode.PREEMPTED),  # no work is lost: a scheduler may start the job again
        ("SIGINT", False, 128 + signal.SIGINT),
        ("SIGTERM", True, 128 + signal.SIGTERM),
    ],
)
def test_exit_code_of_a_stop_before_training_begins(asked: str, began: bool, expected: int) -> None:
    script = f"os.kill(os.getppid(), signal.{asked}); signal.pause()"
    assert launch(pretend("record_start();" * began + script), nproc=1) == expected


def test_signals_are_blocked_until_the_launcher_has_its_handlers() -> None:
    """Schedulers send SIGUSR1 to every process, also to one that is still starting."""
    script = """
assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) >= {signal.SIGUSR1, signal.SIGHUP}
os.kill(os.getpid(), signal.SIGUSR1)
from ddpforge.launchers.torchrun import _listen_to_the_launch_alone
_listen_to_the_launch_alone()
assert not signal.pthread_sigmask(signal.SIG_BLOCK, ())
verdict(0)
"""
    assert launch(pretend(script), nproc=1) == 0


def test_a_second_ctrl_c_kills_the_launcher_and_its_descendants(tmp_path: Path) -> None:
    """Includes ranks in their own process groups, as with torchrun: the pipe that a rank holds is closed at the end."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    script = """
import subprocess
rank = "import signal, sys; pipe = open(sys.argv[1], 'w'); print('here', flush=True); signal.pause()"
rank = subprocess.Popen([sys.executable, "-c", rank, sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
rank.stdout.readline()
signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getppid(), signal.SIGINT))
os.kill(os.getppid(), signal.SIGINT)
while True:
    signal.pause()
"""
    assert launch([*pretend(script), str(pipe)], nproc=1) == ExitCode.INTERRUPTED
    os.set_blocking(reading, True)
    assert os.read(reading, 1) == b""
    os.close(reading)


def test_signal_handlers_are_restored_after_a_launch() -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    launch(pretend(""), nproc=1)
    after = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)]
    assert after == before


@pytest.fixture
def _nohup() -> Iterator[None]:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.mark.usefixtures("_nohup")
def test_launch_under_nohup_ignores_sighup() -> None:
    """SIGHUP is ignored, so SIGUSR1 is the first stop request."""
    script = "os.kill(os.getppid(), signal.SIGHUP); os.kill(os.getppid(), signal.SIGUSR1); signal.pause()"
    assert launch(pretend(script), nproc=1) == ExitCode.PREEMPTED
    assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


GRACE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"


@pytest.mark.parametrize(
    ("shell", "asked", "expected"), [({}, {}, "600"), ({GRACE: "5"}, {}, "5"), ({GRACE: "5"}, {GRACE: "7"}, "7")]
)
def test_ranks_have_ten_minutes_to_save_unless_the_environment_sets_another_timeout(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shell: dict[str, str], asked: dict[str, str], expected: str
) -> None:
    """torchrun's own default: it kills ranks 30 seconds after it has stopped them."""
    monkeypatch.delenv(GRACE, raising=False)
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    with (tmp_path / "said").open("wb") as output:
        assert launch(pretend(f"print(os.environ[{GRACE!r}])"), nproc=1, output=output, variables=asked) == 0
    assert (tmp_path / "said").read_text() == f"{expected}\n"


# ---------------------------------------------------------------------------------------------- command lines
def test_torchrun_runs_standalone_unless_a_flag_sets_the_rendezvous() -> None:
    alone = torchrun_command(["r.toml"], nproc=2)
    assert alone[1:] == [
        *("-P", "-u", "-m", "ddpforge.launchers.torchrun", "--standalone", "--local-addr=127.0.0.1"),
        "--nproc-per-node=2",
        *("--no-python", sys.executable, "-P", "-u", "-m", "ddpforge", "run", "r.toml"),
    ]
    for flag in ("--nnodes=2", "--rdzv-endpoint=a:1", "--master-port=1"):
        command = torchrun_command(["r.toml"], nproc=2, flags=[flag])
        assert flag in command
        assert "--standalone" not in command
