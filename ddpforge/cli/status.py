"""`ddpforge status`: print how a run stands, from another terminal."""

import json
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import json_option, run_argument
from ddpforge.cli.tables import age, printable, span

if TYPE_CHECKING:
    from ddpforge.runs.overview import Standing

_ALIVE = ("new", "starting", "running")


@click.command()
@run_argument
@click.option("--watch", is_flag=True, help="Keep printing until the run ends: a line whenever something changes.")
@click.option(
    "--every",
    type=click.FloatRange(0.1, 3600),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often --watch looks.",
)
@json_option
def status(run: str, watch: bool, every: float, as_json: bool) -> None:
    """Print how RUN stands: its state, step, speed, time left, newest metrics and checkpoint.

    RUN is a run's folder, or its name in runs/. The folder is read and nothing else, so this works from any machine
    that sees it; with --json, one object a line.
    """
    from ddpforge.runs.folder import RunFolder
    from ddpforge.runs.overview import standing

    folder = RunFolder.find(run)
    for found in followed(lambda: standing(folder), lambda: time.sleep(every)) if watch else [standing(folder)]:
        click.echo(json.dumps(_as_dict(found)) if as_json else _line(found) if watch else _page(found))


def followed(look: "Callable[[], Standing]", wait: Callable[[], None]) -> "Iterator[Standing]":
    """Yields what a look finds, where that is not what the one before it found, until the run has ended."""
    before = None
    while True:
        found = look()
        if found != before:
            yield found
        if found.state not in _ALIVE:
            return
        before = found
        wait()


def _as_dict(run: "Standing") -> dict[str, object]:
    return run.as_dict() | {"checkpoint": _checkpoint(run)}


def _checkpoint(run: "Standing") -> dict[str, object] | None:
    """The newest one that is complete."""
    from ddpforge.checkpoint.retention import committed

    found, _ = committed(run.folder.checkpoints)
    if not found:
        return None
    newest = found[0].manifest
    return {"step": newest.step, "created": newest.created}


def _line(run: "Standing") -> str:
    """One line: where the run is, and the newest losses."""
    metrics = [f"{name} {value:.4g}" for name, value in _told(run).items()]
    return "  ".join(printable(part) for part in (_head(run), *metrics))


def _page(run: "Standing") -> str:
    rows = [("last sign of life", f"{age(time.time() - run.changed)} ago")]
    rows += [(name, f"{value:.6g}") for name, value in run.metrics.items() if value is not None]
    if newest := _checkpoint(run):
        made = _unix(str(newest["created"]))
        since = f", {age(time.time() - made)} ago" if made is not None else ""
        rows.append(("checkpoint", f"of step {newest['step']:,}{since}"))
    else:
        rows.append(("checkpoint", "none"))
    if run.error:
        rows.append(("error", run.error))
    width = max(len(name) for name, _ in rows)
    return "\n".join(
        [printable(_head(run)), *(f"  {printable(name):{width}}  {printable(text)}" for name, text in rows)]
    )


def _head(run: "Standing") -> str:
    of = f" of {run.total_steps:,} ({run.step / run.total_steps:.0%})" if run.total_steps else ""
    speed = f", {run.rate:.3g} step/s" if run.rate else ""
    left = "" if run.seconds_left is None else f", {span(run.seconds_left)} left"
    attempt = f", attempt {run.attempt}" if run.attempt > 1 else ""
    return f"{run.folder.path}: {run.state} at step {run.step:,}{of}{speed}{left}{attempt}"


def _told(run: "Standing") -> dict[str, float]:
    """The training loss, what evaluations said, items per second, and the share of time that waits for data."""
    wanted = (
        name
        for name in run.metrics
        if name in ("train/loss", "train/time/data") or name.startswith("eval/") or name.endswith("_per_second")
    )
    return {name: value for name in wanted if (value := run.metrics[name]) is not None}


def _unix(created: str) -> float | None:
    """Seconds since 1970; None for text that is no time: a manifest may say anything."""
    from datetime import datetime

    try:
        return datetime.fromisoformat(created).timestamp()
    except (ValueError, OverflowError):
        return None
