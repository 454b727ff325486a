"""`ddpforge export`: a run's weights as one plain safetensors file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import checkpoint_options, json_option, run_argument

if TYPE_CHECKING:
    from ddpforge.checkpoint.export import Precision


@click.command()
@run_argument
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: named after the run."
)
@checkpoint_options
@click.option(
    "--weights", default="model", metavar="NAME", show_default=True, help='"model", or a callback such as ema.'
)
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Convert the weights; default: as they are.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@json_option
def export(
    run: str,
    out: Path | None,
    step: int | None,
    best: bool,
    weights: str,
    dtype: "Precision | None",
    force: bool,
    as_json: bool,
) -> None:
    """Write the weights of RUN, a run's folder or its name in runs/, as plain safetensors.

    Parameters and buffers have the names that the bare model gives them; tied parameters are written once.
    """
    from ddpforge.checkpoint.choose import choose
    from ddpforge.checkpoint.export import export as write
    from ddpforge.runfolder import RunFolder

    folder = RunFolder.find(run)
    suffix = "" if weights == "model" else f"-{weights}"
    out = out or Path(f"{folder.path.resolve().name}{suffix}.safetensors")

    done = write(choose(folder, step=step, best=best), out, weights=weights, dtype=dtype, force=force)
    if as_json:
        click.echo(json.dumps(asdict(done), default=str))
    else:
        click.echo(f"{done.file}: {done.tensors} tensors, {done.bytes:,} bytes, from step {done.step}")
