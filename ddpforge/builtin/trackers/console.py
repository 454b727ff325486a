"""Progress on stderr: a bar on a terminal; plain timed lines in a pipe, a log file or CI."""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from ddpforge.interfaces import Tracker


class ConsoleTracker(Tracker):
    """Shows the step, the training loss, the speed and the time that is left; evaluations get a line each.

    Without a terminal that is a line every second, then less and less often, every 30 seconds in the end.
    Begins with two lines of what is trained, on what and where.
    Reads `config["run"]` (`total_steps`, `strategy`, `micro_batch`, `accumulation`) and `config["train"]`; also, where
    they are there, `parameters`, `trained`, `samples`, `steps_per_epoch` and `device`.
    """

    def __init__(self) -> None:
        self.clock = time.monotonic

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Prints what is about to run."""
        self._total: int | None = config["run"]["total_steps"]
        self._step = resumed_at or 0
        self._started = self.clock()
        self._first: tuple[int, float] | None = None  # step and time of the first row: speed counts from here
        self._shown_at = -float("inf")
        self._waiting: Mapping[str, float] | None = None  # the last row, while it has not been shown

        self._console = Console(stderr=True)
        self._print(_opening(name, config, resumed_at))
        self._print(f"  {_summary(folder, config)}")
        self._bar = _bar(self._console)
        self._task = self._bar.add_task("", total=self._total, completed=self._step, numbers="")
        self._bar.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a row of training metrics when one is due, and an evaluation always."""
        self._step = step
        if evaluation := _evaluation(metrics):
            self._print(f"eval step {step} {evaluation}")
            return

        self._waiting = metrics
        if self._is_due():
            self._show(metrics)

    def rewind(self, step: int) -> None:
        """Counts on from `step`."""
        self._step, self._first, self._waiting = step, None, None

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Shows the last row if that is still to be done, and prints how the run ended.

        Not at which step: a run that is stopped may have come further than its last row.
        """
        if self._waiting:
            self._show(self._waiting)
        self._bar.stop()
        took = _span(self.clock() - self._started)
        self._print(f"{state} after {took} {_evaluation(summary)}".rstrip())

    def _is_due(self) -> bool:
        now = self.clock()
        interval = min(max((now - self._started) / 10, 1.0), 30.0) if self._bar.disable else 0.1
        return self._step == self._total or now - self._shown_at >= interval

    def _show(self, metrics: Mapping[str, float]) -> None:
        now = self._shown_at = self.clock()
        self._waiting = None

        numbers = _loss(metrics.get("train/loss")) + self._speed(now)
        self._bar.update(self._task, completed=self._step, numbers=numbers, refresh=True)
        if self._bar.disable:
            done = f"/{self._total} ({self._step / self._total:.0%})" if self._total else ""
            self._print(f"{time.strftime('%H:%M:%S')} step {self._step}{done} {numbers}".rstrip())

    def _speed(self, now: float) -> str:
        if self._first is None:
            self._first = (self._step, now)  # the steps up to here contain compilation and warming up
            return ""
        step, at = self._first
        if self._step == step or now <= at:
            return ""
        rate = (self._step - step) / (now - at)
        left = f" eta {_span((self._total - self._step) / rate)}" if self._total else ""
        return f"{rate:.1f} step/s{left}"

    def _print(self, line: str) -> None:
        self._console.print(line, markup=False, highlight=False, soft_wrap=True)


def _bar(console: Console) -> Progress:
    """A progress bar, disabled where a line cannot be drawn over. No thread: rows move it, and only they."""
    redraws = console.is_interactive and console.file.isatty() and not os.environ.get("CI")
    return Progress(
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[numbers]}", markup=False),
        console=console,
        auto_refresh=False,
        transient=True,
        disable=not redraws,
    )


def _opening(name: str, config: Mapping[str, Any], resumed_at: int | None) -> str:
    run, train = config["run"], config["train"]
    batch, passes, micro = train["global_batch"], run["accumulation"], run["micro_batch"]
    size = batch // (passes * micro)
    steps = f"{run['total_steps']} steps" if run["total_steps"] else f"for {train['length']}"
    start = f" from step {resumed_at}" if resumed_at else ""
    ranks = f"{size} ranks" if size > 1 else "1 rank"
    batches = f"global batch {batch} = {ranks} x {passes} x {micro}"
    return f"{name}: {run['strategy']}, {steps}{start}, {batches}"


def _summary(folder: Path, config: Mapping[str, Any]) -> str:
    """The model, the data, what computes and where it all goes."""
    run, parts = config["run"], []
    if count := run.get("parameters"):
        trained = run.get("trained", count)
        frozen = f", {trained:,} trained and {count - trained:,} frozen" if trained < count else ""
        parts.append(f"{count:,} parameters{frozen}")
    if samples := run.get("samples"):
        epoch = run.get("steps_per_epoch")
        parts.append(f"{samples:,} samples{f', {epoch:,} steps per epoch' if epoch else ''}")
    if device := run.get("device"):
        parts.append(f"{config['train'].get('precision', 'fp32')} on {device}")
    return "; ".join([*parts, f"folder {folder}"])


def _evaluation(metrics: Mapping[str, float]) -> str:
    """The evaluation metrics among `metrics` on one line, or nothing."""
    return " ".join(
        f"{key.removeprefix('eval/')} {value:.4g}" for key, value in metrics.items() if key.startswith("eval/")
    )


def _loss(loss: float | None) -> str:
    if loss is None:
        return ""
    return f"loss {loss:.4f} " if abs(loss) >= 0.001 else f"loss {loss:.3g} "


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
