"""A process whose components fail ends, in whatever state its loader processes are."""

import subprocess
import sys
from pathlib import Path

import pytest

RECIPE = """
recipe = 2
name = "{name}"
model = {{ use = "mlp", inputs = 64, outputs = 10, hidden = [8] }}
data.train = {{ use = "{data}", split = "test" }}
data.workers = 1
task = {{ use = "classification" }}
optimizer = {{ use = "sgd", lr = 0.1 }}
train = {{ length = "100st", global_batch = 12 }}
{more}
"""
PARTS = """
from ddpforge.builtin.datasets.digits import Digits
from ddpforge.interfaces import Callback


class Broken(Digits):
    def __getitems__(self, ids):
        raise IndexError("no such sample")


class Raises(Callback):
    def on_step(self, info):
        raise KeyError("lost")
"""
SCRIPT = """
import ddpforge

for name in ("data", "callback"):
    try:
        ddpforge.run(f"{name}.toml")
    except (IndexError, KeyError) as error:
        print(type(error).__name__, flush=True)
raise SystemExit(7)
"""


@pytest.mark.parametrize("command", ["a script", pytest.param("the command line", marks=pytest.mark.full)])
def test_process_with_loader_processes_ends_after_an_error(tmp_path: Path, command: str) -> None:
    """Covers loader processes that ignore one SIGTERM; the interpreter sends no more than one and waits for them."""
    raises = '[callbacks.raises]\nuse = "./parts.py:Raises"'
    (tmp_path / "data.toml").write_text(RECIPE.format(name="data", data="./parts.py:Broken", more=""))
    (tmp_path / "callback.toml").write_text(RECIPE.format(name="callback", data="digits", more=raises))
    (tmp_path / "parts.py").write_text(PARTS)
    words = ["-c", SCRIPT] if command == "a script" else ["-m", "ddpforge", "run", "data.toml"]
    ended = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    if command == "a script":
        assert ended.stdout.split() == ["IndexError", "KeyError"], ended.stderr
        assert ended.returncode == 7
    else:
        assert ended.returncode == 1
        assert "no such sample" in ended.stderr


LEAVES = """
import atexit
import signal
import subprocess
from ddpforge.ranks import process_exit

signal.signal(signal.SIGCHLD, lambda *_: print("a loader process is killed"))
atexit.register(subprocess.run, ["true"])
{threads}
process_exit.exit_process(5)
"""


@pytest.mark.parametrize("threads", ["", "process_exit.skip_interpreter_cleanup()"])
def test_loader_processes_that_end_with_their_rank_raise_no_error(threads: str) -> None:
    """Replaces torch's SIGCHLD handler, whose error would hide the last message of the run."""
    script = [sys.executable, "-c", LEAVES.format(threads=threads)]
    ended = subprocess.run(script, capture_output=True, text=True, timeout=300, check=False)
    assert (ended.stdout, ended.returncode) == ("", 5), ended.stderr
