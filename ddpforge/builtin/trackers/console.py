"""Progress on stderr: a live display on a terminal; plain lines with the time in a pipe, a log file or CI."""

import os
import sys
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.text import Text

from ddpforge.interfaces import Tracker, active_kind
from ddpforge.machine import resident_memory

_PER_SECOND = 1  # display updates; each takes half a millisecond in a separate thread
_BAR = 30  # characters
_DIGITS = 9  # width of a metric of an evaluation, so that lines are in columns
_LABEL = 13  # columns before the text of a line of the summary
_STYLES = {"done": "green", "preempted": "yellow", "failed": "red", "diverged": "red"}
_SHORT = {"train/grad_norm": "grad norm"}


class ConsoleTracker(Tracker):
    """Shows the step, the training loss, the speed and the remaining time; prints a line for each evaluation.

    Without a terminal it prints a line every second at first, and gradually fewer, down to one every 30 seconds. In a
    notebook it updates a single line below the cell. On a terminal it draws a display every second, even if there are
    no new rows. The display also contains the current phase of training, the fraction of time that training waits for
    data, memory, and the newest metrics.

    It first prints a summary of model, data and device. It reads `config["run"]` (`total_steps`, `strategy`,
    `micro_batch`, `accumulation`) and `config["train"]`. Optional: the components of the recipe, and `parameters`,
    `trained`, `samples`, `sources`, `evaluated`, `steps_per_epoch`, `device` and `device_name` of the run.
    """

    def __init__(self) -> None:
        self.clock = time.monotonic
        self._where: Callable[[], tuple[str, int]] = lambda: ("", 0)

    def follow(self, where: Callable[[], tuple[str, int]]) -> None:
        """Shows the phase of training and the step that `where` returns."""
        self._where = where

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Prints a summary of the run."""
        self._total: int | None = config["run"]["total_steps"]
        self._step = resumed_at or 0
        self._started = self.clock()
        self._first: tuple[int, float] | None = None  # step and time of the first row: speed counts from here
        self._shown_at = -float("inf")
        self._waiting: Mapping[str, float] | None = None  # the last row, if it has not been shown
        self._newest: dict[str, float] = {}

        self._console = Console(stderr=True, force_jupyter=False)
        self._print(f"{name}{f' from step {resumed_at}' if resumed_at else ''}", style="bold")
        for line in _summary(folder, config):
            self._print_wrapped(line)
        self._live = self._display() if _redraws(self._console) else None
        self._line = _line_of_a_cell()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Shows a row of training metrics if one is due; always shows an evaluation."""
        self._step = step
        self._newest |= metrics
        if evaluation := _evaluation(metrics):
            width = len(str(self._total or step))
            self._print(f"{time.strftime('%H:%M:%S')} eval step {step:>{width}} {evaluation}", style="cyan")
            return

        if self._first is None:
            self._first = (step, self.clock())  # earlier steps include compilation and warm-up
        self._waiting = metrics
        if not self._live and self._is_due():
            self._show(metrics)

    def rewind(self, step: int) -> None:
        """Continues from `step`."""
        self._step, self._first, self._waiting = step, None, None

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Shows the last row if it was not shown, and prints the final state of the run."""
        # Without the step: a stopped run may have trained further than its last row.
        if self._live:
            self._live.stop()
        elif self._waiting:
            self._show(self._waiting)
        took = _span(self.clock() - self._started)
        self._print(
            f"{state} after {took}", style=_STYLES.get(state, "")
        )  # metrics are in the last evaluation, and in the output of the command

    # -- lines
    def _is_due(self) -> bool:
        now = self.clock()
        interval = 1.0 if self._line else min(max((now - self._started) / 10, 1.0), 30.0)
        return self._step == self._total or now - self._shown_at >= interval

    def _show(self, metrics: Mapping[str, float]) -> None:
        self._shown_at, self._waiting = self.clock(), None
        done = f"/{self._total} ({self._step / self._total:.0%})" if self._total else ""
        parts = [f"step {self._step}{done}", _loss(metrics.get("train/loss")), *self._speed(self._step, metrics)]
        text = " ".join([time.strftime("%H:%M:%S"), *filter(None, parts)])
        if self._line:
            self._line(text)
        else:
            self._print(text)

    def _speed(self, now_at: int, metrics: Mapping[str, float]) -> list[str]:
        """Returns steps and items per second, the wait for data, and the remaining time, as far as they are known.

        Steps and items per second are of the same time: since the row before. The remaining time is by the whole run,
        with evaluations.
        """
        found = _rates(metrics)
        if self._first is None:
            return found
        step, at = self._first
        if now_at <= step or self.clock() <= at:
            return found
        rate = (now_at - step) / (self.clock() - at)
        left = [f"eta {_span(max(0, self._total - now_at) / rate)}"] if self._total else []
        samples, per_second = metrics.get("samples"), metrics.get("train/samples_per_second")
        shown = per_second * self._step / samples if samples and per_second else rate
        return [f"{shown:.1f} step/s", *found, *left]

    def _print(self, text: str, *, style: str = "") -> None:
        self._console.print(Text(text, style), markup=False, highlight=False, soft_wrap=True)

    def _print_wrapped(self, text: str) -> None:
        """Prints a line of the summary; on a terminal, breaks it between words."""
        width = self._console.width if self._console.is_terminal else 0
        lines = [text]
        if len(text) > width > 0:
            indent = " " * _LABEL
            lines = textwrap.wrap(text, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
        for line in lines:
            self._print(line)

    # -- the display
    def _display(self) -> Live:
        _never_in_children()
        live = Live(get_renderable=self._frame, console=self._console, refresh_per_second=_PER_SECOND, transient=True)
        live.start()
        return live

    def _frame(self) -> Text:
        """Returns the current display; called in a separate thread, so that training does not wait for it."""
        phase, entered = self._where()
        step = max(self._step, entered - 1)
        done = f"{_bar(step / self._total)} {step}/{self._total} {step / self._total:.0%}" if self._total else ""
        lines = [[f"{done or f'step {step}'} {phase}"], [*self._speed(step, self._newest), *_memory()]]
        lines.append(_numbers(self._newest))
        shown = Text("\n".join(" · ".join(parts) for parts in lines if parts), overflow="ellipsis", no_wrap=True)
        shown.highlight_regex("━+", "green")
        return shown


def _redraws(console: Console) -> bool:
    """True if the console can overwrite lines."""
    return console.is_interactive and console.file.isatty() and not os.environ.get("CI")


def _line_of_a_cell() -> Callable[[str], None] | None:
    """Displays an empty line below the cell of a notebook that runs; returns a function that replaces it, or None."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    if getattr(shell, "kernel", None) is None:
        return None
    from IPython.display import display

    line = display({"text/plain": ""}, raw=True, display_id=True)  # type: ignore[no-untyped-call]
    return lambda text: line.update({"text/plain": text}, raw=True)


def _never_in_children(done: list[bool] = []) -> None:  # noqa: B006
    """Makes forked processes write directly to the terminal; registers this only once."""
    # A live display redirects all output through a lock. Its thread may hold that lock when a loader process forks.
    if not done:
        done.append(True)
        os.register_at_fork(after_in_child=_write_directly)


def _write_directly() -> None:
    for name in ("stdout", "stderr"):
        proxied = getattr(getattr(sys, name), "rich_proxied_file", None)
        if proxied is not None:
            setattr(sys, name, proxied)


def _bar(share: float) -> str:
    return ("━" * round(share * _BAR)).ljust(_BAR)


def _rates(metrics: Mapping[str, float]) -> list[str]:
    """Returns items per second, model FLOPs utilization, and the fraction of time that training waits for data."""
    counted = {name: value for name, value in metrics.items() if _is_rate(name)}
    found = [f"{value:,.{0 if value >= 10 else 1}f} {_items(name)}/s" for name, value in counted.items()]
    shares = {"mfu": metrics.get("perf/mfu"), "data": metrics.get("train/time/data")}
    return [*found, *(f"{name} {share:.0%}" for name, share in shares.items() if share is not None)]


def _is_rate(name: str) -> bool:
    return name.startswith("train/") and name.endswith("_per_second")


def _items(name: str) -> str:
    return name.removeprefix("train/").removesuffix("_per_second").replace("_", " ")


def _numbers(metrics: Mapping[str, float]) -> list[str]:
    """Returns the newest metrics without speed, samples and epoch."""
    odd = {"samples", "epoch", "perf/mfu"} | {
        name for name in metrics if name.startswith("train/time/") or _is_rate(name)
    }
    shown = {_SHORT.get(name, name.removeprefix("train/")): x for name, x in metrics.items() if name not in odd}
    return [f"{name} {value:.4g}" for name, value in shown.items()]


def _memory() -> list[str]:
    """Returns the used memory: of the GPU if this process uses one, otherwise of this process."""
    kind = active_kind()
    if kind and (found := kind.free_memory()):
        free, total = found
        return [f"{(total - free) / 2**30:.1f} of {total / 2**30:.0f} GiB of GPU memory"]
    return [f"{resident_memory() / 2**30:.1f} GiB"]


def _summary(folder: Path, config: Mapping[str, Any]) -> list[str]:
    """Returns a summary of the run: lines that start with a label."""
    run, train = config["run"], config["train"]
    said = {
        "model": [_used(config.get("model")), _parameters(run)],
        "weights": [_weights(run)],
        "data": [_used((config.get("data") or {}).get("train")), *_samples(run)],
        "batch": [_batch(run, train)],
        "length": [f"{run['total_steps']:,} steps" if run["total_steps"] else "", f"{train['length']}"],
        "optimizer": [_used(config.get("optimizer")), _rate(config.get("optimizer")), _schedule(config)],
        "strategy": [run["strategy"]],
        "device": [_device(run), train.get("precision", "")],
        "folder": [f"{folder}"],
    }
    lines = {word: ", ".join(filter(None, parts)) for word, parts in said.items()}
    return [f"  {word:<9}  {line}" for word, line in lines.items() if line]


def _used(component: Any) -> str:
    return str(component.get("use", "")) if isinstance(component, Mapping) else ""


def _device(run: Mapping[str, Any]) -> str:
    name = run.get("device_name")
    return f"{run.get('device') or ''}{f' ({name})' if name else ''}"


def _rate(optimizer: Any) -> str:
    return f"lr {optimizer['lr']}" if isinstance(optimizer, Mapping) and "lr" in optimizer else ""


def _schedule(config: Mapping[str, Any]) -> str:
    used = _used(config.get("schedule"))
    return f"schedule {used}" if used else ""


def _parameters(run: Mapping[str, Any]) -> str:
    count = run.get("parameters")
    if not count:
        return ""
    trained = run.get("trained", count)
    frozen = f" ({trained:,} trained, {count - trained:,} frozen)" if trained < count else ""
    held = run.get("held") or {}
    of_each = " and ".join(f"{bytes / 1e6:,.1f} MB of {kind}" for kind, bytes in held.items())
    return f"{count:,} parameters{frozen}{f', {of_each} a rank' if of_each else ''}"


def _weights(run: Mapping[str, Any]) -> str:
    """Returns the numbers of frozen and trained parameters with their dtypes; "" if all are trained."""
    frozen = run.get("frozen") or {}
    if not frozen:
        return ""
    each = " and ".join(f"{_millions(count)} in {dtype}" for dtype, count in frozen.items())
    return f"frozen: {each}, trained: {_millions(run['trained'])} in fp32"


def _millions(count: int) -> str:
    return f"{count / 1e6:,.1f} M parameters" if count >= 50_000 else f"{count:,} parameters"


def _samples(run: Mapping[str, Any]) -> list[str]:
    samples, epoch = run.get("samples"), run.get("steps_per_epoch")
    found = [f"{samples:,} samples" if samples else "", f"{epoch:,} steps per epoch" if epoch else ""]
    if shares := run.get("sources"):
        found.insert(1, " + ".join(f"{100 * share:.3g}% {name}" for name, share in shares.items()))
    for name, count in (run.get("evaluated") or {}).items():
        found.append(f"{count:,} samples to evaluate{f' {name}' if name else ''} on" if count else "")
    return found


def _batch(run: Mapping[str, Any], train: Mapping[str, Any]) -> str:
    batch, passes, micro = train["global_batch"], run["accumulation"], run["micro_batch"]
    if tokens := train.get("max_tokens"):
        return f"{batch} per step, at most {tokens:,} tokens per forward pass"
    size = batch // (passes * micro)
    ranks = f"{size} ranks" if size > 1 else "1 rank"
    return f"{batch} per step = {micro} per forward pass × {passes} accumulation × {ranks}"


def _evaluation(metrics: Mapping[str, float]) -> str:
    """Returns the evaluation metrics among `metrics` on one line, or an empty string."""
    shown = {key.removeprefix("eval/"): f"{value:.4g}" for key, value in metrics.items() if key.startswith("eval/")}
    return " ".join(f"{name} {value:<{_DIGITS}}" for name, value in shown.items()).rstrip()


def _loss(loss: float | None) -> str:
    if loss is None:
        return ""
    return f"loss {loss:.4f}" if abs(loss) >= 0.001 else f"loss {loss:.3g}"


def _span(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02}s" if minutes else f"{rest}s"
    return f"{minutes // 60}h{minutes % 60:02}m"
