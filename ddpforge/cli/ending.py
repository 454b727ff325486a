"""Ends a process that may be one rank of many: in words, with an exit code, and without hanging."""

import json
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import click

from ddpforge.cli import complain
from ddpforge.confidential import redact
from ddpforge.errors import ExitCode, ForgeError, Postponed
from ddpforge.launchers.verdict import record_verdict
from ddpforge.ranks import leaving
from ddpforge.ranks.logs import keep_output
from ddpforge.watchdog.watch import failed, failure_of_another

_WATCH = os.path.join("ddpforge", "strategies", "watch.py")
_OURS = ("__main__", "click", "contextlib", "ddpforge")  # what a command goes through before a component is called


@contextmanager
def ending(*, status: bool = False) -> Iterator[None]:
    """Runs a command to its end and leaves with the exit code that `errors.ExitCode` gives it.

    With `status`, a failure is also told as one JSON object on stdout, in the form of a run's `status.json`.
    """
    keep_output()
    try:
        yield
    except (Exception, KeyboardInterrupt) as error:
        _speak_to_the_end()
        if isinstance(error, ForgeError):
            complain(error)
        elif isinstance(error, Exception):
            click.echo(f"[rank {os.environ.get('RANK', '0')}] {redact(_trace(error))}", err=True)
        if status and os.environ.get("RANK", "0") == "0":
            click.echo(json.dumps(failure(error)))
        leave(_exit_code(error), str(failure(error)["error"]))
    leave(ExitCode.DONE)


@contextmanager
def results_alone(wanted: bool) -> Iterator[None]:
    """Sends everything that components print inside to stderr, where `wanted`: stdout is for one result."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # also for other processes and for what is not Python
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def failure(error: BaseException) -> dict[str, Any]:
    """The state of the run that `error` ended, as its `status.json` has it."""
    if outcome := getattr(error, "outcome", None):
        return dict(outcome.status)
    return {
        "state": "preempted" if isinstance(error, Postponed) else "failed",
        "exit_code": _exit_code(error),
        "step": 0,
        "total_steps": None,
        "samples": 0,
        "world_size": int(os.environ.get("WORLD_SIZE", "1")),
        "strategy": None,
        "metrics": {},
        "error": redact(f"{type(error).__name__}: {error}".removesuffix(": ")),
    }


def _trace(error: Exception) -> str:
    """The traceback from where a component was called, if one was, to where operations are watched.

    A run's log has all of it.
    """
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace or error.__traceback__)
    watched = [number for number, frame in enumerate(found.stack) if frame.filename.endswith(_WATCH)]
    del found.stack[slice(watched[0], None) if watched and trace else slice(0)]
    return "".join(found.format())


def _exit_code(error: BaseException) -> ExitCode:
    if isinstance(error, ForgeError):
        return error.exit_code
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED


def _speak_to_the_end() -> None:
    """A launcher that has seen another rank fail ends this one: it is about to end anyway, when it has said why."""
    if "RANK" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave(code: ExitCode, error: str | None = None) -> NoReturn:
    """Ends the process at once, for everything is on disk by now."""
    failed(code, error)
    record_verdict(code, error=error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    leaving.leave(code)


def postpone(*, status: bool) -> None:
    """Ends the process from any thread, while the main one hangs: it was asked to stop before training began.

    A launcher asks for that where another rank has failed.
    """
    error: ForgeError | None = failure_of_another()
    if error is None or error.exit_code == ExitCode.PREEMPTED:
        hint = "nothing is lost: the same command begins again"
        error = Postponed("asked to stop before training began", hints=[hint])
    if os.environ.get("RANK", "0") == "0":
        complain(error)
        if status:
            click.echo(json.dumps(failure(error)))
    said = str(failure(error)["error"])
    failed(error.exit_code, said)
    record_verdict(error.exit_code, error=said)
    os._exit(error.exit_code)
