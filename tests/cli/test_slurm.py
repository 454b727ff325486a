"""`ddpforge slurm`: the generated batch script; tests/launchers/test_slurm.py submits it to a real Slurm."""

import re
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ddpforge.cli import main
from ddpforge.errors import ExitCode
from ddpforge.launchers.slurm import indices, seconds


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def invoke(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["slurm", *arguments])


def written(*arguments: str) -> str:
    """Returns the script, after a syntax check by bash."""
    result = invoke(*arguments)
    assert result.exit_code == 0, result.stderr
    subprocess.run(["bash", "-n"], input=result.stdout, text=True, check=True)
    return result.stdout


def directives(script: str) -> list[str]:
    return re.findall(r"^#SBATCH --(.*)$", script, re.MULTILINE)


def command(script: str) -> str:
    """Returns the line that starts ddpforge, without the path of the interpreter."""
    text = script.replace("\\\n", " ")
    (found,) = re.findall(r"^ +exec .*?-m (ddpforge .*)$", text, re.MULTILINE)
    return " ".join(found.split())


def test_a_job_of_several_nodes_starts_a_launcher_on_each() -> None:
    script = written(
        *("digits", "--nodes=2", "--gpus-per-node=4", "--time=4:00:00", "--signal=300", "--set=data.workers=3"),
        *("--out=my runs", "--sbatch", "account=me", "--sbatch=exclusive", "--", "--max-restarts=3"),
    )
    assert directives(script) == [
        *("job-name=digits", "nodes=2", "ntasks-per-node=1", "cpus-per-task=16", "gpus-per-node=4", "time=4:00:00"),
        *("signal=B:USR1@300", "requeue", "open-mode=append", "output=%x-%j.out", "account=me", "exclusive"),
    ]
    assert command(script) == (
        "ddpforge launch digits --set=data.workers=3 '--out=my runs' --max-restarts=3 --nproc=4 "
        '--nnodes="$SLURM_NNODES" --node-rank="$SLURM_NODEID" --rdzv-endpoint="$head" '
        '--rdzv-id="$SLURM_JOB_ID.${SLURM_RESTART_COUNT:-0}"'
    )


def test_srun_can_start_every_rank() -> None:
    script = written("digits", "--nodes=2", "--nproc=2", "--one-task-per-rank")
    assert directives(script)[1:4] == ["nodes=2", "ntasks-per-node=2", "cpus-per-task=1"]
    assert command(script) == "ddpforge run digits"


def test_a_setup_script_runs_first_and_provides_the_ddpforge_command(tmp_path: Path) -> None:
    (tmp_path / "setup.sh").write_text("module load cuda\nsource env/bin/activate\n")
    script = written("digits", "--setup", "setup.sh")
    assert "\n    exec ddpforge launch digits --nproc=1\n" in script
    trap, setup, start = (script.index(text) for text in ("trap stop", "source env/bin/activate", "\ntask()"))
    assert trap < setup < start


@pytest.mark.parametrize(
    ("name", "shown"),
    [
        ("lr-${env:SLURM_ARRAY_TASK_ID}-wide", "lr-wide"),
        ("${env:SLURM_ARRAY_TASK_ID}", "digits"),
        ("x${env:SLURM_ARRAY_TASK_ID}", "x"),
    ],
)
def test_the_job_name_of_an_array_has_no_task_id(name: str, shown: str) -> None:
    assert f"job-name={shown}" in directives(written("digits", "--array=10-11", "--set", f"name={name}"))


@pytest.mark.parametrize("first", [4999, 15000, 123456])
def test_jobs_with_neighbouring_numbers_do_not_share_a_port(first: int) -> None:
    """Each launch uses the endpoint's port and the next one."""
    (line,) = [line for line in written("digits", "--nodes=2").splitlines() if line.startswith("export head=")]

    def ports(job: int) -> set[int]:
        environment = {"SLURM_JOB_ID": str(job), "SLURMD_NODENAME": "n1"}
        shell = subprocess.run(["bash", "-c", f'{line}; echo "$head"'], env=environment, text=True, capture_output=True)
        host, _, port = shell.stdout.strip().partition(":")
        assert host == "n1"
        return {int(port), int(port) + 1}

    taken = [port for job in range(first, first + 4) for port in ports(job)]
    assert len(set(taken)) == 8
    assert all(10_000 <= port < 20_000 for port in taken)


def test_jobs_of_an_array_need_different_run_names() -> None:
    name = "name=digits-${env:SLURM_ARRAY_TASK_ID}"
    script = written("digits", "--array=2-6:2%1", "--set", name)
    assert {"array=2-6:2%1", "output=%x-%A_%a.out", "job-name=digits"} <= {*directives(script)}
    assert command(script) == f"ddpforge launch digits '--set={name}' --nproc=1"
    assert 'job="${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' in script

    result = invoke("digits", "--array=2-6:2")
    assert result.exit_code == ExitCode.USAGE
    assert "all jobs of --array 2-6:2 would train in runs/digits" in result.stderr
    assert f"--set '{name}'" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--nodes=3"], "cannot be divided evenly among 3 ranks"),
        (["--set=train.lenght=1ep"], "unknown key `lenght` in [train]"),
        (["--time=tomorrow"], "--time tomorrow is not a time in Slurm's format"),
        (["--time=2"], "--time 2 is 120 s, but ranks have to save 120 s before its end"),
        (["--array=a-b"], "--array a-b is not a list of numbers"),
        (["--sbatch=nodes=3"], "the script sets this option itself\n  = help: use --nodes"),
        (["--sbatch=--exclusive"], "write it without dashes"),
        (["--gpus-per-node=2", "--nproc=4"], "--nproc 4, but a node has 2 GPUs"),
        (["--set=train.device=cuda"], "the job has no GPUs\n  = help: set --gpus-per-node N"),
        (["--set=train.device=cpu", "--gpus-per-node=2"], "GPUs would be idle"),
        (["--", "--fresh"], "--fresh would start from scratch each time"),
        (["cnn"], "Got unexpected extra argument (cnn)"),
    ],
)
def test_invalid_options_are_refused(arguments: list[str], complaint: str) -> None:
    result = invoke("digits", *arguments)
    assert result.exit_code == ExitCode.USAGE
    assert complaint in result.stderr
    assert result.stdout == ""


def test_the_script_is_written_to_a_file_and_submitted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sbatch = tmp_path / "bin/sbatch"
    sbatch.parent.mkdir()
    sbatch.write_text("#!/bin/bash\ncat > submitted.sh\necho Submitted batch job 7\n")
    sbatch.chmod(0o755)
    monkeypatch.setenv("PATH", f"{sbatch.parent}:/usr/bin:/bin")
    assert invoke("digits", "--to", "job.sh", "--submit").stdout == "Submitted batch job 7\n"
    assert Path("submitted.sh").read_text() == Path("job.sh").read_text() != ""

    sbatch.write_text("#!/bin/bash\necho 'invalid partition' >&2\nexit 1\n")
    result = invoke("digits", "--submit")
    assert (result.exit_code, "sbatch rejected the job: invalid partition" in result.stderr) == (3, True)

    monkeypatch.setenv("PATH", str(tmp_path))
    result = invoke("digits", "--submit")
    assert (result.exit_code, "`sbatch` is not installed here" in result.stderr) == (3, True)


@pytest.mark.parametrize(
    ("time", "expected"),
    [("90", 5400), ("90:30", 5430), ("1:00:01", 3601), ("1-12", 129600), ("1-1:1", 90060), ("1-0:0:1", 86401)],
)
def test_slurm_times_are_parsed(time: str, expected: int) -> None:
    assert seconds(time) == expected
    assert seconds("UNLIMITED") is None


@pytest.mark.parametrize(
    ("array", "expected"), [("0-3", [0, 1, 2, 3]), ("1,5", [1, 5]), ("0-7:4%2", [0, 4]), ("3", [3])]
)
def test_slurm_array_indices_are_parsed(array: str, expected: list[int]) -> None:
    assert indices(array) == expected
