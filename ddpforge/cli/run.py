"""`ddpforge run`: trains a recipe. Under a launcher this process is one rank."""

import json
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import click

from ddpforge.api import StopRequests
from ddpforge.cli.ending import ending, leave, postpone, results_alone, to_resume
from ddpforge.cli.options import dry_run_option, json_option, out_option, recipe_argument, run_options, sets_options
from ddpforge.errors import UsageError
from ddpforge.fast_import import gc_paused, set_torch_env
from ddpforge.launchers.exit_record import record_start
from ddpforge.local_world import is_launched
from ddpforge.machine import terminate_with_parent
from ddpforge.ranks.environment import environment
from ddpforge.ranks.run_limits import STARTED
from ddpforge.ranks.signals import stopping_early
from ddpforge.watchdog.watchdog import watch_startup

if TYPE_CHECKING:
    from ddpforge.api import RunFolder


@click.command()
@recipe_argument
@sets_options
@out_option
@run_options
@dry_run_option
@click.option(
    "--overfit",
    type=click.IntRange(min=1),
    metavar="BATCHES",
    help="Train repeatedly on this number of batches, for 200 steps or those of --dry-run, to check that the model can "
    "learn; keep nothing.",
)
@json_option
def run(
    recipe: str,
    sets: tuple[str, ...],
    out: str | None,
    fresh: bool,
    allow_change: tuple[str, ...],
    max_time: str | None,
    profile: str | None,
    dry_run: int | None,
    overfit: int | None,
    as_json: bool,
) -> None:
    """Train RECIPE: a TOML file, or the name of a bundled recipe.

    An interrupted run resumes from its last checkpoint. Exit codes: 0 done, 1 failed, 2 usage or recipe,
    3 environment or plugin, 4 diverged, 75 preempted with a checkpoint saved, 130 interrupted before one.
    """
    with ending(status=as_json), StopRequests(), stopping_early(lambda: postpone(status=as_json)):
        os.environ.setdefault(STARTED, str(time.time()))
        if "TORCHELASTIC_RUN_ID" in os.environ:  # torchrun, or a launcher built on it, waits for its ranks
            terminate_with_parent()
        environment().export_variables()
        watch_startup()
        record_start()
        set_torch_env()
        with gc_paused():
            from ddpforge.api import RunFolder
            from ddpforge.app.run import run as train

        if dry_run or overfit:
            _reject_kept(fresh=fresh, out=out, profile=profile)
            return _try(recipe, sets, dry_run, overfit, as_json)
        with results_alone(as_json):
            asked: dict[str, Any] = {"fresh": fresh, "allow_change": allow_change, "max_time": max_time}
            outcome = train(recipe, sets=sets, out=out, profile=profile, **asked)
        if outcome.is_rank_zero:
            folder = RunFolder(outcome.folder)
            click.echo(json.dumps(folder.status()) if as_json else outcome.sentence())
            for line in () if as_json else what_next(folder, str(outcome.status["state"])):
                click.echo(line, err=True)
        leave(outcome.exit_code)


def what_next(folder: "RunFolder", state: str) -> Iterator[str]:
    """Yields the best checkpoint of a finished run and the commands to use next, or how to resume a stopped run."""
    from ddpforge.runs.checkpoints import choose, keep_of

    if state == "preempted" and not is_launched():
        yield to_resume() if os.environ.get("WORLD_SIZE", "1") == "1" else "to resume: the same command"
    if state != "done":
        return
    if by := keep_of(folder).monitor:
        with suppress(UsageError):  # the run was never evaluated
            yield f"best by {by}: {choose(folder, best=True)}"
    others = "eval, predict and export" if folder.tables().get("data", {}).get("eval") else "export"
    yield f"next: ddpforge report {folder.path}, or {others}"


def _reject_kept(**options: object) -> None:
    """Raises UsageError for options about a run's folder: a trial has none."""
    for name, value in options.items():
        if value:
            raise UsageError(f"--{name} is about a run's folder, but a trial has none", hints=["omit it"])


def _try(recipe: str, sets: Sequence[str], steps: int | None, batches: int | None, as_json: bool) -> None:
    """Trains a few steps without a run's folder, and prints the result."""
    from ddpforge.tools.trials.dry_run import dry_run
    from ddpforge.tools.trials.overfit import overfit

    with results_alone(as_json):
        if batches:
            found: Any = overfit(recipe, batches, sets=sets, **({"steps": steps} if steps else {}))
        else:
            found = dry_run(recipe, steps or 0, sets=sets)
    if found.is_rank_zero:
        click.echo(json.dumps(found.as_dict()) if as_json else "\n".join(found.lines()))
