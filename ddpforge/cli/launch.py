"""`ddpforge launch`: check a recipe, start its processes on this machine, and pass their verdict on."""

import sys

import click

from ddpforge.cli.options import json_option, out_option, recipe_argument, run_options, sets_option
from ddpforge.errors import UsageError


@click.command()
@recipe_argument
@click.option("-n", "--nproc", type=click.IntRange(1, 1024), help="Processes to start; default: one per GPU, or one.")
@sets_option
@out_option
@run_options
@click.argument("torchrun_flags", nargs=-1, type=click.UNPROCESSED)
@json_option
def launch(
    recipe: str,
    nproc: int | None,
    sets: tuple[str, ...],
    out: str | None,
    fresh: bool,
    allow_change: tuple[str, ...],
    torchrun_flags: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train RECIPE in several processes on this machine; flags after `--` go to torchrun.

    The recipe is checked before anything is started, and the exit code is the run's own.
    """
    from ddpforge.launch import launch as start
    from ddpforge.launch import torchrun_command
    from ddpforge.recipe import load_recipe
    from ddpforge.recipe.batch import check_world

    if torchrun_flags and not torchrun_flags[0].startswith("-"):
        raise UsageError(
            f"`{torchrun_flags[0]}` is one argument too many", hints=["flags for torchrun follow after `--`"]
        )

    nproc = nproc or _gpus() or 1
    loaded = load_recipe(recipe, sets=sets)
    if not any(flag.startswith("--nnodes") for flag in torchrun_flags):
        check_world(loaded, nproc)

    arguments = [recipe, *(f"--set={value}" for value in sets), *(f"--allow-change={key}" for key in allow_change)]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--fresh"] if fresh else []
    arguments += ["--json"] if as_json else []
    sys.exit(start(torchrun_command(arguments, nproc=nproc, flags=torchrun_flags), nproc=nproc))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
