"""A finished run exits with code 0, every time."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.launched import Zygote

RECIPE = """
recipe = 2
name = "short"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "2st", global_batch = 8 }
"""

_BUSY = "import os\nparent = os.getppid()\nwhile os.getppid() == parent: pass"  # not longer than the tests


@pytest.mark.parametrize("runs", [5, pytest.param(100, marks=pytest.mark.full)])
def test_finished_runs_of_two_ranks_exit_with_zero(tmp_path: Path, zygote: Zygote, runs: int) -> None:
    """Covers trap 28a: gloo's threads abort about every tenth process that exits through the interpreter's clean-up.

    Ten such processes would all survive once in 3 times; the 200 of `make test-all`, never.
    """
    (tmp_path / "short.toml").write_text(RECIPE)
    ended = [zygote.run(["run", "short.toml", "--fresh"], nproc=2, cwd=tmp_path) for _ in range(runs)]
    assert [ranks.codes for ranks in ended] == [[0, 0]] * runs, next(r for r in ended if any(r.codes)).stderr


@pytest.fixture
def load() -> Iterator[None]:
    """Keeps four processes busy."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY]) for _ in range(4)]
    yield
    for process in busy:
        process.kill()
        process.wait()


FSDP = RECIPE + '[strategy]\nuse = "fsdp"\n'
SHORT, LONGER = ["run", "short.toml", "--fresh"], ["run", "short.toml", "--set", "train.length=4st"]


@pytest.mark.full
@pytest.mark.alone
def test_fsdp_runs_and_their_resumes_exit_with_zero_on_a_busy_machine(
    tmp_path: Path, zygote: Zygote, load: None
) -> None:
    """Runs under load: autograd's thread may begin only at the end; 2 of 43 resumes once ended with SIGABRT in it."""
    (tmp_path / "short.toml").write_text(FSDP)
    ended = [zygote.run(words, nproc=2, cwd=tmp_path) for _ in range(100) for words in (SHORT, LONGER)]
    assert [ranks.codes for ranks in ended] == [[0, 0]] * 200, next(r for r in ended if any(r.codes)).stderr


@pytest.mark.full
@pytest.mark.alone
def test_runs_without_a_launcher_exit_with_zero_on_a_busy_machine(tmp_path: Path, load: None) -> None:
    (tmp_path / "short.toml").write_text(FSDP)
    for _ in range(20):
        for words in (SHORT, LONGER):
            command = [sys.executable, "-m", "ddpforge", *words]
            ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
            assert ended.returncode == 0, ended.stderr


REGISTERED = """
import atexit, sys
from ddpforge.interfaces import Callback


class Registers(Callback):
    def on_start(self, run):
        atexit.register(print, "said at the end", flush=True)


class Loud:
    def __del__(self):
        print("the interpreter has cleaned up", flush=True)


sys.modules["loud"] = Loud()
"""


def test_single_process_runs_atexit_functions_but_no_interpreter_clean_up(tmp_path: Path) -> None:
    """Covers a single process, which has autograd's threads, too."""
    (tmp_path / "short.toml").write_text(RECIPE + '[callbacks.registers]\nuse = "./registers.py:Registers"\n')
    (tmp_path / "registers.py").write_text(REGISTERED)
    environment = {name: value for name, value in os.environ.items() if name != "RANK"}
    command = [sys.executable, "-m", "ddpforge", "run", "short.toml"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 0, ended.stderr
    assert "said at the end" in ended.stdout
    assert "cleaned up" not in ended.stdout
