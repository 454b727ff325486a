"""Output of commands: tables, readable numbers, and curves in the terminal or as a picture."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

import click

from ddpforge.api import thinned
from ddpforge.errors import SetupError, UsageError, pip_install

WAY = "--wide shows all columns"
_GAP = "  "  # between columns
_NARROWEST = 12  # characters; a narrower last column is not wrapped


def terminal_width() -> int | None:
    """Returns the columns of the terminal on stdout; None if stdout is not a terminal."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def print_table(
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    droppable: Sequence[str] = (),
    wide: bool = False,
    way: str = WAY,
) -> None:
    """Prints rows under a header to stdout.

    On a terminal, columns in `droppable` are dropped in this order until the table fits, and the last column is
    wrapped. With `wide`, and in a pipe, all columns are printed. `way` is the hint for dropped columns.
    """
    rows = [[printable(cell) for cell in row] for row in rows]
    width = None if wide else terminal_width()
    dropped = [] if width is None else _too_many(header, rows, droppable, width)
    kept = [place for place, name in enumerate(header) if name not in dropped]
    header, rows = [header[place] for place in kept], [[row[place] for place in kept] for row in rows]
    widths = _widths(header, rows)
    room = None if width is None else width - sum(widths[:-1]) - len(_GAP) * (len(widths) - 1)
    for number, row in enumerate((header, *rows)):
        *cells, last = row
        fits = room is None or room < _NARROWEST or len(last) <= room
        texts = [last] if fits or room is None else textwrap.wrap(last, room, break_on_hyphens=False)
        for line, text in enumerate(texts):
            before = cells if not line else [""] * len(cells)
            padded = [cell.ljust(size) for cell, size in zip(before, widths, strict=False)]
            if not number:
                click.secho(_GAP.join([*padded, text]).rstrip(), bold=True)
                continue
            first, *others = [*padded, text]
            click.echo(_GAP.join([first, *map(coloured, others)]).rstrip())
    if dropped:
        left_out = f"not shown: {', '.join(dropped)}; {way}"
        click.echo(textwrap.fill(left_out, width or 120, break_long_words=False, break_on_hyphens=False), err=True)


def _too_many(header: Sequence[str], rows: Sequence[Sequence[str]], droppable: Sequence[str], width: int) -> list[str]:
    """Returns the columns to drop, so that the table fits into `width` characters; its last column may be wrapped."""
    dropped: list[str] = []
    for name in [None, *(name for name in droppable if name in header)]:
        dropped += [] if name is None else [name]
        sizes = [size for title, size in zip(header, _widths(header, rows), strict=True) if title not in dropped]
        if header[-1] not in droppable:
            sizes[-1] = min(sizes[-1], 2 * _NARROWEST)
        if sum(sizes) + len(_GAP) * (len(sizes) - 1) <= width:
            break
    return dropped


def _widths(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[int]:
    return [max(map(len, column)) for column in zip(header, *rows, strict=True)]


_COLOURS = {  # of cells that are a verdict or a state
    **dict.fromkeys(("done", "fits", "fastest", "ok"), "green"),
    **dict.fromkeys(("failed", "diverged", "killed", "unreadable", "too much", "error"), "red"),
    **dict.fromkeys(("preempted", "warning"), "yellow"),
}


def coloured(cell: str) -> str:
    """Returns a verdict or a state in its colour, and other text unchanged; in a pipe, click removes the colour."""
    colour = _COLOURS.get(cell.strip())
    return click.style(cell, fg=colour) if colour else cell


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
    unit, length = next(one for one in _UNITS if seconds >= 2 * one[1] or one[1] == 1)
    return f"{max(seconds, 0) / length:.0f} {unit}"


_UNITS = (("d", 86400), ("h", 3600), ("min", 60), ("s", 1))


def ages(seconds: Sequence[float]) -> list[str]:
    """Returns durations for a column: in one unit, that of the shortest, unless they differ a thousand times."""
    if not seconds:
        return []
    unit, length = next(one for one in _UNITS if min(seconds) >= 2 * one[1] or one[1] == 1)
    if max(seconds) >= 1000 * length:
        return list(map(age, seconds))
    return [f"{max(one, 0) / length:.0f} {unit}" for one in seconds]


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
