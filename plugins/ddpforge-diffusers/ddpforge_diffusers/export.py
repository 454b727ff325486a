"""Writes the model of a run into a folder that diffusers loads, with the scheduler of its task.

    python -m ddpforge_diffusers.export runs/digits-flow -o exported

FOLDER has the layout of a pipeline: the model in `unet` or `transformer`, the scheduler in `scheduler`. The
weights are the ones that evaluations use, by default the averages of `ema`. Adapters are merged into the weights that
they adapt.
"""

import sys
from pathlib import Path
from typing import Any

import click
import ddpforge
import torch
from ddpforge.errors import ForgeError, UsageError
from torch import nn

from ddpforge_diffusers.tasks import DDPM, FlowMatching

__all__ = ["export"]


def export(run: str | Path, out: Path, *, weights: str | None = None, force: bool = False) -> Path:
    """Writes model and scheduler of the run's newest checkpoint into the folder `out`; returns the model's folder.

    Raises UsageError if `out` has files, unless `force`, or if the run is not one of this package's tasks and models.
    """
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file", hints=["name a folder with --out"])
    if not force and out.is_dir() and any(out.iterdir()):
        raise UsageError(f"{out} has files", hints=["choose another folder with --out, or replace them with --force"])
    trained = ddpforge.load(run, weights=weights)
    task, model = trained.task(), trained.model()
    if not isinstance(task, FlowMatching | DDPM):
        raise UsageError(f"{run} has the task {type(task).__name__}, not flow_matching or ddpm")
    bare = merged(model)
    if not hasattr(bare, "save_pretrained"):
        raise UsageError(f"{run} has the model {type(model).__name__}, which is not one of diffusers")
    place = out / ("unet" if type(bare).__name__.startswith("UNet") else "transformer")
    bare.save_pretrained(place)
    task.scheduler().save_pretrained(out / "scheduler")
    return place


@torch.no_grad()
def merged(model: nn.Module) -> Any:
    """Merges adapters into the linear layers that they adapt, in place; returns the model."""
    for name, layer in list(model.named_modules()):
        adapted: Any = layer
        if hasattr(layer, "lora_A"):
            adapted.merge()
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, adapted.get_base_layer())
    return model


@click.command()
@click.argument("run")
@click.option("-o", "--out", type=click.Path(path_type=Path), required=True, help="Folder to write.")
@click.option("--weights", help='"model", or a callback that keeps weights: "ema".')
@click.option("--force", is_flag=True, help="Replace files in the folder.")
def main(run: str, out: Path, weights: str | None, force: bool) -> None:
    """Writes the model of RUN into a folder that diffusers loads."""
    try:
        place = export(run, out, weights=weights, force=force)
    except ForgeError as error:
        click.echo(f"error: {error.message}", err=True)
        for hint in error.hints:
            click.echo(f"  {hint}", err=True)
        sys.exit(error.exit_code)
    click.echo(f"wrote {place} and {out / 'scheduler'}")


if __name__ == "__main__":
    main()
