"""`ddpforge launch`: checks a recipe, starts its processes on this machine, and returns their exit code."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

from ddpforge.api import StopRequests
from ddpforge.cli import complain
from ddpforge.cli.options import (
    before_flags,
    complete_keys,
    json_option,
    out_option,
    recipe_argument,
    run_options,
    set_option,
)
from ddpforge.errors import ExitCode, ForgeError, StoppedBeforeStart, UsageError

if TYPE_CHECKING:
    from ddpforge.launchers.local import LaunchSpec


@click.command()
@recipe_argument
@click.option("-n", "--nproc", type=click.IntRange(1, 1024), help="Processes to start; default: one per GPU, or one.")
@click.option("--nnodes", metavar="N|A:B", help="Number of machines, each with this command; A:B: from A to B.")
@click.option("--node-rank", type=click.IntRange(min=0), help="This machine's number, from 0; optional.")
@click.option(
    "--rdzv-endpoint",
    "endpoint",
    metavar="HOST[:PORT]",
    help="Rendezvous on one of the machines, the same on all machines.",
)
@click.option(
    "--rdzv-id", "run_id", help="Rendezvous id, the same on all machines; default: the names of run and user."
)
@click.option(
    "--max-restarts", type=click.IntRange(min=0), help="Restart the ranks up to N times after failures; default: never."
)
@click.option(
    "--dry-run",
    is_flag=False,
    flag_value=0,
    type=click.IntRange(min=0),
    metavar="[STEPS]",
    help="Print the command to run, and start nothing; with STEPS, train this number of steps as `run` does.",
)
@set_option
@out_option
@run_options
@click.argument(
    "words",
    nargs=-1,
    shell_complete=complete_keys,
    type=click.UNPROCESSED,
    metavar="[KEY=VALUE]... [-- TORCHRUN_FLAGS...]",
)
@json_option
def launch(
    recipe: str,
    nproc: int | None,
    nnodes: str | None,
    node_rank: int | None,
    endpoint: str | None,
    run_id: str | None,
    max_restarts: int | None,
    dry_run: int | None,
    sets: tuple[str, ...],
    out: str | None,
    fresh: bool,
    allow_change: tuple[str, ...],
    max_time: str | None,
    profile: str | None,
    words: tuple[str, ...],
    as_json: bool,
) -> None:
    """Train RECIPE in several processes on this machine, or on several machines; flags after `--` go to torchrun.

    The recipe is checked before anything starts; the ranks check options of components in your own files and plugins.
    The exit code is that of the run. Missing options are read from the environment variables of SkyPilot and Kubeflow.
    """
    from ddpforge.cli.ending import to_resume
    from ddpforge.launchers.local import prepare_launch
    from ddpforge.ranks.logs import keep_output

    keep_output()
    assigned, flags = before_flags(words)
    with _errors_as_json(as_json), StopRequests() as stop:
        given = {"nproc": nproc, "nnodes": nnodes, "node_rank": node_rank, "endpoint": endpoint, "run_id": run_id}
        start = prepare_launch(
            recipe,
            _ranks({**given, "max_restarts": max_restarts}, flags),
            sets=(*sets, *assigned),
            out=out,
            fresh=fresh,
            allow_change=allow_change,
            max_time=max_time,
            profile=profile,
            dry_run=dry_run or None,
            as_json=as_json,
        )
        if stop.requested:
            raise StoppedBeforeStart("stopped before anything was started", hints=["the same command starts it again"])
    if dry_run == 0:
        click.echo(start.shown())
        return
    if start.finished:
        from ddpforge.cli.run import what_next

        more = "--fresh trains it from scratch, a longer train.length continues it"
        click.echo(f"{start.folder.path} is finished; {more}", err=True)
        click.echo(json.dumps(start.finished) if as_json else start.result())
        for line in () if as_json else what_next(start.folder, "done"):
            click.echo(line, err=True)
        return
    started = start.run()
    if started.unreported:
        complain(started.unreported)
        if as_json and start.keeps and started.folder.exists() and 0 not in started.ended.ranks:
            click.echo(json.dumps(started.folder.status()))
    if started.ended.code == ExitCode.PREEMPTED and start.keeps and not as_json:
        click.echo(to_resume(), err=True)
    sys.exit(started.ended.code)


def _ranks(given: dict[str, Any], flags: tuple[str, ...]) -> "LaunchSpec":
    """Returns the ranks to start, from options, environment variables, or the rendezvous in torchrun's flags."""
    from ddpforge.launchers.local import LaunchSpec
    from ddpforge.launchers.nodes import Nodes, announced
    from ddpforge.launchers.torchrun import names_rendezvous

    rendezvous = ("nnodes", "node_rank", "endpoint", "run_id")
    if names_rendezvous(flags):
        if twice := [key for key in rendezvous if given[key] is not None]:
            renamed = {"endpoint": "rdzv-endpoint", "run_id": "rdzv-id"}
            option = f"--{renamed.get(twice[0], twice[0]).replace('_', '-')}"
            raise UsageError(f"{option} and torchrun's flags both set a rendezvous", hints=["use one of them"])
        meet = Nodes()
    else:
        given = announced(os.environ) | {key: value for key, value in given.items() if value is not None}
        meet = Nodes.of(*(given.get(key) for key in ("nnodes", "node_rank", "endpoint")))
    number = {key: None if given.get(key) is None else int(given[key]) for key in ("nproc", "max_restarts")}
    return LaunchSpec(nodes=meet, run_id=given.get("run_id"), flags=flags, **number)


@contextmanager
def _errors_as_json(wanted: bool) -> Iterator[None]:
    from ddpforge.cli.ending import failure

    try:
        yield
    except ForgeError as error:
        if wanted:
            click.echo(json.dumps(failure(error)))
        raise
