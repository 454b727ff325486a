"""Search for a micro-batch: the sizes tried, and the detection of a process that does not fit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ddpforge.cli import main
from ddpforge.errors import ForgeError, RecipeError
from ddpforge.tools.trials import batch_size
from ddpforge.tools.trials.batch_size import Try, find_micro_batch, fitting, sizes


def test_sizes_are_divisors_of_a_ranks_share_of_the_batch() -> None:
    assert sizes(12) == [1, 2, 3, 4, 6, 12]


@pytest.mark.parametrize("most", range(13))
def test_largest_size_that_fits_is_found(most: int) -> None:
    candidates, tried = sizes(12), list[int]()

    def fits(size: int) -> bool:
        tried.append(size)
        return size <= most

    found = fitting(candidates, fits)
    assert found == max((size for size in candidates if size <= most), default=None)
    assert len(tried) == len(set(tried)) <= 4
    assert tried[0] == 12


class Processes:
    """Fake processes: each needs 1 GiB per 8 samples, and fails if it needs more than `there` bytes."""

    def __init__(self, there: float, word: str) -> None:
        self.there, self.word, self.commands = there, word, list[list[str]]()

    def __call__(self, command: list[str], most: int | None) -> tuple[int | None, str, str]:
        self.commands.append(command)
        size = int(next(word for word in command if "micro_batch" in word).rpartition("=")[2])
        taken = size * 2**30 // 8
        if self.word == "killed" and taken > self.there:
            return None, "", ""
        if taken > self.there:
            return 1, json.dumps({"error": f"{self.word}: memory is full"}), ""
        return 0, f"a line\n{json.dumps({'memory': taken, 'samples_per_second': 10.0 * size})}\n", ""


@pytest.fixture
def processes(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Processes:
    there, word = getattr(request, "param", (4.0, "OutOfMemory"))
    found = Processes(there * 2**30, word)
    monkeypatch.setattr(batch_size, "_watched", found)
    return found


@pytest.mark.parametrize("processes", [(4.0, "OutOfMemory"), (4.0, "killed")], indirect=True)
def test_process_out_of_memory_does_not_fit(processes: Processes) -> None:
    told: list[Try] = []
    found = find_micro_batch("digits", on_result=told.append)
    assert found.micro_batch == 32
    assert [one.micro_batch for one in told] == [64, 4, 16, 32]
    assert [one.fits for one in told] == [False, True, True, True]
    assert told[-1].samples_per_second == 320.0
    assert processes.commands[0][-3:] == ["--json", "--dry-run=2", "--set=train.micro_batch=64"]


def test_budget_limits_the_size_before_memory_is_full(processes: Processes) -> None:
    assert find_micro_batch("digits", budget=2**30).micro_batch == 8


def test_sizes_are_per_rank(processes: Processes) -> None:
    found = find_micro_batch("digits", ranks=4, sets=["train.global_batch=128"])
    assert found.micro_batch == 32
    assert found.as_dict()["accumulation"] == 1
    assert {"launch", "--nproc", "4", "--set=train.global_batch=128"} <= set(processes.commands[0])


def test_batch_that_does_not_divide_by_ranks_is_rejected(processes: Processes) -> None:
    with pytest.raises(RecipeError, match="cannot be divided evenly among 3 ranks"):
        find_micro_batch("digits", ranks=3)


@pytest.mark.parametrize("processes", [(0.0, "ValueError")], indirect=True)
def test_other_failure_of_a_process_is_an_error(processes: Processes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_size, "_watched", lambda *_: (2, "", "error: no such file\n"))
    with pytest.raises(ForgeError, match="could not be tried") as caught:
        find_micro_batch("digits")
    assert caught.value.hints == ("error: no such file",)


def run(*arguments: str) -> Any:
    return CliRunner().invoke(main, ["batch-size", "digits", *arguments])


def test_batch_size_command_prints_the_setting(processes: Processes) -> None:
    result = run("--memory", "2GiB")
    assert result.stdout == "train.micro_batch = 16: 64 per step = 16 per forward pass × 4 accumulation × 1 rank\n"
    assert "micro-batch 64: does not fit" in result.stderr
    assert "micro-batch 16: fits, 2.00 GiB, 160 samples/s" in result.stderr


def test_batch_size_command_fails_if_no_size_fits(processes: Processes) -> None:
    result = run("--memory", "1MiB", "--json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["micro_batch"] is None


@pytest.mark.full
def test_real_processes_leave_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    found = find_micro_batch("digits", sets=["train.global_batch=4", "train.length=2ep"])
    assert found.micro_batch == 4
    assert not list(tmp_path.iterdir())
