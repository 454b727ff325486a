"""`ddpforge prove`: tries relations that correct training keeps, without an oracle."""

import json
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from ddpforge.cli.options import json_option, set_option
from ddpforge.errors import UsageError


@click.command("prove")
@click.argument("script", metavar="SCRIPT_OR_RECIPE")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENT...]")
@click.option(
    "--steps", type=click.IntRange(2, 1000), default=3, show_default=True, help="Optimizer steps of each run."
)
@click.option("--ranks", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes; 1 leaves this out.")
@click.option("--batch", default="", metavar="TEXT", help='Option of the script for its micro-batch: "--bs {}".')
@click.option("--accumulate", default="", metavar="TEXT", help='Option for the micro-batches of a step: "--ga {}".')
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Samples of a step, for --batch.")
@click.option(
    "--save", default="", metavar="TEXT", help='Option that trains, saves and ends: "--steps {steps} --out {path}".'
)
@click.option("--resume", default="", metavar="TEXT", help='Option that continues from this: "--resume {path}".')
@click.option("--evaluate", default="", metavar="TEXT", help='Option that evaluates at every step: "--eval-every 1".')
@click.option("--checkpointing", default="", metavar="TEXT", help='Option for activation checkpointing: "--ckpt".')
@click.option("--skip", multiple=True, metavar="RELATION", help="Leave this relation out; repeatable.")
@click.option("--torchrun", is_flag=True, help="Start the script by torchrun, for scripts that join ranks.")
@click.option("--html", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Also write a page.")
@set_option
@json_option
def prove(
    script: str,
    sets: tuple[str, ...],
    arguments: tuple[str, ...],
    steps: int,
    ranks: int,
    skip: tuple[str, ...],
    html: Path | None,
    as_json: bool,
    **options: str | int | bool,
) -> None:
    """Find wrong training in a script of any trainer, or in a recipe, by relations whose result is known.

    A script (.py) runs unmodified, a recipe with other settings, several times for a few steps: again, with the samples
    of a batch in another order, with each sample twice, with more padding, with loader processes, in smaller
    micro-batches, on several ranks, after a stop and a resume, and so on. All must give the same loss, gradients and
    updates, up to the rounding that is measured for this model and dtype. Exit codes: 0 all tried relations hold, 1 one
    is broken, 2 usage, or a script that fails or differs from run to run.
    """
    from ddpforge.tools.prove.of_recipe import prove_recipe
    from ddpforge.tools.prove.relations import prove as certify
    from ddpforge.tools.prove.runs import Options

    if script.endswith(".py"):
        _refuse("a recipe", {"--set": sets})
        given = Options(**options)  # type: ignore[arg-type]
        found = certify(Path(script).resolve(), arguments, steps=steps, ranks=ranks, skip=skip, options=given)
    else:
        defaults = asdict(Options())
        others = {f"--{name}": value != defaults[name] for name, value in options.items()}
        _refuse("a script", {"arguments": arguments, **others})
        found = prove_recipe(script, sets=sets, steps=steps, ranks=ranks, skip=skip)
    click.echo(json.dumps(found.as_dict()) if as_json else "\n".join(found.lines()))
    if html:
        html.write_text(found.page(), encoding="utf-8")
    if found.broken:
        raise SystemExit(1)


def _refuse(of: str, given: Mapping[str, object]) -> None:
    for name, value in given.items():
        if value:
            raise UsageError(f"{name} is for {of}", hints=["a script ends with .py; all others are recipes"])
