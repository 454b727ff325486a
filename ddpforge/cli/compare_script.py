"""`ddpforge compare-script`: compares a user's own training script with a recipe."""

import json
from pathlib import Path

import click

from ddpforge.cli.options import json_option, recipe_argument, set_option


@click.command("compare-script")
@click.argument("script", type=click.Path(path_type=Path))
@recipe_argument
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENT...]")
@click.option(
    "--steps", type=click.IntRange(1, 2**20), default=20, show_default=True, help="Optimizer steps to compare."
)
@set_option
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    help="Largest relative difference of the loss that counts as rounding. Default: measured, with two more trainings "
    "of the recipe.",
)
@click.option("--torchrun", is_flag=True, help="Set the variables of torchrun with one process for the script.")
@json_option
def compare_script(
    script: Path,
    recipe: str,
    arguments: tuple[str, ...],
    steps: int,
    sets: tuple[str, ...],
    tolerance: float | None,
    torchrun: bool,
    as_json: bool,
) -> None:
    """Train the first steps of SCRIPT and of RECIPE, and report the first step at which they differ.

    The script runs unmodified in one process, with the arguments after `--`. The recipe then trains from the script's
    initial weights with the samples of the script's DataLoader, and keeps nothing. If the script has no DataLoader, the
    inputs of its model are the recipe's training data. The comparison
    covers the inputs of the model, loss and learning rate of every step. A difference of the loss is rounding if one
    unit in the last place of the initial weights explains it. Exit codes: 0 the same, 1 they part, 2 usage,
    recipe, or a script that cannot be compared.
    """
    from ddpforge.ranks.logs import keep_output
    from ddpforge.tools.script_comparison.compare import compare_script as compare

    keep_output()
    found = compare(script, arguments, recipe, steps=steps, sets=sets, tolerance=tolerance, torchrun=torchrun)
    click.echo(json.dumps(found.as_dict()) if as_json else "\n".join(found.lines()))
    if found.parted:
        raise SystemExit(1)
