"""`ddpforge status`: prints the state and progress of a run, from any terminal."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import click

from ddpforge import disk
from ddpforge.cli.options import json_option, run_argument
from ddpforge.cli.tables import age, coloured, counted, number, printable, span
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.api import RunFolder, RunSummary

_ALIVE = ("new", "starting", "running")
_MOST = 1 << 20  # bytes of a small file of the run
_BAR = 32  # characters of the longest bar


@click.command()
@run_argument
@click.option("--all", "whole", is_flag=True, help="Print every metric, not only the six most important.")
@click.option("--time", "of_time", is_flag=True, help="Print where the time of all attempts went, and what would help.")
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
def status(run: str, whole: bool, of_time: bool, watch: bool, every: float, as_json: bool) -> None:
    """Print the status of RUN: its state, step, speed, time left, newest checkpoint and main metrics.

    RUN is a run's folder, or its name in runs/. Only the folder is read, so this works on any machine that has access
    to it. With --json and --watch, each line is one object.
    """
    from ddpforge.api import RunFolder, summarize

    folder = RunFolder.find(run)
    if of_time:
        if watch:
            raise UsageError("--time is for one look, --watch for many", hints=["give one of them"])
        click.echo(_times(folder, as_json))
        return
    for found in followed(lambda: summarize(folder), lambda: time.sleep(every)) if watch else [summarize(folder)]:
        click.echo(json.dumps(_as_dict(found)) if as_json else _line(found) if watch else _page(found, whole))


def _times(folder: "RunFolder", as_json: bool) -> str:
    """Returns a bar for each kind of time, the attempts, and what would help."""
    from ddpforge.api import summarize
    from ddpforge.tools.reports.time_account import account_of
    from ddpforge.tools.reports.time_advice import advice

    account = account_of(folder)
    if account is None:
        raise UsageError(
            f"{folder.path} has no account of its time", hints=["runs of ddpforge 0.6 or newer write one in logs/"]
        )
    helps = [str(one) for one in advice(account)]
    if as_json:
        return json.dumps(account.as_dict() | {"advice": helps})
    lines = [
        _head(summarize(folder)),
        f"  {span(account.whole)} from the first start to the end, {account.explained:.1%} of it explained",
    ]
    longest = max((share for *_, share in account.shares()), default=1.0)
    for kind, seconds, share in account.shares():
        bar = "█" * round(_BAR * share / longest)
        lines.append(f"  {kind:16}  {seconds:>10,.1f} s  {share:>6.1%}  {bar}".rstrip())
    lines += [f"  attempt {number}: {one}" for number, one in enumerate(account.attempts, start=1)]
    lines += [f"  {account.slowest}"] if account.slowest else []
    return "\n".join([*lines, *(f"  would help: {one}" for one in helps)])


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
    return run.as_dict() | {"checkpoint": _checkpoint(run), "slow_ranks": _slow_ranks(run)}


def _checkpoint(run: "RunSummary") -> dict[str, object] | None:
    """Returns step and time of the newest complete checkpoint; None if there is none."""
    from ddpforge.api import committed

    found, _ = committed(run.folder.checkpoints)
    if not found:
        return None
    newest = found[0].manifest
    return {"step": newest.step, "created": newest.created}


def _slow_ranks(run: "RunSummary") -> list[dict[str, Any]]:
    """Returns the ranks of the newest attempt that are slow; a folder from elsewhere may hold anything."""
    try:
        path = run.folder.path / "slow_ranks.json"
        named = json.loads(disk.read_plain(path, _MOST, within=run.folder.path))["named"]
        return [
            one
            for one in named
            if isinstance(one["text"], str) and isinstance(one["since"], int) and one["until"] is None
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


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
    rows += [("slow rank", f"{one['text']}, since step {one['since']:,}") for one in _slow_ranks(run)]
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
