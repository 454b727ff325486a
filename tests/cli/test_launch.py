"""`ddpforge launch`: what it starts, and when it starts nothing. `tests/test_launch.py` really starts processes."""

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.errors import ExitCode


class Launcher:
    """Stands in for `ddpforge.launch.launch`; every run that it starts is stopped."""

    def __init__(self) -> None:
        self.started: list[tuple[list[str], int]] = []

    def __call__(self, command: list[str], *, nproc: int) -> int:
        self.started.append((command, nproc))
        return ExitCode.STOPPED


@pytest.fixture(autouse=True)
def launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Launcher:
    launcher = Launcher()
    monkeypatch.setattr("ddpforge.launch.launch", launcher)
    monkeypatch.chdir(tmp_path)
    return launcher


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["launch", *arguments])


def test_what_the_ranks_are_told_is_what_launch_was_told(launcher: Launcher) -> None:
    options = ["-s", "train.seed=1", "--set=train.eval_batch=8", "--out", "here", "--fresh", "--json"]
    changes = ["--allow-change", "train.seed", "--allow-change", "data"]
    result = invoke("digits", "-n", "2", *options, *changes, "--", "--max-restarts=3", "--role", "scientist")

    assert result.exit_code == ExitCode.STOPPED  # the exit code of the run
    ((command, nproc),) = launcher.started
    assert nproc == 2
    torchrun, ranks = command[: command.index("run")], command[command.index("run") + 1 :]
    assert torchrun[-5:] == ["--max-restarts=3", "--role", "scientist", "-m", "ddpforge"]
    assert ranks == [
        *("digits", "--set=train.seed=1", "--set=train.eval_batch=8"),
        *("--allow-change=train.seed", "--allow-change=data", "--out=here", "--fresh", "--json"),
    ]


@pytest.mark.parametrize(("gpus", "expected"), [(0, 1), (4, 4)])
def test_there_is_one_process_per_gpu_or_one(
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
        (["digits", "--nproc", "3"], "cannot be dealt out evenly to 3 ranks"),
        (["digits", "--nproc", "0"], "0 is not in the range"),
        (["digits", "--nproc", "1000000"], "1000000 is not in the range"),
        (["digits", "cnn"], "`cnn` is one argument too many"),
    ],
)
def test_a_mistake_is_told_once_and_nothing_is_started(
    launcher: Launcher, arguments: list[str], complaint: str
) -> None:
    result = invoke(*arguments)
    assert result.exit_code == ExitCode.USAGE
    assert complaint in result.stderr
    assert result.stdout == ""
    assert not launcher.started
    assert not list(Path().iterdir())


def test_how_a_batch_divides_among_several_nodes_is_left_to_their_ranks(launcher: Launcher) -> None:
    assert invoke("digits", "--nproc", "3", "--", "--nnodes=64").exit_code == ExitCode.STOPPED
    assert len(launcher.started) == 1
