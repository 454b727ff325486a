"""`ddpforge batch-size` and `ddpforge lr-range`: short trainings without a run's folder."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Sequence

import click

from ddpforge.cli.ending import ending, results_alone
from ddpforge.cli.options import SizeParam, json_option, recipe_argument, sets_options


@click.command("batch-size")
@recipe_argument
@sets_options
@click.option(
    "--memory",
    "budget",
    type=SizeParam(),
    metavar="MEMORY",
    help="Memory available to a rank, e.g. 8GiB; default: all memory.",
)
@click.option(
    "-n", "--nproc", type=click.IntRange(1, 1024), default=1, show_default=True, help="Ranks on this machine."
)
@json_option
def batch_size(recipe: str, sets: Sequence[str], budget: int | None, nproc: int, as_json: bool) -> None:
    """Find the largest train.micro_batch with which RECIPE fits into memory; the global batch does not change.

    Sizes that divide the batch are tried in separate processes, for two steps each that keep nothing: the largest size
    first, then by bisection. On a GPU, memory is that reserved by torch; on a CPU, that of the process.
    """
    from ddpforge.tools.trials.batch_size import find_micro_batch

    # SIGTERM raises SystemExit, so that the processes of the current trial end too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    found = find_micro_batch(recipe, sets=sets, ranks=nproc, budget=budget, on_result=lambda one: _tell(vars(one)))
    if as_json:
        click.echo(json.dumps(found.as_dict()))
    elif found.micro_batch is None:
        click.echo("no micro-batch fits: for other ways to save memory see docs/guides/out-of-memory.md")
    else:
        accumulation = found.global_batch // (found.micro_batch * found.ranks)
        click.echo(
            f"train.micro_batch = {found.micro_batch}: {found.global_batch} per step = {found.micro_batch} per forward "
            f"pass × {accumulation} accumulation × {found.ranks} rank{'s' * (found.ranks > 1)}"
        )
    if found.micro_batch is None:
        raise SystemExit(1)


def _tell(one: dict[str, object]) -> None:
    """Prints the result of one trial to stderr."""
    memory = one["memory"]
    took = f", {memory / 2**30:.2f} GiB" if isinstance(memory, int) else ""
    speed = one["samples_per_second"]
    rate = f", {speed:,.0f} samples/s" if isinstance(speed, float) else ""
    click.echo(f"micro-batch {one['micro_batch']}: {'fits' if one['fits'] else 'does not fit'}{took}{rate}", err=True)


@click.command("lr-range")
@recipe_argument
@sets_options
@click.option("--from", "low", type=float, default=1e-7, show_default=True, metavar="LR", help="The lowest rate.")
@click.option("--to", "high", type=float, default=10.0, show_default=True, metavar="LR", help="The highest rate.")
@click.option(
    "--steps", type=click.IntRange(10, 100_000), default=100, show_default=True, help="Steps, each with its own rate."
)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the curve, e.g. into lr.png or lr.svg."
)
@json_option
def lr_range(
    recipe: str, sets: Sequence[str], low: float, high: float, steps: int, out: str | None, as_json: bool
) -> None:
    """Train RECIPE with an increasing learning rate, and suggest the rate at which the loss falls fastest.

    The test ends when the loss reaches four times its lowest value. It keeps nothing, and skips schedule, callbacks and
    evaluations. Under a launcher all ranks take part.
    """
    with ending():
        from ddpforge.cli.tables import reject_without_library

        if out:
            reject_without_library()
        from ddpforge.tools.trials.lr_range import lr_range as test

        with results_alone(as_json):
            found = test(recipe, low=low, high=high, steps=steps, sets=sets)
        if found.is_rank_zero:
            if out:
                _draw(out, found.rates, found.losses)
            if as_json:
                click.echo(json.dumps(found.as_dict()))
            else:
                from ddpforge.cli.tables import print_table

                print_table(("lr", "loss"), found.rows())
                click.echo(found.verdict())


def _draw(out: str, rates: Sequence[float], losses: Sequence[float]) -> None:
    from pathlib import Path

    from ddpforge.cli.tables import as_picture

    points = list(zip(rates, losses, strict=True))
    as_picture(Path(out), {"train/loss": {"mean of neighbours": points}}, x="learning rate", logarithmic=True)
