"""`ddpforge eval`: evaluates a run's checkpoint. Under a launcher this process is one rank."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli.ending import ending, results_alone
from ddpforge.cli.options import checkpoint_options, json_option, run_argument, sets_options
from ddpforge.cli.tables import number
from ddpforge.errors import UsageError
from ddpforge.fast_import import gc_paused
from ddpforge.ranks.environment import environment
from ddpforge.watchdog.watchdog import watch_startup

if TYPE_CHECKING:
    from ddpforge.app.evaluate import Evaluation


@click.command("eval")
@run_argument
@checkpoint_options
@click.option(
    "--follow",
    is_flag=True,
    help="Evaluate each checkpoint of the run as it appears, into the run's metrics, until the run has ended.",
)
@click.option(
    "--wait",
    metavar="DURATION",
    help="With --follow: how long to wait for a run that is neither running nor done; default: 1m.",
)
@click.option("--dataset", "only", metavar="NAME", multiple=True, help="Evaluate only on [data.eval.NAME]; repeatable.")
@click.option(
    "--lm-eval",
    "tasks",
    metavar="TASK",
    multiple=True,
    help="Evaluate by a task of EleutherAI's lm-evaluation-harness instead; repeatable.",
)
@click.option(
    "--include",
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    multiple=True,
    help="Folder with YAML files of own tasks for --lm-eval; repeatable.",
)
@click.option("--trust", is_flag=True, help="Run the Python code that YAML files of --include name (`!function`).")
@click.option("--chat", is_flag=True, help="Render the prompts of --lm-eval with the chat template.")
@sets_options
@json_option
def evaluate(
    run: str,
    step: int | None,
    best: bool,
    follow: bool,
    wait: str | None,
    only: tuple[str, ...],
    tasks: tuple[str, ...],
    include: tuple[Path, ...],
    trust: bool,
    chat: bool,
    sets: tuple[str, ...],
    as_json: bool,
) -> None:
    """Evaluate RUN, a run's folder or its name in runs/, on the recipe's [data.eval], or on each [data.eval.NAME].

    `--set` changes the recipe for this evaluation, e.g. data.eval.path=other.txt. Training data and optimizer state are
    not loaded.

    --lm-eval is for language models of ddpforge-transformers, in one process. Tasks of the harness download their data;
    those of --include may have local files.
    """
    if follow:
        excluded = {"--step": step is not None, "--best": best, "--dataset": only, "--lm-eval": tasks}
        for option in (name for name, given in excluded.items() if given):
            raise UsageError(
                f"{option} cannot be combined with --follow",
                hints=[f"omit {option}: --follow evaluates every checkpoint, on all evaluation sets"],
            )
    elif wait is not None:
        raise UsageError("--wait is for --follow", hints=["add --follow"])
    if tasks:
        _by_harness(run, step, best, tasks, include, trust, chat, as_json, {"--dataset": only, "--set": sets})
        return
    for option, given in (("--include", include), ("--trust", trust), ("--chat", chat)):
        if given:
            raise UsageError(f"{option} is for tasks of --lm-eval", hints=["add --lm-eval"])
    if follow:
        _follow(run, wait, sets, as_json)
        return
    with ending():
        environment().export_variables()
        watch_startup()

        with gc_paused():
            from ddpforge.api import RunFolder
            from ddpforge.app.evaluate import evaluate as evaluate_run

        folder = RunFolder.find(run)
        with results_alone(as_json):
            found = evaluate_run(folder, step=step, best=best, sets=sets, only=only)
        if found.is_rank_zero:
            click.echo(_line(found, folder.path, as_json))


def _line(found: "Evaluation", place: Path, as_json: bool) -> str:
    numbers = "  ".join(f"{name} {number(value)}" for name, value in found.metrics.items())
    return json.dumps(found.as_dict()) if as_json else f"{place} at step {found.step}: {numbers}"


def _follow(run: str, wait: str | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Evaluates the checkpoints of a run as they appear, and prints a line for each."""
    with ending():
        environment().export_variables()
        watch_startup()

        with gc_paused():
            from ddpforge.api import RunFolder
            from ddpforge.app.follow import follow

        folder, stdout = RunFolder.find(run), os.dup(1)

        def report(found: "Evaluation") -> None:
            os.write(stdout, f"{_line(found, folder.path, as_json)}\n".encode())

        try:
            with results_alone(True):
                follow(folder, report, sets=sets, wait=wait or "1m")
        except KeyboardInterrupt:
            if os.environ.get("RANK", "0") == "0":
                click.echo(
                    "interrupted; the same command goes on with the checkpoints that have no evaluation", err=True
                )
            raise


def _by_harness(
    run: str,
    step: int | None,
    best: bool,
    tasks: tuple[str, ...],
    include: tuple[Path, ...],
    trust: bool,
    chat: bool,
    as_json: bool,
    others: Mapping[str, object],
) -> None:
    """Evaluates by lm-evaluation-harness, and prints the results; `others` are options that it does not take."""
    from ddpforge.api import chosen_kind, load, world_size
    from ddpforge.app.evaluate import Evaluation
    from ddpforge.runs.checkpoints import find

    for option, value in others.items():
        if value:
            raise UsageError(f"{option} cannot be combined with --lm-eval", hints=[f"omit {option}"])
    if world_size() > 1:
        raise UsageError("--lm-eval runs in one process", hints=["start it without a launcher"])
    with results_alone(as_json):
        trained = load(find(run, step=step, best=best, intact=True))
        device = chosen_kind(trained.recipe.train).type
        metrics = trained.lm_eval(tasks, include=include, trust=trust, apply_chat_template=chat, device=device)
    found = Evaluation(trained.step, metrics, is_rank_zero=True)
    click.echo(_line(found, trained.folder.path, as_json))
