"""The CSV file has each row once, after any interruption of the run."""

import csv
from pathlib import Path

import pytest
from pydantic import ValidationError

from ddpforge.builtin.trackers.csv import CSVTracker
from ddpforge.components.options import options_model
from ddpforge.components.registry import Registry


def started(folder: Path, resumed_at: int | None = None) -> CSVTracker:
    tracker = CSVTracker()
    tracker.start(name="run", folder=folder, config={}, resumed_at=resumed_at)
    return tracker


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_csv_has_a_line_per_row_and_a_column_per_metric(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"train/loss": 0.1 + 0.2, "lr": 1e-3})
    tracker.log(1, {"eval/loss": float("nan")})
    tracker.log(2, {"train/loss": 0.25, "lr": 1e-3})
    assert rows(tmp_path) == [
        {"step": "1", "train/loss": "0.30000000000000004", "lr": "0.001", "eval/loss": ""},
        {"step": "1", "train/loss": "", "lr": "", "eval/loss": "nan"},
        {"step": "2", "train/loss": "0.25", "lr": "0.001", "eval/loss": ""},
    ]


def test_rewind_removes_later_rows(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    tracker.rewind(1)
    tracker.log(2, {"train/loss": 2.0})
    assert [(row["step"], row["train/loss"]) for row in rows(tmp_path)] == [("1", "1.0"), ("2", "2.0")]


def test_resume_removes_later_rows_and_an_incomplete_line(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": 1.0})
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("2")
    tracker = started(tmp_path, resumed_at=2)
    tracker.log(3, {"train/loss": 3.0, "eval/loss": 4.0})
    found = [(row["step"], row["train/loss"], row["eval/loss"]) for row in rows(tmp_path)]
    assert found == [("1", "1.0", ""), ("2", "1.0", ""), ("3", "3.0", "4.0")]


def test_restart_removes_all_earlier_rows(tmp_path: Path) -> None:
    started(tmp_path).log(1, {"train/loss": 1.0})
    started(tmp_path)
    assert rows(tmp_path) == []


@pytest.mark.parametrize("file", ["metrics.jsonl", "status.json", "recipe.toml", "..", ".csv", "../a.csv"])
def test_file_option_refuses_names_of_run_files(file: str, tmp_path: Path) -> None:
    model = options_model(CSVTracker, frozenset(), Registry(), tmp_path)
    with pytest.raises(ValidationError, match="file"):
        model.model_validate({"file": file})


def test_restart_removes_rows_of_step_0(tmp_path: Path) -> None:
    started(tmp_path).log(0, {"eval/loss": 1.0})
    assert len(rows(tmp_path)) == 1
    started(tmp_path)
    assert rows(tmp_path) == []
