"""Tutorial: each of its commands runs in order, in one folder, and prints the output shown."""

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs/tutorial.md"


def blocks() -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = re.findall(
        r"^```(\w+)\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )
    return found


def shape(line: str) -> str:
    """Returns a line without its numbers and column widths, which differ between machines."""
    return re.sub(r"\s+", " ", re.sub(r"\d+(\.\d+)?(e[+-]?\d+)?", "0", line)).strip()


def shell(script: str, folder: Path, codes: tuple[int, ...] = (0,)) -> str:
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", script],
        cwd=folder,
        env=os.environ | {"PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode in codes, f"{script}\n{done.stdout}"
    return done.stdout


@pytest.mark.full
def test_every_command_prints_the_output_in_the_tutorial(tmp_path: Path) -> None:
    printed, folder, interrupted = "", tmp_path, False
    for language, text in blocks():
        if language == "python":
            if name := re.match(r"# (\w+\.py)\n", text):
                (folder / name[1]).write_text(text)
            else:
                shell(f"python - <<'.'\n{text}.", folder)
        elif language == "toml":
            (folder / "spirals.toml").write_text(text)
        elif language == "text":
            lines = [shape(line) for line in printed.splitlines()]
            missing = [line for line in text.splitlines() if line and shape(line) not in lines]
            assert not missing, f"{missing} is not in\n{printed}"
        elif "pip install" in text:
            continue  # the test's own environment
        elif "echo $?" in text:  # the user presses Ctrl-C after a few seconds
            command = text.splitlines()[0]
            shell(f"timeout --foreground --signal INT 25 {command}", folder, codes=(75, 124))
            assert '"exit_code": 75' in (folder / "runs/long/status.json").read_text()
            interrupted = True
        else:
            printed = shell(
                text.replace("200ep", "200ep --max-time 15s"), folder, codes=(0, 75) if interrupted else (0,)
            )
            interrupted = False
            if text.startswith("mkdir digits"):
                folder = tmp_path / "digits"
    assert len((folder / "predictions.jsonl").read_text().splitlines()) == 500
    assert shell("python use.py", folder).strip() in ("0", "1")
    accuracy = re.findall(r'"eval/accuracy": ([\d.]+)', (folder / "runs/spirals/status.json").read_text())
    assert float(accuracy[0]) > 0.99


@pytest.mark.full
def test_a_clone_trains_by_one_command(tmp_path: Path) -> None:
    """Runs the first command of a new user; packages come from the tests' environment, not from the network."""
    shell(f"git clone --quiet {PAGE.parents[1]} clone", tmp_path)
    clone = tmp_path / "clone"
    shell(f"{sys.executable} -m venv --without-pip .venv", clone)
    (packages,) = clone.glob(".venv/lib/python*/site-packages")
    (packages / "others.pth").write_text(sysconfig.get_path("purelib"))
    shell("PIP_NO_INDEX=1 PIP_NO_BUILD_ISOLATION=0 make run", clone)
    assert shell(".venv/bin/python -c 'import ddpforge; print(ddpforge.__file__)'", tmp_path / "clone").startswith(
        str(clone)
    )
    status = json.loads((clone / "runs/digits/status.json").read_text())
    assert (status["state"], status["world_size"]) == ("done", 2)
    assert status["metrics"]["eval/accuracy"] > 0.97
