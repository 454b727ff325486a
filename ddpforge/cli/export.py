"""`ddpforge export`: a run's weights as one plain safetensors file."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.checkpoint import retention
from ddpforge.cli.options import json_option
from ddpforge.errors import UsageError
from ddpforge.recipe.schema import KeepSection
from ddpforge.runfolder import RunFolder

if TYPE_CHECKING:
    from ddpforge.checkpoint.export import Precision


@click.command()
@click.argument("run", metavar="RUN")
@click.option(
    "-o", "--out", type=click.Path(dir_okay=False, path_type=Path), help="The file; default: named after the run."
)
@click.option("--step", type=click.IntRange(min=0), help="The checkpoint of this step; default: the newest.")
@click.option("--best", is_flag=True, help="The checkpoint that is best by the recipe's checkpoint.keep.by.")
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
    from ddpforge.checkpoint.export import export as write

    if best and step is not None:
        raise UsageError("--best and --step each choose a checkpoint", hints=["give one of them"])
    folder = RunFolder.find(run)
    suffix = "" if weights == "model" else f"-{weights}"
    out = out or Path(f"{folder.path.resolve().name}{suffix}.safetensors")

    done = write(_choose(folder, step, best), out, weights=weights, dtype=dtype, force=force)
    if as_json:
        click.echo(json.dumps(asdict(done), default=str))
    else:
        click.echo(f"{done.file}: {done.tensors} tensors, {done.bytes:,} bytes, from step {done.step}")


def _choose(folder: RunFolder, step: int | None, best: bool) -> Path:
    found, _ = retention.committed(folder.checkpoints)
    if best:
        keep = KeepSection.model_validate(folder.tables().get("checkpoint", {}).get("keep", {}))
        chosen = retention.best(found, keep)
        problem = f"no checkpoint of {folder.path} has the metric {keep.by!r}, which checkpoint.keep.by names"
    elif step is not None:
        chosen = [each for each in found if each.manifest.step == step]
        problem = f"{folder.path} has no checkpoint of step {step}"
    else:
        path, skipped = retention.newest(folder.checkpoints)
        for _, reason in skipped:
            click.echo(f"passed over: {reason}", err=True)
        if path is not None:
            return path
        chosen, problem = [], f"{folder.path} has no intact checkpoint"

    if not chosen:
        steps = ", ".join(str(each.manifest.step) for each in reversed(found))
        raise UsageError(problem, hints=[f"it has checkpoints of step {steps or 'none'}"])
    return chosen[0].path
