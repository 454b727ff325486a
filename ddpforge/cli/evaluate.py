"""`ddpforge eval`: evaluates a run's checkpoint. Under a launcher this process is one rank."""

import json

import click

from ddpforge.cli.ending import ending, results_alone
from ddpforge.cli.options import checkpoint_options, json_option, run_argument, sets_options
from ddpforge.cli.tables import number
from ddpforge.fast_import import gc_paused
from ddpforge.launchers.slurm import export_slurm_env
from ddpforge.watchdog.watchdog import watch_startup


@click.command("eval")
@run_argument
@checkpoint_options
@click.option("--dataset", "only", metavar="NAME", multiple=True, help="Evaluate only on [data.eval.NAME]; repeatable.")
@sets_options
@json_option
def evaluate(
    run: str, step: int | None, best: bool, only: tuple[str, ...], sets: tuple[str, ...], as_json: bool
) -> None:
    """Evaluate RUN, a run's folder or its name in runs/, on the recipe's [data.eval], or on each [data.eval.NAME].

    `--set` changes the recipe for this evaluation, e.g. data.eval.path=other.txt. Training data and optimizer state are
    not loaded.
    """
    with ending():
        export_slurm_env()
        watch_startup()

        with gc_paused():
            from ddpforge.app.evaluate import evaluate as evaluate_run
            from ddpforge.runs.folder import RunFolder

        folder = RunFolder.find(run)
        with results_alone(as_json):
            found = evaluate_run(folder, step=step, best=best, sets=sets, only=only)
        if found.is_rank_zero:
            numbers = "  ".join(f"{name} {number(value)}" for name, value in found.metrics.items())
            click.echo(json.dumps(found.as_dict()) if as_json else f"{folder.path} at step {found.step}: {numbers}")
