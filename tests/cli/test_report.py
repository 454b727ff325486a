"""`ddpforge report`: writes an HTML file, or serves the page."""

import re
import signal
import subprocess
import sys
from pathlib import Path
from urllib.request import urlopen

import pytest
from click.testing import CliRunner
from support.run_folders import made

from ddpforge.cli import main
from ddpforge.errors import ExitCode

ROWS = [{"step": step, "train/loss": 1.0 / step} for step in range(1, 4)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    made(Path("runs/a"), rows=ROWS)
    return tmp_path


def test_one_file_reports_several_runs() -> None:
    made(Path("runs/b"), rows=ROWS)
    said = CliRunner().invoke(main, ["report", "a", "b", "a", "-o", "both.html"])
    assert re.fullmatch(r"both\.html: 0\.\d\d MB\n", said.stdout), said.output
    page = Path("both.html").read_text(encoding="utf-8")
    assert page.count('<section id="run-') == 2
    assert "src=http" not in page.replace('"', "")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nowhere"], "there is no run 'nowhere'"),
        (["a", "-o", "none/report.html"], "cannot write none/report.html: No such file or directory"),
        ([], "Missing argument 'RUN...'"),
    ],
)
def test_usage_errors_are_printed_on_stderr(arguments: list[str], said: str) -> None:
    result = CliRunner().invoke(main, ["report", *arguments])
    assert result.exit_code == ExitCode.USAGE
    assert said in result.stderr


def test_the_page_is_served_until_ctrl_c(folder: Path) -> None:
    command = [sys.executable, "-m", "ddpforge", "report", "a", "--watch"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
        assert server.stderr is not None
        place = server.stderr.readline().split()[0]
        assert b'data-live="5.0"' in urlopen(place).read()
        server.send_signal(signal.SIGINT)
    assert server.returncode == 0
    assert not list(folder.glob("*.html"))
