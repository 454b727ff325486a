"""`ddpforge launch`: check a recipe, start its processes on this machine, and pass their verdict on."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ddpforge.cli import complain
from ddpforge.cli.options import before_flags, json_option, out_option, recipe_argument, run_options, set_option
from ddpforge.errors import ForgeError


@click.command()
@recipe_argument
@click.option("-n", "--nproc", type=click.IntRange(1, 1024), help="Processes to start; default: one per GPU, or one.")
@set_option
@out_option
@run_options
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="[KEY=VALUE]... [-- TORCHRUN_FLAGS...]")
@json_option
def launch(
    recipe: str,
    nproc: int | None,
    sets: tuple[str, ...],
    out: str | None,
    fresh: bool,
    allow_change: tuple[str, ...],
    words: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train RECIPE in several processes on this machine; flags after `--` go to torchrun.

    The recipe is checked before anything is started, and the exit code is the run's own.
    """
    from ddpforge.starting import start_ranks

    assigned, flags = before_flags(words)
    with _told_as_json(as_json):
        started = start_ranks(
            recipe,
            nproc=nproc,
            sets=(*sets, *assigned),
            out=out,
            fresh=fresh,
            allow_change=allow_change,
            flags=flags,
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
