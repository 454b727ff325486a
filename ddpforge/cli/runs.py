"""`ddpforge runs`: lists runs with their states and differences; compares, resumes and deletes them."""

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ddpforge.cli.options import json_option, run_argument, sets_options
from ddpforge.cli.tables import WAY, ages, counted, number, print_table, printable, terminal_width
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.api import Comparison, RunFolder, RunSummary
    from ddpforge.runs.summary import Point


@click.group()
def runs() -> None:
    """List, compare, resume and delete runs. Only their folders are needed.

    RUN is a run's folder, or its name in runs/.
    """


# ---------------------------------------------------------------------------------------------- ls
@runs.command("ls")
@click.argument("folders", metavar="[DIR]...", nargs=-1, type=click.Path())
@click.option("--state", "states", multiple=True, metavar="STATE", help="Only runs in this state; repeatable.")
@click.option("--name", default="*", metavar="GLOB", help="Only runs with matching names, e.g. 'digits-*'.")
@click.option(
    *("-w", "--where"),
    multiple=True,
    metavar="KEY=VALUE",
    help="Only runs with this value in the resolved recipe; repeatable.",
)
@click.option(
    "--sort",
    "by",
    default="age",
    metavar="COLUMN",
    show_default=True,
    help="Sort by age (the newest first), name, state, step, or a metric (the best first).",
)
@click.option("--reverse", is_flag=True, help="Reverse the order.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME", help="Show this metric; repeatable.")
@click.option("--wide", is_flag=True, help="Show every column, even if the table is wider than the terminal.")
@json_option
def ls(
    folders: tuple[str, ...],
    states: tuple[str, ...],
    name: str,
    where: tuple[str, ...],
    by: str,
    reverse: bool,
    metrics: tuple[str, ...],
    wide: bool,
    as_json: bool,
) -> None:
    """List the runs in each DIR, by default runs/, at most three folders down.

    Each key of the recipe in which runs of the same model and dataset differ has a column. A run is "killed" if its
    status is "running" but no process trains it.
    """
    from ddpforge.api import differences, find_runs, sorted_by, summarize
    from ddpforge.runs.summary import chosen, notable

    _reject_unknown(states)
    found = [summarize(folder) for folder in find_runs(folders or _default())]
    shown = chosen(found, states=states, name=name, where=where)
    shown = sorted_by(shown, by, reverse=reverse) if shown else []
    varying = differences(shown)
    if as_json:
        rows = [run.as_dict() | {"difference": each} for run, each in zip(shown, varying, strict=True)]
        click.echo(json.dumps({"runs": rows}, default=str))
    elif not shown:
        where_looked = ", ".join(folders) or "runs/"
        click.echo(f"{where_looked}: no runs{f' like that among {len(found)}' if found else ''}")
    else:
        print_runs(shown, varying, metrics or notable(shown), wide=wide)


def _default() -> list[str]:
    return ["runs"] if Path("runs").is_dir() else []


def _reject_unknown(states: Iterable[str]) -> None:
    from ddpforge.runs.summary import STATES

    for state in states:
        if state not in STATES:
            raise UsageError(f"there is no state {state!r}", hints=[f"use one of {', '.join(STATES)}"])


def print_runs(
    shown: "Sequence[RunSummary]",
    varying: Sequence[Mapping[str, Any]],
    names: Sequence[str],
    *,
    wide: bool = False,
    way: str = WAY,
) -> None:
    """Prints a table of runs: metrics `names`, and a column for each key in which runs differ.

    On a terminal, the folder of all runs is printed once, above. `way` is the hint for columns that do not fit.
    """
    from ddpforge.runs.summary import rank_of_key

    now = time.time()
    keys = list(dict.fromkeys(key for each in varying for key in each))
    titles = _titles(keys, taken=("run", "state", "step", "age", *names))
    columns = {
        "run": short_names([run.folder.path for run in shown], wide=wide),
        "state": [run.state for run in shown],
        "step": list(map(steps, shown)),
        **{name: [number(run.metrics.get(name)) for run in shown] for name in names},
        **{titles[key]: [_cell(each, key) for each in varying] for key in keys},
        "age": ages([now - run.changed for run in shown]),
    }
    widest = sorted(keys, key=lambda key: (-rank_of_key(key), -max(map(len, columns[titles[key]]))))
    of_keys = [titles[key] for key in widest] if len(widest) > 1 else []
    order = ["age", "step", *reversed(names[1:]), *of_keys, "state"]
    print_table(list(columns), list(zip(*columns.values(), strict=True)), droppable=order, wide=wide, way=way)


def short_names(paths: Sequence[Path], *, wide: bool = False) -> list[str]:
    """Returns the paths; on a terminal without their common folder, which is printed instead."""
    common = os.path.commonpath([path.parent for path in paths]) if paths else ""
    if wide or not common or terminal_width() is None:
        return [str(path) for path in paths]
    click.echo(f"{printable(common)}/")
    return [os.path.relpath(path, common) for path in paths]


def _titles(keys: Sequence[str], taken: Sequence[str]) -> dict[str, str]:
    """Returns a title for each key: its last part, or the whole key if another column has that title."""
    last = [key.rpartition(".")[2] for key in keys]
    return {
        key: short if last.count(short) == 1 and short not in (*taken, "use") else key
        for key, short in zip(keys, last, strict=True)
    }


def _cell(difference: Mapping[str, Any], key: str) -> str:
    """Returns the value of a key; "-" if the recipe lacks it, "" if it is of runs of another kind."""
    if key not in difference:
        return ""
    return "-" if difference[key] is None else _toml(difference[key])


def steps(run: "RunSummary") -> str:
    """Returns a run's step and total steps: 120/345."""
    return f"{run.step:,}" if run.total_steps is None else f"{run.step:,}/{run.total_steps:,}"


def _toml(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


# ---------------------------------------------------------------------------------------------- compare
@runs.command("compare")
@click.argument("names", metavar="RUN RUN...", nargs=-1, required=True, type=click.Path())
@click.option("--all", "every", is_flag=True, help="Print every metric, not only the six most important.")
@click.option("--curve", "drawn", multiple=True, metavar="METRIC", help="Draw this metric; repeatable.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Draw the curves into FILE (.png, .svg, .pdf) instead of the terminal; without --curve, the main metrics.",
)
@json_option
def compare(names: tuple[str, ...], every: bool, drawn: tuple[str, ...], picture: Path | None, as_json: bool) -> None:
    """Compare each RUN with the others: recipe, code, environment, metrics, and curves with --curve.

    RUN is a run's folder, its name in runs/, or a folder of runs such as a sweep's.

    The output has the main metrics, and the differences: keys of the resolved recipes, local files of code, machines
    and packages. Curves need the extra `plot`.
    """
    from ddpforge.api import named_runs, summarize
    from ddpforge.runs.summary import compare as compared
    from ddpforge.runs.summary import curves, notable

    folders = named_runs(names)
    if len(folders) < 2:
        raise UsageError("expected two runs or more", hints=["name another run: ddpforge runs compare A B"])
    found = compared(folders)
    wanted = drawn or (notable([summarize(folder) for folder in folders]) if picture else ())
    lines = curves(folders, wanted)
    if as_json:
        click.echo(json.dumps(found.as_dict() | {"curves": lines}, default=str))
    else:
        _print_comparison(found, every=every)
    if picture and lines:
        from ddpforge.cli.tables import as_picture

        as_picture(picture, lines)
        click.echo(f"curves: {picture}", err=True)
    elif not as_json:
        _draw(lines)


def _print_comparison(found: "Comparison", *, every: bool) -> None:
    from ddpforge.api import leading

    names = short_names(list(map(Path, found.runs)))
    sections = {"recipe": found.recipe, "code": found.code, "environment": found.environment}
    for title, table in sections.items():
        if not table:
            click.echo(f"{title}: same\n")
            continue
        rows = [[key, *("-" if value is None else _toml(value) for value in values)] for key, values in table.items()]
        print_table((title, *names), rows)
        click.echo()
    shown = leading(found.metrics, None if every else 6)
    print_table(("metric", *names), [[name, *map(number, found.metrics[name])] for name in shown])
    if hidden := len(found.metrics) - len(shown):
        click.echo(f"{counted(hidden, 'more metric')}: --all", err=True)


def _draw(curves: "Mapping[str, Mapping[str, Sequence[Point]]]") -> None:
    from ddpforge.cli.tables import in_terminal

    for metric, lines in curves.items():
        click.echo(f"\n{in_terminal(metric, lines)}")


# ---------------------------------------------------------------------------------------------- rm, resume
@runs.command("rm")
@click.argument("names", metavar="RUN...", nargs=-1, required=True, type=click.Path())
@click.option("-y", "--yes", is_flag=True, help="Delete without a question.")
def rm(names: tuple[str, ...], yes: bool) -> None:
    """Delete each RUN with its checkpoints, after a question. A run that trains now cannot be deleted."""
    from ddpforge.api import RunFolder, summarize

    folders = list(dict.fromkeys(map(RunFolder.find, names)))
    found = [summarize(folder) for folder in folders]
    if busy := [str(run.folder.path) for run in found if run.state in ("running", "starting")]:
        raise UsageError(f"a process is training {', '.join(busy)}", hints=["stop it first, e.g. with Ctrl-C"])
    for run in found:
        click.echo(f"{printable(str(run.folder.path))}: {run.state} at step {steps(run)}", err=not yes)
    if not yes and not _agreed(f"Delete {counted(len(folders), 'run')} with all checkpoints?"):
        raise UsageError("nothing was deleted", hints=["to delete without a question, use --yes"])
    for folder in folders:
        folder.delete()


def _agreed(question: str) -> bool:
    try:
        return click.confirm(question, err=True)
    except click.Abort:  # stdin has no answer
        return False


@runs.command("resume")
@run_argument
@click.option("-n", "--nproc", type=click.IntRange(1, 1024), help="Processes to start; default: the previous number.")
@sets_options
@json_option
def resume(run: str, nproc: int | None, sets: tuple[str, ...], as_json: bool) -> None:
    """Resume RUN, with the recipe in its folder and the previous number of processes.

    To continue a finished run, set a longer train.length=LENGTH.
    """
    from ddpforge.api import RunFolder
    from ddpforge.cli.launch import launch

    folder = RunFolder.find(run)
    arguments = [str(folder.resolved), f"--nproc={nproc or _ranks(folder)}", f"--out={folder.path.parent}"]
    arguments += [f"--set=name={folder.path.name}", *(f"--set={text}" for text in sets)]
    launch.main([*arguments, *(["--json"] if as_json else [])], prog_name="ddpforge launch")


def _ranks(folder: "RunFolder") -> int:
    """Returns the number of processes that trained the run. Raises UsageError if they were on several machines."""
    variables = folder.surroundings().get("environment", {})
    ranks, here = (variables.get(name, "1") for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
    if ranks != here:
        raise UsageError(
            f"{folder.path} was trained by {ranks} processes on several machines",
            hints=[
                f"start them in the same way, with the recipe {folder.resolved}",
                "or set the number of processes on this machine: --nproc N",
            ],
        )
    return int(ranks)
