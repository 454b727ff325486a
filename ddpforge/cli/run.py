"""`ddpforge run`: train a recipe; under a launcher this process is one rank."""

import json
import logging
import os
import sys
import traceback
from typing import NoReturn

import click

from ddpforge.cli import complain
from ddpforge.cli.options import json_option, out_option, recipe_argument, sets_option
from ddpforge.errors import ExitCode, ForgeError
from ddpforge.launch import record_verdict


@click.command()
@recipe_argument
@sets_option
@out_option
@click.option("--fresh", is_flag=True, help="Start anew; an earlier run's folder is renamed, not deleted.")
@click.option(
    "--allow-change",
    multiple=True,
    metavar="KEY",
    help="Resume although this key, which should stay fixed during a run, has changed; repeatable.",
)
@json_option
def run(
    recipe: str, sets: tuple[str, ...], out: str | None, fresh: bool, allow_change: tuple[str, ...], as_json: bool
) -> None:
    """Train RECIPE: a TOML file, or the name of a bundled recipe.

    An interrupted run goes on from its last checkpoint. Exit codes: 0 done, 1 failed, 2 usage or recipe,
    3 environment or plugin, 4 diverged, 75 stopped with a checkpoint saved, 130 interrupted before one.
    """
    try:
        from ddpforge.run import run as train

        outcome = train(recipe, sets=sets, out=out, fresh=fresh, allow_change=allow_change)
        if outcome.is_main:
            click.echo(json.dumps(outcome.status) if as_json else outcome.sentence())
        leave(outcome.exit_code)
    except ForgeError as error:
        complain(error)
        leave(error.exit_code)
    except KeyboardInterrupt:
        leave(ExitCode.INTERRUPTED)
    except Exception:
        click.echo(f"[rank {os.environ.get('RANK', '0')}] {traceback.format_exc()}", err=True)
        leave(ExitCode.FAILED)


def leave(code: ExitCode) -> NoReturn:
    """Ends the process; a rank of a launched world without the interpreter's clean-up.

    Everything is on disk by now. gloo's threads now and then abort a process that takes the long way out, and a
    failed rank must not wait for peers; either would turn a finished run into a failed one.
    """
    record_verdict(code)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    if "RANK" in os.environ:
        os._exit(code)
    sys.exit(code)
