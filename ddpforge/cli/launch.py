"""`ddpforge launch`: check a recipe, start its processes on this machine, and pass their verdict on."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ddpforge.cli import complain
from ddpforge.cli.options import json_option, out_option, recipe_argument, run_options, sets_option
from ddpforge.errors import ForgeError, UsageError


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
    from ddpforge.starting import start_ranks

    if torchrun_flags and not torchrun_flags[0].startswith("-"):
        raise UsageError(
            f"`{torchrun_flags[0]}` is one argument too many", hints=["flags for torchrun follow after `--`"]
        )

    with _told_as_json(as_json):
        started = start_ranks(
            recipe,
            nproc=nproc,
            sets=sets,
            out=out,
            fresh=fresh,
            allow_change=allow_change,
            flags=torchrun_flags,
            as_json=as_json,
        )
    if started.untold:
        complain(started.untold)
        if as_json and started.folder.exists() and 0 not in started.ended.ranks:
            click.echo(json.dumps(started.folder.status()))
    sys.exit(started.ended.code)


@contextmanager
def _told_as_json(wanted: bool) -> Iterator[None]:
    from ddpforge.cli.ending import failure

    try:
        yield
    except ForgeError as error:
        if wanted:
            click.echo(json.dumps(failure(error)))
        raise
