"""`ddpforge parity`: trains a recipe under several strategies, and reports where they diverge."""

import json
import math
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from ddpforge.cli import complain
from ddpforge.cli.options import json_option, recipe_argument, sets_options
from ddpforge.cli.tables import terminal_width

if TYPE_CHECKING:
    from ddpforge.api import Excess, Point, Quantity
    from ddpforge.tools.parity.runs import ParityReport, Verdict

_COLUMNS = {"train/loss": "loss", "train/grad_norm": "gradient norm", "weights": "weights"}


@click.command()
@recipe_argument
@click.option(
    "--strategies",
    multiple=True,
    required=True,
    metavar="NAME[:OPTION...][@RANKS],...",
    help="Strategies to compare, the reference first: ddp,fsdp,deepspeed:3 or single@1,./mine.py:Mine; repeatable.",
)
@click.option(
    "-n", "--nproc", type=click.IntRange(1, 1024), help="Processes for each; default: one per GPU, and at least two."
)
@click.option(
    "--steps", type=click.IntRange(1, 2**20), default=20, show_default=True, help="Maximum number of steps to train."
)
@sets_options
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    help="Largest relative difference of the loss that counts as rounding; the other tolerances scale with it. "
    "Default: measured, with two more runs of the first strategy.",
)
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Keep the runs' folders in DIR, which must be empty.",
)
@json_option
def parity(
    recipe: str,
    strategies: tuple[str, ...],
    nproc: int | None,
    steps: int,
    sets: tuple[str, ...],
    tolerance: float | None,
    out: Path | None,
    as_json: bool,
) -> None:
    """Train RECIPE under several strategies and compare them with the first.

    All begin with the same weights and use the same samples in the same order. The comparison covers loss, gradient
    norm and learning rate at every step, each gradient of the first step, and the weights and the evaluation after the
    last step. A difference is rounding if one unit in the last place of the initial weights explains it: two more runs
    of the first strategy measure this. A run that fails has a row with its error, and the others are compared. Exit
    codes: 0 the same, 1 they diverge, 2 usage or recipe, otherwise that of the first run that failed.
    """
    from ddpforge.ranks.logs import keep_output
    from ddpforge.tools.parity.runs import RunFailed
    from ddpforge.tools.parity.runs import parity as compare

    keep_output()
    with ExitStack() as stack:
        folder = out or Path(stack.enter_context(TemporaryDirectory(prefix="ddpforge-parity-")))
        try:
            report = compare(
                recipe,
                strategies,
                ranks=nproc or _processes(),
                steps=steps,
                out=folder,
                sets=sets,
                tolerance=tolerance,
                say=lambda text: click.echo(text, err=True),
            )
        except RunFailed as error:
            complain(error)
            raise SystemExit(error.code) from None

    click.echo(json.dumps(report.as_dict()) if as_json else _text(report))
    for failure in report.failed:
        complain(failure)
    if not report.same:
        raise SystemExit(report.failed[0].code if report.failed else 1)


def _processes() -> int:
    from ddpforge.api import accelerators

    return max(2, accelerators())


# ---------------------------------------------------------------------------------------------- as text
def _text(report: "ParityReport") -> str:
    reference, *others = report.verdicts
    header = ["strategy", "ranks", *_COLUMNS.values()]
    rows = [[verdict.spec.text, str(verdict.spec.ranks), *_cells(verdict)] for verdict in report.verdicts]
    ends = [click.style("verdict", bold=True), "reference", *map(_verdict, others)]
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=True)), end])
        for row, end in zip([header, *rows], ends, strict=True)
    ]
    lines += [
        "",
        f"Largest relative differences from `{reference.spec.text}` in {reference.steps} steps, in {report.precision}.",
        _expected(report),
    ]
    lines += [text for verdict in others for text in _worst(verdict)]
    if any(verdict.averages == "weights" for verdict in report.verdicts):
        lines += ["If ranks average weights instead of gradients, there is no gradient norm to compare."]
    if any(verdict.drift and verdict.spec.ranks != reference.spec.ranks for verdict in others):
        lines += ["Dropout and BatchNorm depend on the number of ranks: compare equal numbers, or disable them."]
    table, prose = lines[: len(rows) + 1], lines[len(rows) + 1 :]
    width = terminal_width()
    return "\n".join([*table, *(click.wrap_text(line, width) if width else line for line in prose)])


def _expected(report: "ParityReport") -> str:
    """Returns the tolerances: as they were measured, or as --tolerance sets them."""
    given = report.tolerances
    allowed = {"train/loss": given.loss, "train/grad_norm": given.grad_norm, "weights": given.weights}
    allowed |= {one.name: one.tolerance for one in report.measured if one.name in allowed}
    parts = ", ".join(f"{_COLUMNS[name]} {value:.0e}" for name, value in allowed.items())
    how = "Measured rounding explains" if report.measured else "Expected from rounding:"
    return f"{how} {parts} (relative to their change in training)."


def _worst(verdict: "Verdict") -> list[str]:
    """Returns a line for gradients and for updates that rounding does not explain, with the worst five parameters."""
    names = {"gradients": "gradients at step 1", "updates": f"change of the weights in {verdict.steps} steps"}
    return [
        f"{verdict.spec.text}, {names[one.name]}: {', '.join(map(_excess, one.worst))}"
        for one in verdict.quantities
        if one.name in names and one.worst
    ]


def _excess(one: "Excess") -> str:
    return f"{one.name} " + (f"× {one.multiple:.4g}" if one.multiple is not None else f"by {one.difference:.1e}")


def _cells(verdict: "Verdict") -> list[str]:
    found = {quantity.name: quantity for quantity in verdict.quantities}
    return [_largest(found[name]) if name in found else "" for name in _COLUMNS]


def _largest(quantity: "Quantity") -> str:
    point = quantity.largest
    step = "" if len(quantity.points) == 1 or not point.difference else f" at {point.step}"
    return f"{point.difference:.1e}{step}" if point.difference else "0"


def _verdict(verdict: "Verdict") -> str:
    if verdict.failed:
        return f"{click.style('failed', fg='red')}: {verdict.failed.reason}"
    if verdict.drift is None:
        return click.style("same", fg="green")
    return f"{click.style('drifts', fg='red')}: {_where(*verdict.drift)}"


def _where(quantity: "Quantity", point: "Point") -> str:
    if quantity.name == "steps":
        return f"ended after {point.value:.0f} steps instead of {point.reference:.0f}"
    if quantity.where:
        apart = "" if math.isinf(point.difference) else f" by {point.difference:.1e}"
        return f"{quantity.name} at step {point.step}{apart}, mostly in {quantity.where}"
    return f"{quantity.name} at step {point.step} ({_two(point.value, point.reference)})"


def _two(value: float | None, reference: float | None) -> str:
    """Returns both numbers in words, with enough digits to show their difference."""
    if value is None or reference is None:
        return f"{'absent' if value is None else value} instead of {'absent' if reference is None else reference}"
    texts = ((f"{value:.{digits}g}", f"{reference:.{digits}g}") for digits in range(5, 18))
    mine, theirs = next((pair for pair in texts if len(set(pair)) == 2), (str(value), str(reference)))
    return f"{mine} instead of {theirs}"
