"""Output of commands: tables, readable numbers, and curves in the terminal or as a picture."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import click

from ddpforge.errors import SetupError, UsageError, pip_install
from ddpforge.runs.summary import thinned


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Prints rows under a header to stdout."""
    rows = [[printable(cell) for cell in row] for row in rows]
    if sys.stdout.isatty():
        from rich.box import SIMPLE_HEAD
        from rich.console import Console
        from rich.table import Table

        table = Table(*header, box=SIMPLE_HEAD)
        for row in rows:
            table.add_row(*row)
        Console(markup=False, highlight=False).print(table)  # brackets in a cell are TOML, not styles
        return

    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    for row in (header, *rows):
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def printable(text: str) -> str:
    """Returns text with control characters escaped, so that text from files cannot control the terminal."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


def size(count: int) -> str:
    """Returns a number of bytes in words: 1,234 B, 56.7 MB."""
    if count < 10_000:
        return f"{count:,} B"
    value = float(count)
    for unit in ("kB", "MB", "GB", "TB"):
        value /= 1000
        if value < 1000 or unit == "TB":
            break
    return f"{value:.1f} {unit}"


def counted(count: int, noun: str) -> str:
    """Returns a count with its noun: 1 tensor, 1,234 tensors."""
    return f"{count:,} {noun}{'s' * (count != 1)}"


def span(seconds: float) -> str:
    """Returns a duration in its two largest units: 5s, 3m05s, 2h10m, 4d03h."""
    rest = max(0, round(seconds))
    for length, unit, smaller, name in ((86400, "d", 3600, "h"), (3600, "h", 60, "m"), (60, "m", 1, "s")):
        if rest >= length:
            return f"{rest // length}{unit}{rest % length // smaller:02}{name}"
    return f"{rest}s"


def age(seconds: float) -> str:
    """Returns a duration in its largest unit: 90 s, 5 min, 3 h, 4 d."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"


def number(value: float | None) -> str:
    """Returns a metric with four digits; "" if it is None."""
    return "" if value is None else f"{value:.4g}"


# ---------------------------------------------------------------------------------------------- curves
Lines = Mapping[str, Sequence[tuple[float, float]]]  # by run: x (the step, in most plots) and y of each point

_WIDTH, _HEIGHT = 80, 18  # default size of a plot without a terminal
_MOST = 2000  # maximum points of a line in a picture
_FEW = 40  # a line with fewer points also has markers, because a single point draws no line
_MARKERS = ("braille", "dot", "x", "sd", "heart")  # in the terminal, in addition to colours


def in_terminal(metric: str, lines: Lines) -> str:
    """Returns a plot of the lines as text, with colours if stdout is a terminal."""
    plot = _library("plotext")
    columns = min(shutil.get_terminal_size((_WIDTH, _HEIGHT)).columns, 160)
    plot.clear_figure()
    plot.plotsize(columns, _HEIGHT)
    plot.title(printable(metric))
    plot.xlabel("step")
    for number, (run, points) in enumerate(lines.items()):
        steps, values = zip(*thinned(points, 4 * columns), strict=True)
        plot.plot(steps, values, label=printable(run), marker=_MARKERS[number % len(_MARKERS)])
    drawn = str(plot.build())
    return drawn if sys.stdout.isatty() else str(plot.uncolorize(drawn))


def reject_without_library() -> None:
    """Raises SetupError if matplotlib is not installed."""
    _library("matplotlib")


def as_picture(path: Path, curves: Mapping[str, Lines], *, x: str = "step", logarithmic: bool = False) -> None:
    """Writes a picture with one plot per metric, in the format of the file's suffix. `x` is the label of the x axis."""
    reject_without_library()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 4 * len(curves)), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, (metric, lines) in zip(figure.subplots(len(curves), squeeze=False)[:, 0], curves.items(), strict=True):
        for run, points in lines.items():
            axes.plot(*zip(*thinned(points, _MOST), strict=True), label=run, marker="." if len(points) < _FEW else "")
        axes.set(title=metric, xlabel=x, xscale="log" if logarithmic else "linear")
        axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}", hints=["e.g. --picture curves.png"]) from error


def _library(name: str) -> ModuleType:
    from importlib import import_module

    try:
        return import_module(name)
    except ImportError as error:
        raise SetupError(f"curves need {name}, which is not installed", hints=[pip_install("plot")]) from error
