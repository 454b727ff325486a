"""Benchmarks for GPUs also run on CPUs, with small sizes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
@pytest.mark.parametrize(("ranks", "name", "rows"), [(1, "report", 12), (2, "report-2", 8)])
def test_gpu_acceptance_runs_on_cpus_and_writes_its_report(tmp_path: Path, ranks: int, name: str, rows: int) -> None:
    tests = tmp_path / "tests.xml"
    tests.write_text(
        '<testsuites><testsuite><testcase classname="gpu" name="good" time="60"><properties>'
        '<property name="difference" value="0.5"/></properties></testcase>'
        '<testcase classname="gpu" name="left"><skipped/></testcase></testsuite></testsuites>'
    )
    command = [sys.executable, "benchmarks/gpu.py", "--tiny", f"--ranks={ranks}", f"--out={tmp_path}"]
    done = subprocess.run([*command, f"--tests={tests}"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads((tmp_path / f"{name}.json").read_text())
    assert len(found["rows"]) == rows
    assert found["failures"] == []
    assert ranks > 1 or float(found["rows"][-1]["found"]) > 1, "minutes, including one for tests"
    told = (tmp_path / f"{name}.md").read_text()
    assert "- no GPU: the numbers mean nothing" in told
    assert all(f"| {row['name']} | {row['expected']} | {row['found']} |" in told for row in found["rows"])
    assert told.endswith("1 of 2 tests passed.\n\n- skipped: `gpu::left`\n- `gpu::good`: difference 0.5\n")


def test_gpu_acceptance_requires_gpus() -> None:
    command = [sys.executable, "benchmarks/gpu.py", "--ranks=64"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "--tiny tries the script on CPUs" in done.stderr
