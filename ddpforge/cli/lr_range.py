"""`ddpforge lr-range`: test a range of learning rates in one short training that leaves nothing behind."""

import json
from collections.abc import Sequence

import click

from ddpforge.cli.ending import ending, results_alone
from ddpforge.cli.options import json_option, recipe_argument, sets_options


@click.command("lr-range")
@recipe_argument
@sets_options
@click.option("--from", "low", type=float, default=1e-7, show_default=True, metavar="LR", help="The lowest rate.")
@click.option("--to", "high", type=float, default=10.0, show_default=True, metavar="LR", help="The highest rate.")
@click.option(
    "--steps", type=click.IntRange(10, 100_000), default=100, show_default=True, help="Steps, and rates, in between."
)
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False), metavar="FILE", help="Draw the curve, e.g. into lr.png or lr.svg."
)
@json_option
def lr_range(
    recipe: str, sets: Sequence[str], low: float, high: float, steps: int, out: str | None, as_json: bool
) -> None:
    """Train RECIPE for some steps, each at a higher learning rate, and suggest one where the loss falls fastest.

    The test ends where the loss climbs to four times its lowest value. It keeps nothing, and leaves schedule, callbacks
    and evaluations out. Under a launcher all ranks take part.
    """
    with ending():
        from ddpforge.cli.plots import refuse_without_library

        if out:
            refuse_without_library()
        from ddpforge.tools.trials.lr_range import lr_range as test

        with results_alone(as_json):
            found = test(recipe, low=low, high=high, steps=steps, sets=sets)
        if found.is_main:
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

    from ddpforge.cli.plots import as_picture

    points = list(zip(rates, losses, strict=True))
    as_picture(Path(out), {"train/loss": {"mean of neighbours": points}}, x="learning rate", logarithmic=True)
