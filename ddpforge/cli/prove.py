"""`ddpforge prove`: tries relations that a correct training script keeps, without an oracle."""

import json
from pathlib import Path

import click

from ddpforge.cli.options import json_option


@click.command("prove")
@click.argument("script", type=click.Path(path_type=Path))
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[-- ARGUMENT...]")
@click.option(
    "--steps", type=click.IntRange(1, 1000), default=3, show_default=True, help="Optimizer steps of each run."
)
@click.option("--ranks", type=click.IntRange(1, 64), default=2, show_default=True, help="Processes; 1 leaves this out.")
@click.option("--batch", default="", metavar="TEXT", help='Option of the script for its micro-batch: "--bs {}".')
@click.option("--accumulate", default="", metavar="TEXT", help='Option for the micro-batches of a step: "--ga {}".')
@click.option("--samples", type=click.IntRange(1), default=8, show_default=True, help="Samples of a step, for --batch.")
@click.option("--torchrun", is_flag=True, help="Start the script by torchrun, for scripts that join ranks.")
@json_option
def prove(
    script: Path,
    arguments: tuple[str, ...],
    steps: int,
    ranks: int,
    batch: str,
    accumulate: str,
    samples: int,
    torchrun: bool,
    as_json: bool,
) -> None:
    """Find wrong training in SCRIPT, of any trainer, by relations whose result is known.

    The script runs unmodified, several times for a few steps: again, with the samples of a batch in another order, with
    each sample twice, with loader processes, in smaller micro-batches, and on several ranks. All must give the same
    gradients, up to the rounding that is measured for this model. Exit codes: 0 all tried relations hold, 1 one is
    broken, 2 usage, or a script that fails or differs from run to run.
    """
    from ddpforge.tools.prove.relations import prove as certify

    options = {"batch": batch, "accumulate": accumulate, "samples": samples, "torchrun": torchrun}
    found = certify(script.resolve(), arguments, steps=steps, ranks=ranks, **options)  # type: ignore[arg-type]
    click.echo(json.dumps(found.as_dict()) if as_json else "\n".join(found.lines()))
    if found.broken:
        raise SystemExit(1)
