"""Exit codes of ddpforge, and its output on errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from ddpforge.cli import complain, main
from ddpforge.errors import ExitCode, ForgeError, PeerFailed, SetupError, UsageError

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
def test_a_failed_command_exits_with_the_code_of_its_error(error: str, code: ExitCode, said: str) -> None:
    """Ctrl-C gives 130, as in a shell. A run that saved and stopped exits with 75, which no exception gives."""
    ended = subprocess.run([sys.executable, "-c", SCRIPT.format(error=error)], capture_output=True, text=True)
    assert ended.returncode == code
    status = json.loads(ended.stdout)
    assert (status["state"], status["exit_code"]) == ("failed", code)
    assert said in ended.stderr
    assert bool(ended.stderr) is bool(said)


def test_a_traceback_begins_at_the_users_code(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text("def count(x):\n    return len(x)\n")
    script = SCRIPT.replace("raise {error}", "import mine; mine.count(1)")
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path)
    _, _, trace = ended.stderr.partition("Traceback (most recent call last):\n")
    assert trace.splitlines()[0].endswith('mine.py", line 2, in count')
    assert "TypeError: object of type 'int' has no len()" in trace


# ---------------------------------------------------------------------------------------------- lost output
RECIPE = """\
recipe = 2
name = "tiny"
model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }
data.train = { use = "digits", split = "test" }
task = { use = "classification" }
optimizer = { use = "sgd", lr = 0.1 }
train = { length = "3st", global_batch = 8, device = "cpu" }
track.every = "1st"
"""
RUN = f"{sys.executable} -P -m ddpforge run tiny.toml"


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(f"({RUN} 2>&1; echo $? >code) | head -1", marks=pytest.mark.full),  # "launched" has this pipe, too
        pytest.param(f"({RUN}; echo $? >code) 2>&1 | true", marks=pytest.mark.full),
        f"{RUN} >/dev/full 2>&1; echo $? >code",
        f"{RUN} <&- >&- 2>&-; echo $? >code",
        f"({RUN.replace(' run ', ' launch ')} --nproc 2 2>&1; echo $? >code) | head -1",
    ],
    ids=["a pipe after a line", "a pipe at once", "a full disk", "closed", "launched"],
)
def test_a_run_continues_after_its_output_is_closed(tmp_path: Path, command: str) -> None:
    """Checks also that no file of the run gets the descriptor of stdout, and that a local random.py is not imported."""
    (tmp_path / "tiny.toml").write_text(RECIPE)
    for name in ("random.py", "types.py", "json.py"):
        (tmp_path / name).write_text("open('imported', 'w'); raise SystemExit('not that of the standard library')\n")
    subprocess.run(["bash", "-c", command], cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    status = json.loads((tmp_path / "runs/tiny/status.json").read_text())
    assert (status["state"], status["step"], status["exit_code"]) == ("done", 3, 0)
    assert (tmp_path / "code").read_text() == "0\n"
    rows = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert not (tmp_path / "imported").exists()


def test_components_in_the_current_folder_do_not_shadow_the_standard_library(
    tmp_path: Path,
) -> None:
    (tmp_path / "random.py").write_text("raise SystemExit('not that of the standard library')\n")
    net = "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self) -> None:\n"
    (tmp_path / "mine.py").write_text(f"{net}        super().__init__(64, 10)\n")
    (tmp_path / "mine_too.py").write_text("from ddpforge.interfaces import Callback\n\n\nclass Own(Callback): ...\n")
    model = 'model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }'
    text = RECIPE.replace(model, 'model = { use = "./mine.py:Net" }\ncallbacks.own = { use = "mine_too:Own" }')
    (tmp_path / "tiny.toml").write_text(text)
    command = [sys.executable, "-m", "ddpforge", "check", "tiny.toml"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)


def test_folder_names_may_be_non_utf8_or_non_ascii_under_a_c_locale(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (os.fsdecode(b"caf\xe9"), "caf\u00e9"):
        place = tmp_path / name
        place.mkdir()
        (place / "mine.py").write_text(
            "from torch import nn\n\n\ndef net() -> nn.Module:\n    return nn.Linear(64, 10)\n"
        )
        model = 'model = { use = "mlp", inputs = 64, outputs = 10, hidden = [8] }'
        (place / "tiny.toml").write_text(RECIPE.replace(model, 'model = { use = "./mine.py:net" }'))
        ascii_alone = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
        command = [sys.executable, "-m", "ddpforge", "check", "tiny.toml"]
        ended = subprocess.run(command, cwd=place, env={**os.environ, **ascii_alone}, capture_output=True, text=True)
        assert (ended.returncode, ended.stderr) == (0, "")
        monkeypatch.chdir(place)  # under this process's own locale
        result = CliRunner().invoke(main, ["check", "tiny.toml"])
        assert (result.exit_code, result.stderr) == (0, "")


@pytest.mark.parametrize(
    ("group", "local", "rank", "error", "said"),
    [
        ("1", "0", "2", PeerFailed(ExitCode.FAILED, "rank 0 failed first: no"), "error: rank 0 failed first: no\n"),
        ("1", "0", "2", UsageError("no"), "error: no\n"),
        ("1", "1", "3", PeerFailed(ExitCode.FAILED, "no"), ""),
        ("0", "1", "1", PeerFailed(ExitCode.FAILED, "no"), ""),
        ("0", "0", "0", UsageError("no"), "error: no\n"),
        ("1", "0", "2", SetupError("my disk"), "[rank 2] error: my disk\n"),
        ("1", "0", "2", PeerFailed(ExitCode.FAILED, "no", launcher_prints=True), ""),
    ],
)
def test_each_node_prints_the_error_once(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    group: str,
    local: str,
    rank: str,
    error: ForgeError,
    said: str,
) -> None:
    """Prints on each node, because users read the output of any node; rank 0 prints on its own node."""
    for name, value in (("GROUP_RANK", group), ("LOCAL_RANK", local), ("RANK", rank)):
        monkeypatch.setenv(name, value)
    complain(error)
    assert capsys.readouterr().err == said
