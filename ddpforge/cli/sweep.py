"""`ddpforge sweep`: trains a recipe with many values, and compares the results."""

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import click

from ddpforge.cli.options import assignments, complete_keys, json_option, recipe_argument, set_option
from ddpforge.cli.runs import print_runs
from ddpforge.cli.tables import coloured, counted, number, printable, span
from ddpforge.errors import ExitCode, UsageError

if TYPE_CHECKING:
    from ddpforge.tools.sweeps.space import Variant
    from ddpforge.tools.sweeps.training import Commands, SweepPlan, Trained


@click.command()
@recipe_argument
@click.argument("words", nargs=-1, required=True, shell_complete=complete_keys, metavar="KEY=VALUES...")
@set_option
@click.option("-j", "--jobs", type=click.IntRange(1, 1024), default=1, show_default=True, help="Runs in parallel.")
@click.option(
    "-n", "--nproc", type=click.IntRange(1, 1024), default=1, show_default=True, help="Processes of each run."
)
@click.option("--random", "draws", type=click.IntRange(1, 10_000), metavar="N", help="Train N runs with random values.")
@click.option(
    "--optuna", "trials", type=click.IntRange(1, 10_000), metavar="N", help="Train N runs, chosen one by one by Optuna."
)
@click.option(
    "--metric",
    metavar="NAME",
    help="Metric to sort by and to optimize; default: checkpoint.keep.monitor, else eval/loss.",
)
@click.option(
    "--mode", type=click.Choice(["min", "max"]), help="Better: a smaller or a larger metric; default: by its name."
)
@click.option("--no-prune", is_flag=True, help="Do not stop unpromising runs of Optuna early.")
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Seed of --random and --optuna.")
@click.option(
    "-o",
    "--out",
    type=click.Path(file_okay=False),
    metavar="DIR",
    help="Folder for the runs; default: runs/NAME-sweep.",
)
@json_option
def sweep(
    recipe: str,
    words: tuple[str, ...],
    sets: tuple[str, ...],
    jobs: int,
    nproc: int,
    draws: int | None,
    trials: int | None,
    metric: str | None,
    mode: Literal["min", "max"] | None,
    no_prune: bool,
    seed: int,
    out: str | None,
    as_json: bool,
) -> None:
    """Train RECIPE with many values: KEY=A,B,C tries each, KEY=0..4 each integer, several keys every combination.

    With --random or --optuna, values of KEY=1e-4..1e-1 are sampled uniformly, and those of KEY=1e-4..1e-1:log
    log-uniformly. KEY=VALUE is set in all runs. The same command resumes a stopped sweep: finished runs are kept, the
    others are resumed. Exit codes: 0 all done, 1 some failed, 2 usage or recipe, 75 preempted.
    """
    from ddpforge.ranks.logs import keep_output
    from ddpforge.tools.sweeps.space import SearchSpace
    from ddpforge.tools.sweeps.training import Commands, SweepPlan, mode_of
    from ddpforge.tools.sweeps.training import devices as share_out

    keep_output()
    _reject(draws, trials)
    plan = SweepPlan.of(recipe, SearchSpace.parse((*sets, *assignments(words))), out=out, nproc=nproc)
    devices = share_out(plan.base, jobs=jobs, nproc=nproc)
    commands = Commands(recipe=recipe, folder=plan.folder, nproc=nproc, jobs=jobs, devices=devices)
    metric = plan.metric(metric)
    if trials:
        search = {"metric": metric, "mode": mode_of(metric, mode), "seed": seed, "prunes": not no_prune}
        ended, stopped = _search(plan, commands, trials, search)
    else:
        variants = plan.space.drawn(draws, seed) if draws else plan.space.grid()
        ended, stopped = _train(plan, commands, variants, metric)
    _report(plan, ended, metric, as_json)
    failed = [one for one in ended if one.state not in ("done", "preempted")]
    sys.exit(ExitCode.PREEMPTED if stopped else ExitCode.FAILED if failed else ExitCode.DONE)


def _reject(draws: int | None, trials: int | None) -> None:
    if draws and trials:
        raise UsageError("--random and --optuna exclude each other", hints=["use one of them"])
    if "RANK" in os.environ:
        raise UsageError(
            "a sweep starts the processes of its runs", hints=["run it without a launcher, with --nproc N"]
        )


def _train(
    plan: "SweepPlan", commands: "Commands", variants: "Sequence[Variant]", metric: str
) -> "tuple[list[Trained], bool]":
    from ddpforge.tools.sweeps.training import train

    waiting, ended = plan.split(variants)
    known = f", {len(ended)} of them trained already" if ended else ""
    _say(f"{plan.folder}: {counted(len(variants), 'run')}{known}")
    progress = SweepProgress(metric, len(waiting))
    trained, stopped = train(waiting, commands, begins=progress.begins, on_result=progress.on_result)
    return ended + trained, stopped


def _search(
    plan: "SweepPlan", commands: "Commands", trials: int, options: Mapping[str, object]
) -> "tuple[list[Trained], bool]":
    from ddpforge.tools.sweeps.optuna_study import Search
    from ddpforge.tools.sweeps.training import train

    search = Search(plan.space, plan.folder, count=trials, **options)  # type: ignore[arg-type]

    progress = SweepProgress(str(options["metric"]), trials)

    def on_result(variant: "Variant", trained: "Trained") -> None:
        search.report(variant, trained)
        progress.on_result(variant, trained)

    _say(f"{plan.folder}: {counted(trials, 'trial')}")
    trained, stopped = train(search, commands, begins=progress.begins, on_result=on_result)
    return search.earlier({one.name for one in trained}) + trained, stopped


def _say(line: str) -> None:
    click.echo(printable(line), err=True)


class SweepProgress:
    """Prints a line for each run of a sweep that begins or ends, with its number and the time left."""

    def __init__(self, metric: str, total: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._metric, self._total, self._clock = metric, total, clock
        self._begun = self._ended = 0
        self._started = clock()

    def begins(self, variant: "Variant") -> None:
        """Prints that a run begins."""
        self._begun += 1
        _say(f"{self._begun}/{self._total} {variant.name}: started")

    def on_result(self, variant: "Variant", trained: "Trained") -> None:
        """Prints the state and the metric of a run, and the time left, by the runs so far."""
        self._ended += 1
        value = number(trained.metrics.get(self._metric))
        shown = f", {self._metric} {value}" if value else ""
        left = (self._total - self._ended) * (self._clock() - self._started) / self._ended
        eta = f" · {self._ended}/{self._total} ended · eta {span(left)}" if left > 0 else ""
        click.echo(f"{printable(variant.name)}: {coloured(trained.state)}{printable(shown)}{eta}", err=True)


# ---------------------------------------------------------------------------------------------- the end
def _varied(difference: Mapping[str, Any], axes: Sequence[str]) -> dict[str, Any]:
    """Returns the differences in keys that the sweep varies."""
    return {key: value for key, value in difference.items() if any(f"{key}.".startswith(f"{axis}.") for axis in axes)}


def _report(plan: "SweepPlan", ended: "Sequence[Trained]", metric: str, as_json: bool) -> None:
    from ddpforge.api import RunFolder, differences, sorted_by, summarize

    fine = [RunFolder(plan.folder / one.name) for one in ended if one.state in ("done", "preempted")]
    good = [summarize(folder) for folder in fine if folder.exists()]  # a run may be stopped before it has a folder
    having = any(run.metrics.get(metric) is not None for run in good)
    good = sorted_by(good, metric if having else "name")
    bad = [one for one in ended if one.state not in ("done", "preempted")]
    varying = [_varied(each, tuple(plan.space.axes)) for each in differences(good)]
    if as_json:
        runs = [run.as_dict() | {"difference": each} for run, each in zip(good, varying, strict=True)]
        failed = [{"run": one.name, "state": one.state, "error": one.error, "log": str(one.log)} for one in bad]
        click.echo(
            json.dumps({"folder": str(plan.folder), "metric": metric, "runs": runs, "failed": failed}, default=str)
        )
        return
    if good:
        print_runs(good, varying, [metric], way=f"all columns: ddpforge runs ls {plan.folder} --wide")
    for one in bad:
        _say(f"{one.name}: {one.state}: {one.error or 'no reason is known'}; see {one.log}")
