"""Every process of ddpforge ends with the exit code that says how it went."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ddpforge.errors import ExitCode

SCRIPT = """
from ddpforge.cli.ending import ending
from ddpforge.errors import Diverged, UsageError
with ending(status=True):
    raise {error}
"""


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        ("KeyboardInterrupt", ExitCode.INTERRUPTED, ""),
        ("ValueError('no')", ExitCode.FAILED, "Traceback"),
        ("UsageError('no')", ExitCode.USAGE, "error: no"),
        ("Diverged('no')", ExitCode.DIVERGED, "error: no"),
    ],
)
def test_a_command_that_did_not_come_to_its_end_leaves_with_the_code_that_says_why(
    error: str, code: ExitCode, said: str
) -> None:
    """130 after Ctrl-C, as of a shell; a run that has saved ends with 75 instead, which no exception does."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True)
    assert ended.returncode == code
    status = json.loads(ended.stdout)
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert said in ended.stderr
    assert bool(ended.stderr) is bool(said)


def test_a_traceback_begins_where_the_users_code_does(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def count(x):\n    return len(x)\n")
    script = SCRIPT.replace("raise {error}", "import mine; mine.count(1)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    _, _, trace = ended.stderr.partition("Traceback (most recent call last):\n")
    assert trace.splitlines()[0].endswith('mine.py", line 2, in count')
    assert "TypeError: object of type 'int' has no len()" in trace
