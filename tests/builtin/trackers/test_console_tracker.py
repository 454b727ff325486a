"""Console output: timed lines in a log file, a progress bar on a terminal."""

import io
import itertools
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ddpforge.builtin.trackers.console import ConsoleTracker, _write_directly

STAMP = r"\d\d:\d\d:\d\d"
HEAD = 5  # lines before the first row


class Clock:
    """Clock that tests set by hand."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def _plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CI", "NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "COLUMNS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm")


def config(total: int | None = 300, *, accumulation: int = 4, micro_batch: int = 32) -> dict[str, Any]:
    return {
        "train": {"length": "2h", "global_batch": 256},
        "run": {
            "total_steps": total,
            "strategy": "ddp",
            "accumulation": accumulation,
            "micro_batch": micro_batch,
        },
    }


def started(config: dict[str, Any], resumed_at: int | None = None) -> tuple[ConsoleTracker, Clock]:
    tracker, clock = ConsoleTracker(), Clock()
    tracker.clock = clock
    tracker.start(name="digits", folder=Path("runs/digits"), config=config, resumed_at=resumed_at)
    return tracker, clock


def train(tracker: ConsoleTracker, clock: Clock, steps: range, seconds: float) -> None:
    for step in steps:
        clock.now += seconds
        tracker.log(step, {"train/loss": 1 / step, "samples": 256 * step})


def test_output_without_a_terminal_is_plain_lines(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config())
    train(tracker, clock, range(1, 301), seconds=1 / 64)
    tracker.log(300, {"eval/loss": 0.12, "eval/accuracy": 0.975})
    tracker.finish(state="done", summary={"train/loss": 1 / 300, "eval/loss": 0.12, "eval/accuracy": 0.975})

    out, err = capsys.readouterr()
    assert out == ""
    assert [re.sub(STAMP, "10:01:32", line) for line in err.splitlines()] == [
        "digits",
        "  batch      256 per step = 32 per forward pass × 4 accumulation × 2 ranks",
        "  length     300 steps, 2h",
        "  strategy   ddp",
        "  folder     runs/digits",
        "10:01:32 step 1/300 (0%) loss 1.0000",
        "10:01:32 step 65/300 (22%) loss 0.0154 64.0 step/s eta 4s",
        "10:01:32 step 129/300 (43%) loss 0.0078 64.0 step/s eta 3s",
        "10:01:32 step 193/300 (64%) loss 0.0052 64.0 step/s eta 2s",
        "10:01:32 step 257/300 (86%) loss 0.0039 64.0 step/s eta 1s",
        "10:01:32 step 300/300 (100%) loss 0.0033 64.0 step/s eta 0s",
        "10:01:32 eval step 300 loss 0.12      accuracy 0.975",
        "done after 5s",
    ]
    assert "\r" not in err
    assert "\x1b" not in err


def test_interval_of_lines_grows_to_30_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config(total=2000))
    train(tracker, clock, range(1, 2001), seconds=1.0)
    steps = [int(step) for step in re.findall(r"step (\d+)/", capsys.readouterr().err)]
    gaps = [b - a for a, b in itertools.pairwise(steps[:-1])]
    assert steps[:5] == [1, 2, 3, 4, 5]
    assert gaps == sorted(gaps)
    assert gaps[-1] == 30
    assert steps[-1] == 2000


def test_last_row_is_printed_if_training_ends_early(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config())
    train(tracker, clock, range(1, 8), seconds=1 / 64)
    tracker.finish(state="preempted", summary={})
    assert re.fullmatch(
        rf"{STAMP} step 1/300 .*\n{STAMP} step 7/300 \(2%\) loss 0\.1429 .*\npreempted after 0s\n",
        capsys.readouterr().err.split("\n", HEAD)[HEAD],
    )


def test_every_evaluation_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, _ = started(config())
    for step in (1, 2, 3):
        tracker.log(step, {"eval/loss": float("nan")})
    shown = [line[len("10:01:32 ") :] for line in capsys.readouterr().err.splitlines()[HEAD:]]
    assert shown == [f"eval step   {step} loss nan" for step in (1, 2, 3)]


def test_resumed_run_with_a_wall_time_prints_its_start_step_and_no_eta(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config(total=None, accumulation=1, micro_batch=128), resumed_at=100)
    train(tracker, clock, range(101, 103), seconds=2.0)
    opening, batch, length, *_, first, second = capsys.readouterr().err.splitlines()
    assert opening == "digits from step 100"
    assert batch == "  batch      256 per step = 128 per forward pass × 1 accumulation × 2 ranks"
    assert length == "  length     2h"
    assert first.endswith("step 101 loss 0.0099")
    assert second.endswith("step 102 loss 0.0098 0.5 step/s")


def test_speed_is_measured_anew_after_a_rewind(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config())
    train(tracker, clock, range(1, 4), seconds=1.0)
    tracker.rewind(1)
    train(tracker, clock, range(2, 4), seconds=2.0)
    assert capsys.readouterr().err.splitlines()[-1].endswith("step 3/300 (1%) loss 0.3333 0.5 step/s eta 9m54s")


def test_one_rank_is_printed_in_the_singular(capsys: pytest.CaptureFixture[str]) -> None:
    started(config(accumulation=8))
    assert "256 per step = 32 per forward pass × 8 accumulation × 1 rank\n" in capsys.readouterr().err


class Terminal(io.StringIO):
    """Stream that declares to be a terminal."""

    def isatty(self) -> bool:
        return True


def test_line_includes_the_speed_columns_of_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config(total=None))
    speeds = {
        "train/samples_per_second": 1165.2,
        "train/tokens_per_second": 9.55,
        "train/time/data": 0.034,
        "perf/mfu": 0.415,
    }
    for step in (1, 2):
        clock.now += 2.0
        tracker.log(step, {"train/loss": 0.5} | speeds)
    last = capsys.readouterr().err.splitlines()[-1]
    assert last.endswith("step 2 loss 0.5000 0.5 step/s 1,165 samples/s 9.6 tokens/s mfu 42% data 3%")


def test_steps_and_samples_per_second_are_of_the_same_time(capsys: pytest.CaptureFixture[str]) -> None:
    tracker, clock = started(config(total=None))
    for step in (1, 2):
        clock.now += 2.0  # the run is slower than the last row, by its evaluations
        tracker.log(step, {"train/loss": 0.5, "samples": 256 * step, "train/samples_per_second": 5120.0})
    assert capsys.readouterr().err.splitlines()[-1].endswith("20.0 step/s 5,120 samples/s")


def test_a_long_line_of_the_summary_is_broken_between_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", terminal := Terminal())
    monkeypatch.setenv("COLUMNS", "40")
    tracker, _ = started(config())
    tracker.finish(state="done", summary={})
    text = re.sub(r"\x1b\[[0-9;?]*\w", "", terminal.getvalue())
    batch = text[text.index("  batch") : text.index("  length")].splitlines()
    assert batch[0].split() == ["batch", "256", "per", "step", "=", "32", "per"]
    assert max(map(len, batch)) <= 40
    assert batch[1].startswith(" " * 13 + "forward")


def test_terminal_display_is_removed_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tracker, clock = started(config())
    train(tracker, clock, range(1, 301), seconds=1 / 64)
    tracker.log(300, {"eval/loss": 0.12})
    tracker.finish(state="done", summary={"eval/loss": 0.12})

    shown = re.sub(r"\x1b\[\d*m", "", terminal.getvalue())
    assert "300/300 100%" in shown
    assert "64.0 step/s · eta 0s" in shown
    assert re.search(r"\d\.\d GiB", shown)
    assert "loss 0.003333 · eval/loss 0.12" in shown
    assert shown.endswith("done after 5s\n")
    assert "\x1b[32mdone after 5s\x1b[0m" in terminal.getvalue()
    assert shown.count("eval step 300 loss 0.12\n") == 1


def test_display_advances_between_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Advances between rows, which may be minutes apart; step 41 is running here, 40 are done."""
    monkeypatch.setattr("sys.stderr", Terminal())
    tracker, clock = started(config())
    tracker.follow(lambda: ("backward", 41))
    tracker.log(1, {"train/loss": 0.5, "train/time/data": 0.25})
    clock.now += 39 / 64
    drawn = Console(file=io.StringIO(), width=100)
    drawn.print(tracker._frame())
    tracker.finish(state="preempted", summary={})
    lines = drawn.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert re.fullmatch(r"━+ +40/300 13% backward", lines[0].rstrip())
    assert lines[1].startswith("64.0 step/s · data 25% · eta 4s · ")
    assert lines[2] == "loss 0.5"


def test_forked_process_prints_directly_to_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    tracker, _ = started(config())
    proxy = sys.stderr
    assert proxy is not terminal
    _write_directly()
    assert sys.stderr is terminal
    sys.stderr = proxy
    tracker.finish(state="preempted", summary={})
    assert sys.stderr is terminal


@pytest.mark.parametrize(("name", "value"), [("CI", "true"), ("TERM", "dumb")])
def test_terminal_that_cannot_redraw_gets_plain_lines(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = Terminal()
    monkeypatch.setattr("sys.stderr", terminal)
    monkeypatch.setenv(name, value)
    tracker, clock = started(config())
    train(tracker, clock, range(1, 2), seconds=1 / 64)
    assert re.search(rf"{STAMP} step 1/300", terminal.getvalue())
    assert "\r" not in terminal.getvalue()


def test_forced_colour_does_not_enable_the_display_for_a_pipe(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    tracker, clock = started(config())
    train(tracker, clock, range(1, 2), seconds=1 / 64)
    assert "\r" not in capsys.readouterr().err


def opening(capsys: pytest.CaptureFixture[str], **facts: Any) -> list[str]:
    described = config()
    described["run"] |= facts
    described["train"]["precision"] = "bf16"
    described["model"] = {"use": "cnn", "classes": 10}
    described["data"] = {"train": {"use": "digits"}}
    described["optimizer"] = {"use": "adamw", "lr": 0.003}
    described["schedule"] = {"use": "cosine"}
    started(described)
    return capsys.readouterr().err.splitlines()


def test_header_describes_model_data_optimizer_and_device(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"parameters": 4810, "trained": 4810, "samples": 1437, "steps_per_epoch": 23, "device": "cpu"}
    assert opening(capsys, **facts, evaluated={"": 360}) == [
        "digits",
        "  model      cnn, 4,810 parameters",
        "  data       digits, 1,437 samples, 23 steps per epoch, 360 samples to evaluate on",
        "  batch      256 per step = 32 per forward pass × 4 accumulation × 2 ranks",
        "  length     300 steps, 2h",
        "  optimizer  adamw, lr 0.003, schedule cosine",
        "  strategy   ddp",
        "  device     cpu, bf16",
        "  folder     runs/digits",
    ]


def test_header_describes_frozen_parameters_and_gpu(capsys: pytest.CaptureFixture[str]) -> None:
    facts = {"parameters": 4810, "trained": 650, "samples": None, "steps_per_epoch": None, "device": "cuda:0"}
    facts["held"] = {"weights": 2_500_000}
    lines = opening(capsys, **facts, device_name="NVIDIA H100", evaluated={"easy": 5, "hard": None})
    assert lines[1:3] == [
        "  model      cnn, 4,810 parameters (650 trained, 4,160 frozen), 2.5 MB of weights a rank",
        "  data       digits, 5 samples to evaluate easy on",
    ]
    assert "  device     cuda:0 (NVIDIA H100), bf16" in lines
