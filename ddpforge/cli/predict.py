"""`ddpforge predict`: writes a model's predictions for every sample. Under a launcher this process is one rank."""

import json
from pathlib import Path

import click

from ddpforge.cli.ending import ending, results_alone
from ddpforge.cli.options import checkpoint_options, json_option, run_argument, sets_options
from ddpforge.cli.tables import counted
from ddpforge.fast_import import gc_paused
from ddpforge.ranks.environment import environment
from ddpforge.watchdog.watchdog import watch_startup


@click.command()
@run_argument
@click.option(
    "-o",
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The .jsonl or .parquet file to write; default: a .jsonl file named after the run.",
)
@click.option(
    "--data",
    multiple=True,
    metavar="NAME|KEY=VALUE",
    help='A dataset of the recipe, "train" or "eval.NAME", and KEY=VALUE for its options, e.g. path=new.csv; '
    "repeatable. Default: the only [data.eval].",
)
@checkpoint_options
@click.option(
    "--weights", metavar="NAME", help='"model", or a callback such as ema; default: the weights of evaluations.'
)
@click.option("--limit", type=click.IntRange(1), metavar="N", help="Only the first N samples.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
@sets_options
@json_option
def predict(
    run: str,
    out: Path | None,
    data: tuple[str, ...],
    step: int | None,
    best: bool,
    weights: str | None,
    limit: int | None,
    force: bool,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Write the predictions of the model of RUN, a run's folder or its name in runs/, for every sample of a dataset.

    The file has one row per sample, in the order of the data: its position `index`, and the columns that the recipe's
    task predicts, e.g. class and probability. `--set` changes the recipe for this command, e.g. train.eval_batch=512.
    Training data and optimizer state are not loaded.
    """
    with ending():
        environment().export_variables()
        watch_startup()

        with gc_paused():
            from ddpforge.api import RunFolder
            from ddpforge.app.evaluate import predict as predict_run

        folder = RunFolder.find(run)
        file = out or Path(f"{folder.path.resolve().name}-predictions.jsonl")
        with results_alone(as_json):
            found = predict_run(
                folder,
                file,
                step=step,
                best=best,
                weights=weights,
                data=data,
                sets=sets,
                limit=limit,
                force=force,
            )
        if found.is_rank_zero:
            said = f"{file}: {counted(found.samples, 'sample')}, predicted with the weights of step {found.step:,}"
            click.echo(json.dumps(found.as_dict()) if as_json else said)
