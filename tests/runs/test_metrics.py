"""`metrics.jsonl`: each step once, in its newest version, also after resumes, crashes and damage."""

import json
import logging
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddpforge.errors import SetupError
from ddpforge.runs.metrics import JSONLTracker, evaluation_file, line_of, read_evaluations, read_metrics


def started(folder: Path, resumed_at: int | None = None) -> JSONLTracker:
    tracker = JSONLTracker()
    tracker.start(name="run", folder=folder, config={}, resumed_at=resumed_at)
    return tracker


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def losses(folder: Path) -> dict[int, float]:
    return {row["step"]: row["train/loss"] for row in read_metrics(folder)}


def test_a_row_is_on_disk_when_log_returns(tmp_path: Path) -> None:
    started(tmp_path).log(10, {"samples": 2560, "train/loss": 0.5, "lr": 1e-3})
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert row.pop("time") > 1.7e9
    assert row == {"step": 10, "samples": 2560, "attempt": 1, "train/loss": 0.5, "lr": 1e-3}


def test_nonfinite_values_are_null_and_listed(tmp_path: Path) -> None:
    started(tmp_path).log(1, {"train/loss": math.nan, "train/grad_norm": math.inf, "lr": 0.1})
    (row,) = lines(tmp_path / "metrics.jsonl")
    assert (row["train/loss"], row["train/grad_norm"], row["lr"]) == (None, None, 0.1)
    assert row["nonfinite"] == ["train/loss", "train/grad_norm"]

    (read,) = read_metrics(tmp_path)
    assert math.isnan(read["train/loss"])
    assert "nonfinite" not in read


def test_read_metrics_merges_training_and_evaluation_of_a_step(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"samples": 8, "train/loss": 3.0})
    tracker.log(2, {"samples": 16, "train/loss": 2.0})
    tracker.log(2, {"eval/loss": 2.5})
    assert [row["step"] for row in read_metrics(tmp_path)] == [1, 2]
    assert read_metrics(tmp_path)[1].items() >= {"samples": 16, "train/loss": 2.0, "eval/loss": 2.5}.items()


def test_a_resume_supersedes_the_rows_after_its_checkpoint(tmp_path: Path) -> None:
    first = started(tmp_path)
    for step in range(1, 10):
        first.log(step, {"train/loss": float(step)})

    second = started(tmp_path, resumed_at=5)
    for step in range(6, 15):
        second.log(step, {"train/loss": -float(step)})

    assert losses(tmp_path) == {s: float(s) for s in range(1, 6)} | {s: -float(s) for s in range(6, 15)}
    assert [row["attempt"] for row in lines(tmp_path / "metrics.jsonl")] == [1] * 5 + [2] * 9
    assert [row["step"] for row in lines(tmp_path / "metrics.superseded.jsonl")] == [6, 7, 8, 9]


def test_training_from_scratch_supersedes_all_rows_and_counts_as_an_attempt(tmp_path: Path) -> None:
    started(tmp_path).log(0, {"train/loss": 1.0})
    started(tmp_path)
    assert read_metrics(tmp_path) == []
    started(tmp_path).log(1, {"train/loss": 2.0})
    assert [row["attempt"] for row in lines(tmp_path / "metrics.jsonl")] == [2]


def test_a_rewind_supersedes_later_rows(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": float(step)})
    tracker.rewind(1)
    tracker.log(2, {"train/loss": 20.0})
    assert losses(tmp_path) == {1: 1.0, 2: 20.0}
    assert {row["attempt"] for row in lines(tmp_path / "metrics.jsonl")} == {1}


def test_a_line_torn_by_a_crash_is_dropped(tmp_path: Path) -> None:
    started(tmp_path).log(1, {"train/loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 2, "attempt": 1, "train/lo')
    assert losses(tmp_path) == {1: 1.0}

    started(tmp_path, resumed_at=2).log(3, {"train/loss": 3.0})
    assert losses(tmp_path) == {1: 1.0, 3: 3.0}


def test_a_damaged_line_in_the_middle_is_an_error_with_its_number(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "attempt": 1}\n{"step": \n{"step": 3, "attempt": 1}\n')
    with pytest.raises(SetupError, match=r"metrics\.jsonl, line 2"):
        read_metrics(tmp_path)
    with pytest.raises(SetupError, match="line 2"):
        started(tmp_path, resumed_at=3)


def test_a_folder_without_metrics_is_not_a_run(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match=r"there is no .*metrics\.jsonl"):
        read_metrics(tmp_path)


@pytest.fixture
def ddpforge_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    monkeypatch.setattr(logging.getLogger("ddpforge"), "propagate", True)
    return caplog


@pytest.mark.parametrize("replaced", [False, True])
def test_a_removed_file_is_written_again_with_all_rows(
    tmp_path: Path, ddpforge_log: pytest.LogCaptureFixture, replaced: bool
) -> None:
    tracker = started(tmp_path)
    for step in (1, 2):
        tracker.log(step, {"train/loss": float(step)})
    (tmp_path / "metrics.jsonl").unlink()
    if replaced:
        (tmp_path / "metrics.jsonl").write_text("")
    tracker.log(3, {"train/loss": 3.0})
    assert losses(tmp_path) == {1: 1.0, 2: 2.0, 3: 3.0}
    assert "metrics.jsonl was removed or replaced during training: all its rows were written again" in ddpforge_log.text
    tracker.log(4, {"train/loss": 4.0})
    assert losses(tmp_path)[4] == 4.0
    assert ddpforge_log.text.count("metrics.jsonl") == 1


def test_a_removed_file_is_written_again_at_the_end(tmp_path: Path, ddpforge_log: pytest.LogCaptureFixture) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    (tmp_path / "metrics.jsonl").unlink()
    tracker.finish(state="done", summary={})
    assert losses(tmp_path) == {1: 1.0}
    assert "was removed or replaced" in ddpforge_log.text


def test_a_file_that_replaced_the_metrics_is_kept_under_another_name(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    (tmp_path / "metrics.jsonl").unlink()
    (tmp_path / "metrics.jsonl").write_text("theirs")
    tracker.log(1, {"train/loss": 1.0})
    assert (tmp_path / "metrics.replaced.jsonl").read_text() == "theirs"


def test_a_truncated_file_is_a_warning(tmp_path: Path, ddpforge_log: pytest.LogCaptureFixture) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    (tmp_path / "metrics.jsonl").write_text("")
    tracker.log(2, {"train/loss": 2.0})
    assert losses(tmp_path) == {2: 2.0}
    assert "rows were removed from" in ddpforge_log.text


def test_a_page_of_zeros_loses_only_the_rows_in_it(tmp_path: Path, ddpforge_log: pytest.LogCaptureFixture) -> None:
    """After a power failure, a file system may leave zeros in unwritten blocks. Tests every offset within a row."""
    rows = [f'{{"step": {step}, "attempt": 1, "train/loss": {step / 8}}}'.encode() for step in range(100, 300)]
    content = b"".join(row + b"\n" for row in rows)
    for begin in range(4000, 4000 + 2 * len(rows[0])):
        end = begin + 4096
        (tmp_path / "metrics.jsonl").write_bytes(content[:begin] + bytes(end - begin) + content[end:])
        places = {100 + number: content.index(row) for number, row in enumerate(rows)}
        kept = [step for step, at in places.items() if at + len(rows[step - 100]) <= begin or at >= end]
        assert list(losses(tmp_path)) == kept

    tracker = started(tmp_path, resumed_at=300)
    tracker.log(301, {"train/loss": 301.0})
    assert list(losses(tmp_path)) == [*kept, 301]
    assert b"\0" not in (tmp_path / "metrics.jsonl").read_bytes()
    assert "metrics.jsonl contains zero bytes" in ddpforge_log.text


def test_a_page_of_zeros_at_the_end_is_ignored(tmp_path: Path) -> None:
    started(tmp_path).log(1, {"train/loss": 1.0})
    with (tmp_path / "metrics.jsonl").open("ab") as file:
        file.write(bytes(4096))
    assert losses(tmp_path) == {1: 1.0}
    started(tmp_path, resumed_at=1).log(2, {"train/loss": 2.0})
    assert losses(tmp_path) == {1: 1.0, 2: 2.0}


def test_the_attempt_number_is_taken_from_the_config(tmp_path: Path) -> None:
    """Attempts without a row count, too, as in `run.json`."""
    tracker = JSONLTracker()
    tracker.start(name="run", folder=tmp_path, config={"run": {"attempt": 3}}, resumed_at=None)
    tracker.log(1, {"train/loss": 1.0})
    assert [row["attempt"] for row in lines(tmp_path / "metrics.jsonl")] == [3]


def test_a_full_disk_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(tmp_path)
    monkeypatch.setattr(tracker, "_path", Path("/dev/full"))
    monkeypatch.setattr(tracker, "_kept", open("/dev/full", "r+b", buffering=0))  # noqa: SIM115
    with pytest.raises(SetupError, match=r"cannot write /dev/full: No space left on device"):
        tracker.log(1, {"train/loss": 1.0})


def test_a_crash_during_superseding_loses_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(tmp_path)
    for step in (1, 2, 3):
        tracker.log(step, {"train/loss": float(step)})

    def crash(path: Path, size: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("os.truncate", crash)
    with pytest.raises(KeyboardInterrupt):
        started(tmp_path, resumed_at=1)
    monkeypatch.undo()

    assert [row["step"] for row in lines(tmp_path / "metrics.superseded.jsonl")] == [2, 3]
    assert list(losses(tmp_path)) == [1, 2, 3]
    started(tmp_path, resumed_at=1)
    assert losses(tmp_path) == {1: 1.0}


def test_an_incomplete_superseded_row_is_dropped_and_others_are_kept(tmp_path: Path) -> None:
    (tmp_path / "metrics.superseded.jsonl").write_text('{"step": 7, "attempt": 1}\n{"step": 8, "att')
    tracker = started(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    tracker.rewind(0)
    assert [row["step"] for row in lines(tmp_path / "metrics.superseded.jsonl")] == [7, 1]


class PartialWrites:
    """File that writes at most seven bytes per call, as the operating system may."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def write(self, data: Any) -> int:
        return int(self._file.write(bytes(data[:7])))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


def test_a_row_is_complete_after_partial_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracker = started(tmp_path)
    monkeypatch.setattr(tracker, "_kept", PartialWrites(tracker._kept))
    tracker.log(1, {"train/loss": 1.0})
    tracker.log(2, {"train/loss": 2.0})
    assert losses(tmp_path) == {1: 1.0, 2: 2.0}


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Records file operations in order: "sync <name>", "cut <name>", "replace <name>"."""
    found: list[str] = []
    sync, cut, replace = os.fsync, os.truncate, os.replace

    def name(file: int) -> str:
        return Path(os.readlink(f"/proc/self/fd/{file}")).name

    monkeypatch.setattr("os.fsync", lambda file: (found.append(f"sync {name(file)}"), sync(file)))
    monkeypatch.setattr("os.truncate", lambda file, size: (found.append(f"cut {name(file)}"), cut(file, size)))
    monkeypatch.setattr("os.replace", lambda old, new: (found.append(f"replace {Path(new).name}"), replace(old, new)))
    return found


def test_superseded_rows_are_synced_before_the_metrics_are_truncated(tmp_path: Path, done: list[str]) -> None:
    tracker = started(tmp_path)
    tracker.log(1, {"train/loss": 1.0})
    done.clear()
    tracker.rewind(0)
    assert done[:2] == ["sync metrics.superseded.jsonl", "cut metrics.jsonl"]


def test_a_rewritten_file_is_synced_before_it_replaces_the_old_one(tmp_path: Path, done: list[str]) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 1, "attempt": 1}\n' + bytes(100) + b"\n")
    started(tmp_path, resumed_at=1)
    assert done[:2] == ["sync metrics.tmp", "replace metrics.jsonl"]
    assert [row["step"] for row in read_metrics(tmp_path)] == [1]


@pytest.mark.parametrize("rows", [10_000, 40_000])
def test_the_cost_of_a_rewind_does_not_depend_on_the_number_of_kept_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: int
) -> None:
    content = "".join(f'{{"step": {step}, "attempt": 1, "train/loss": {1 / step}}}\n' for step in range(1, rows + 1))
    (tmp_path / "metrics.jsonl").write_text(content)
    parsed = 0

    def counted(text: bytes) -> Any:
        nonlocal parsed
        parsed += 1
        return json.loads(text)

    monkeypatch.setattr("ddpforge.runs.metrics._row", counted)
    tracker = JSONLTracker()
    tracker.start(name="run", folder=tmp_path, config={"run": {"attempt": 2}}, resumed_at=rows)
    assert parsed < 2000
    tracker.rewind(rows - 4000)
    assert 4000 < parsed < 12_000

    monkeypatch.undo()
    tracker.log(rows, {"train/loss": 2.0})
    assert [row["step"] for row in read_metrics(tmp_path)] == [*range(1, rows - 3999), rows]
    assert (tmp_path / "metrics.superseded.jsonl").read_text() == content[content.index(f'{{"step": {rows - 3999},') :]


@given(attempts=st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_each_step_occurs_once_in_its_newest_version(
    attempts: list[tuple[int, int]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder, expected = tmp_path_factory.mktemp("run"), dict[int, float]()
    for number, (resumed_at, steps) in enumerate(attempts):
        tracker = started(folder, resumed_at)
        expected = {step: loss for step, loss in expected.items() if step <= resumed_at}
        for step in range(resumed_at + 1, resumed_at + 1 + steps):
            tracker.log(step, {"train/loss": float(number)})
            expected[step] = float(number)
    assert losses(folder) == expected


# --------------------------------------------------------------------------------------------- evaluations by followers
def evaluated(folder: Path, checkpoint: str, step: int, metrics: dict[str, float]) -> None:
    file = evaluation_file(folder, checkpoint)
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(line_of(step, 1, metrics))


def test_evaluations_by_followers_join_its_rows_at_their_step(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    for step in (1, 3):
        tracker.log(step, {"train/loss": 1.0, "samples": 8})
    evaluated(tmp_path, "step-000000003-aaaa", 3, {"eval/loss": math.nan})
    evaluated(tmp_path, "step-000000002-bbbb", 2, {"eval/loss": 0.1 + 0.2})
    evaluated(tmp_path, "step-000000004-cccc", 4, {})  # damaged: no row
    one, two, three = read_metrics(tmp_path)
    assert [row["step"] for row in (one, two, three)] == [1, 2, 3]
    assert two["eval/loss"] == 0.1 + 0.2
    assert math.isnan(three["eval/loss"])
    assert three["train/loss"] == 1.0
    assert three["time"] == lines(tmp_path / "metrics.jsonl")[1]["time"]
    assert list(read_evaluations(tmp_path)) == ["step-000000002-bbbb", "step-000000003-aaaa", "step-000000004-cccc"]


def test_a_rewind_supersedes_later_evaluations_by_followers(tmp_path: Path) -> None:
    tracker = started(tmp_path)
    evaluated(tmp_path, "step-000000002-bbbb", 2, {"eval/loss": 2.0})
    evaluated(tmp_path, "step-000000004-cccc", 4, {"eval/loss": 4.0})
    tracker.rewind(2)
    assert list(read_evaluations(tmp_path)) == ["step-000000002-bbbb"]
    assert [row["eval/loss"] for row in lines(tmp_path / "metrics.superseded.jsonl")] == [4.0]


def test_a_damaged_evaluation_by_a_follower_is_named(tmp_path: Path) -> None:
    started(tmp_path)
    evaluated(tmp_path, "step-000000002-bbbb", 2, {"eval/loss": 2.0})
    evaluation_file(tmp_path, "step-000000002-bbbb").write_text("{}\n")
    with pytest.raises(SetupError, match=r"step-000000002-bbbb.json, line 1 is not a row of metrics"):
        read_metrics(tmp_path)
