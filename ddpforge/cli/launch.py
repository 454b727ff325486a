"""`ddpforge launch`: check a recipe, start its processes on this machine, and pass their verdict on."""

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli import complain
from ddpforge.cli.options import json_option, out_option, recipe_argument, run_options, sets_option
from ddpforge.errors import ForgeError, RecipeError, UsageError

if TYPE_CHECKING:
    from ddpforge.launch import Ended
    from ddpforge.recipe import LoadedRecipe


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
    from ddpforge.launch import start, torchrun_command
    from ddpforge.recipe import load_recipe

    if torchrun_flags and not torchrun_flags[0].startswith("-"):
        raise UsageError(
            f"`{torchrun_flags[0]}` is one argument too many", hints=["flags for torchrun follow after `--`"]
        )

    with _told_as_json(as_json):
        loaded = load_recipe(recipe, sets=sets)
        nproc = nproc or (loaded.recipe.train.device != "cpu" and _gpus()) or 1
        if not any(flag.startswith("--nnodes") for flag in torchrun_flags):
            _check_world(loaded, nproc)

    arguments = [recipe, *(f"--set={value}" for value in sets), *(f"--allow-change={key}" for key in allow_change)]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--fresh"] if fresh else []
    arguments += ["--json"] if as_json else []
    ended = start(torchrun_command(arguments, nproc=nproc, flags=torchrun_flags), nproc=nproc)
    _tell_what_ranks_could_not(ended, Path(out or loaded.recipe.output_dir) / loaded.recipe.name, as_json=as_json)
    sys.exit(ended.code)


def _check_world(loaded: "LoadedRecipe", nproc: int) -> None:
    """Raises RecipeError where the batch cannot be dealt to the ranks that see different data.

    Only a strategy knows how many these are, and importing one takes seconds. A batch that all ranks can share out can
    be shared out by fewer, which divide them; so a strategy is asked where the batch is refused.
    """
    from ddpforge.recipe.load import check_world

    try:
        check_world(loaded, nproc)
    except RecipeError:
        from ddpforge.components.building import build
        from ddpforge.components.registry import Registry

        strategy = build(Registry.installed(), "strategy", loaded.recipe.strategy)
        check_world(loaded, strategy.data_ranks(nproc))


@contextmanager
def _told_as_json(wanted: bool) -> Iterator[None]:
    from ddpforge.cli.ending import failure

    try:
        yield
    except ForgeError as error:
        if wanted:
            click.echo(json.dumps(failure(error)))
        raise


def _tell_what_ranks_could_not(ended: "Ended", path: Path, *, as_json: bool) -> None:
    """A rank that a signal ended has said nothing: names it, here and in the run's status."""
    from ddpforge.ranks.failures import told_causes
    from ddpforge.runs.folder import RunFolder

    folder = RunFolder(path)
    if ended.death is None or told_causes(folder.logs):
        return
    named = f"rank {ended.death.rank} was {ended.death}"
    out_of_memory = ["was there not enough memory? `dmesg` says so"] if ended.death.signal == signal.SIGKILL else []
    complain(ForgeError(named, hints=out_of_memory))
    if folder.exists():
        folder.amend_failure(named, ended.code)
        if as_json and 0 not in ended.ranks:
            click.echo(json.dumps(folder.status()))


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()
