"""Draws curves of runs: in the terminal, and as a picture."""

import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from ddpforge.cli.tables import printable
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.runs.comparison import thinned

Lines = Mapping[str, Sequence[tuple[float, float]]]  # by run: steps, or what else is on the x axis, and values

_WIDTH, _HEIGHT = 80, 18  # of a plot where no terminal says otherwise
_MOST = 2000  # points of a line in a picture
_FEW = 40  # points that are marked each: a single one is no line
_MARKERS = ("braille", "dot", "x", "sd", "heart")  # in the terminal, beside colours


def in_terminal(metric: str, lines: Lines) -> str:
    """A plot of the lines as text, with colours if it goes to a terminal."""
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


def refuse_without_library() -> None:
    """Raises EnvironmentProblem where no picture can be drawn."""
    _library("matplotlib")


def as_picture(path: Path, curves: Mapping[str, Lines], *, x: str = "step", logarithmic: bool = False) -> None:
    """Writes a picture in the format that the file's name tells, one plot for each metric; `x` names their axis."""
    refuse_without_library()
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
        raise EnvironmentProblem(
            f"curves are drawn by {name}, which is not installed", hints=["pip install 'ddpforge[plot]'"]
        ) from error
