"""`ddpforge status`: prints the state and progress of a run, from any terminal."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import json_option, run_argument
from ddpforge.cli.tables import age, coloured, counted, number, printable, span

if TYPE_CHECKING:
    from ddpforge.api import RunSummary

_ALIVE = ("new", "starting", "running")


@click.command()
@run_argument
@click.option("--all", "whole", is_flag=True, help="Print every metric, not only the six most important.")
@click.option("--watch", is_flag=True, help="Print a line at every change until the run ends.")
@click.option(
    "--every",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="Interval in which --watch reads the folder.",
)
@json_option
def status(run: str, whole: bool, watch: bool, every: float, as_json: bool) -> None:
    """Print the status of RUN: its state, step, speed, time left, newest checkpoint and main metrics.

    RUN is a run's folder, or its name in runs/. Only the folder is read, so this works on any machine that has access
    to it. With --json and --watch, each line is one object.
    """
    from ddpforge.api import RunFolder, summarize

    folder = RunFolder.find(run)
    for found in followed(lambda: summarize(folder), lambda: time.sleep(every)) if watch else [summarize(folder)]:
        click.echo(json.dumps(_as_dict(found)) if as_json else _line(found) if watch else _page(found, whole))


def followed(look: "Callable[[], RunSummary]", wait: Callable[[], None]) -> "Iterator[RunSummary]":
    """Yields the result of `look` whenever it has changed, until the run has ended. Calls `wait` in between."""
    before = None
    while True:
        found = look()
        if found != before:
            yield found
        if found.state not in _ALIVE:
            return
        before = found
        wait()


def _as_dict(run: "RunSummary") -> dict[str, object]:
    return run.as_dict() | {"checkpoint": _checkpoint(run)}


def _checkpoint(run: "RunSummary") -> dict[str, object] | None:
    """Returns step and time of the newest complete checkpoint; None if there is none."""
    from ddpforge.api import committed

    found, _ = committed(run.folder.checkpoints)
    if not found:
        return None
    newest = found[0].manifest
    return {"step": newest.step, "created": newest.created}


def _line(run: "RunSummary") -> str:
    """Returns state, progress and newest metrics in one line."""
    metrics = [printable(f"{name} {value:.4g}") for name, value in _shown_metrics(run).items()]
    return "  ".join([_head(run), *metrics])


def _page(run: "RunSummary", whole: bool) -> str:
    from ddpforge.api import leading

    rows = [("last update", f"{age(time.time() - run.changed)} ago")]
    known = {name: value for name, value in run.metrics.items() if value is not None}
    shown = leading(known, None if whole else 6)
    rows += [(name, number(known[name])) for name in shown]
    if hidden := len(known) - len(shown):
        rows.append(("more", f"{counted(hidden, 'metric')}: --all"))
    if newest := _checkpoint(run):
        made = _unix(str(newest["created"]))
        since = f", {age(time.time() - made)} ago" if made is not None else ""
        rows.append(("checkpoint", f"of step {newest['step']:,}{since}"))
    else:
        rows.append(("checkpoint", "none"))
    if run.error:
        rows.append(("error", run.error))
    width = max(len(name) for name, _ in rows)
    return "\n".join([_head(run), *(f"  {printable(name):{width}}  {printable(text)}" for name, text in rows)])


def _head(run: "RunSummary") -> str:
    of = f" of {run.total_steps:,} ({run.step / run.total_steps:.0%})" if run.total_steps else ""
    speed = f", {run.rate:.3g} step/s" if run.rate else ""
    left = "" if run.seconds_left is None else f", {span(run.seconds_left)} left"
    attempt = f", attempt {run.attempt}" if run.attempt > 1 else ""
    path = printable(str(run.folder.path))
    return f"{path}: {coloured(run.state)} at step {run.step:,}{of}{speed}{left}{attempt}"


def _shown_metrics(run: "RunSummary") -> dict[str, float]:
    """Returns the training loss, evaluation metrics, items per second, and the share of time spent waiting for data."""
    wanted = (
        name
        for name in run.metrics
        if name in ("train/loss", "train/time/data") or name.startswith("eval/") or name.endswith("_per_second")
    )
    return {name: value for name in wanted if (value := run.metrics[name]) is not None}


def _unix(created: str) -> float | None:
    """Returns seconds since 1970; None if the text is not a time. A manifest may contain any text."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None
