"""`ddpforge export`, also `ddpforge ckpt export`: a run's weights as plain safetensors."""

import json
import re
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import checkpoint_options, json_option
from ddpforge.cli.tables import counted
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.exchange.export import Precision


_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class _Size(click.ParamType[int]):
    """A number of bytes, with or without a unit."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        match = re.fullmatch(r"(\d+(?:\.\d+)?) *([A-Za-z]*)", str(value))
        size = int(float(match[1]) * _UNITS.get(match[2].upper() or "B", 0)) if match else 0
        if size < 1:
            self.fail(f"{value!r} is not a size; expected e.g. 5GB or 500MiB", param, ctx)
        return size


@click.command()
@click.argument("run", metavar="RUN_OR_CHECKPOINT", type=click.Path())
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=str),
    help="The file, or a folder (one that exists, or ends in /); default: a file named after the run.",
)
@checkpoint_options
@click.option(
    "--weights", default="model", metavar="NAME", show_default=True, help='"model", or a callback such as ema.'
)
@click.option(
    "--only",
    multiple=True,
    metavar="GLOB",
    help='Only the tensors with such names, e.g. "*lora_*"; may be given several times.',
)
@click.option("--merge", is_flag=True, help="Fold the adapters of the model `lora` into the weights that they adapt.")
@click.option("--dtype", type=click.Choice(["fp32", "bf16", "fp16"]), help="Convert the weights; default: as they are.")
@click.option(
    "--max-shard-size",
    type=_Size(),
    metavar="SIZE",
    help="Write several files of at most this size, e.g. 5GB, and an index, into a folder.",
)
@click.option("--force", is_flag=True, help="Replace the file, or the weights in the folder, if there are any.")
@json_option
def export(
    run: str,
    out: str | None,
    step: int | None,
    best: bool,
    weights: str,
    only: tuple[str, ...],
    merge: bool,
    dtype: "Precision | None",
    max_shard_size: int | None,
    force: bool,
    as_json: bool,
) -> None:
    """Write the weights of RUN_OR_CHECKPOINT (a run's folder, its name in runs/, or a checkpoint's folder) as plain
    safetensors.

    Parameters and buffers have the names that the bare model gives them; tied parameters are written once. In a folder
    the files have the names that transformers gives them: model.safetensors, or model-00001-of-00002.safetensors and so
    on with model.safetensors.index.json.
    """
    from ddpforge.exchange.export import export as write
    from ddpforge.exchange.export import export_folder
    from ddpforge.runs.checkpoints import find, is_checkpoint

    if out and Path(out).suffix in (".pt", ".pth", ".bin", ".ckpt"):
        raise UsageError(
            f"{out}: what is written is safetensors, which torch.load does not read",
            hints=[f"-o {Path(out).with_suffix('.safetensors')}; safetensors.torch.load_file reads it"],
        )
    checkpoint = find(run, step=step, best=best, intact=True)
    name = (checkpoint if is_checkpoint(Path(run)) else Path(run)).resolve().name
    default = f"{name}{'' if weights == 'model' else f'-{weights}'}"
    if max_shard_size is not None or (out is not None and (out.endswith("/") or Path(out).is_dir())):
        done = export_folder(
            checkpoint,
            Path(out or default),
            weights=weights,
            only=only,
            merge=merge,
            dtype=dtype,
            force=force,
            most=max_shard_size,
        )
    else:
        file = Path(out or f"{default}.safetensors")
        done = write(checkpoint, file, weights=weights, only=only, merge=merge, dtype=dtype, force=force)

    if as_json:
        click.echo(json.dumps(asdict(done), default=str))
    else:
        several = f" in {len(done.files)} files" if len(done.files) > 1 else ""
        tensors = counted(done.tensors, "tensor")
        click.echo(f"{done.file}: {tensors}{several}, {done.bytes:,} bytes, from step {done.step}")
