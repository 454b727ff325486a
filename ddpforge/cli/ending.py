"""Ends a process that may be one of several ranks: prints the error, sets the exit code, and does not hang."""

import json
import logging
import os
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from typing import Any, NoReturn

import click

from ddpforge.api import world_size
from ddpforge.cli import complain
from ddpforge.errors import ExitCode, ForgeError, StoppedBeforeStart
from ddpforge.launchers.exit_record import record_exit
from ddpforge.ranks import process_exit
from ddpforge.ranks.logs import keep_output
from ddpforge.secret_redaction import redact
from ddpforge.watchdog.watchdog import failure_of_another, report_startup_failure

_GUARD = os.path.join("ddpforge", "strategies", "parameter_guard.py")
_OURS = ("__main__", "click", "contextlib", "ddpforge")  # packages of the frames above the first call of a component


@contextmanager
def ending(*, status: bool = False) -> Iterator[None]:
    """Runs a command inside and ends the process with an exit code of `errors.ExitCode`.

    `status`: print a failure as JSON on stdout too, in the format of a run's `status.json`.
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
        for line in () if status else _after(error):
            click.echo(line, err=True)
        if status and os.environ.get("RANK", "0") == "0":
            click.echo(json.dumps(failure(error)))
        leave(_exit_code(error), str(failure(error)["error"]))
    leave(ExitCode.DONE)


@contextmanager
def results_alone(wanted: bool) -> Iterator[None]:
    """Redirects the output of components inside to stderr if `wanted`, so that stdout has only the result."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    stdout = os.dup(1)
    os.dup2(2, 1)  # also for subprocesses and native code
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


def failure(error: BaseException) -> dict[str, Any]:
    """Returns the state of the run that `error` ended, in the format of `status.json`."""
    if outcome := getattr(error, "outcome", None):
        return dict(outcome.status)
    return {
        "state": "preempted" if isinstance(error, StoppedBeforeStart) else "failed",
        "exit_code": _exit_code(error),
        "step": 0,
        "total_steps": None,
        "samples": 0,
        "world_size": world_size(),
        "strategy": None,
        "metrics": {},
        "error": redact(f"{type(error).__name__}: {error}".removesuffix(": ")),
    }


def _after(error: BaseException) -> Iterator[str]:
    """Yields the place of the logs of a run that failed, and the next step; nothing if no run began."""
    outcome = getattr(error, "outcome", None)
    if outcome is None or not outcome.is_rank_zero or isinstance(error, KeyboardInterrupt):
        return
    logs = outcome.folder / "logs"
    yield f"log: {logs / 'rank-0.log' if outcome.status['world_size'] == 1 else logs}"
    if any((outcome.folder / "checkpoints").glob("step-*")):
        yield "next: after a change, the same command resumes from the last checkpoint"


def to_resume() -> str:
    """Returns a line with the command of this process, without --fresh: it resumes the run."""
    return f"to resume: {shlex.join(['ddpforge', *(word for word in sys.argv[1:] if word != '--fresh')])}"


def _trace(error: Exception) -> str:
    """Returns the traceback of a component, without ddpforge's frames: above it, and from `strategies/watch.py` on.

    The run's log has the complete traceback.
    """
    trace = error.__traceback__
    while trace and trace.tb_frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        trace = trace.tb_next
    found = traceback.TracebackException(type(error), error, trace or error.__traceback__)
    watched = [number for number, frame in enumerate(found.stack) if frame.filename.endswith(_GUARD)]
    del found.stack[slice(watched[0], None) if watched and trace else slice(0)]
    return "".join(found.format())


def _exit_code(error: BaseException) -> ExitCode:
    if isinstance(error, ForgeError):
        return error.exit_code
    return ExitCode.INTERRUPTED if isinstance(error, KeyboardInterrupt) else ExitCode.FAILED


def _speak_to_the_end() -> None:
    """Ignores SIGTERM from now on: a launcher sends it after another rank failed, and this rank has to report first."""
    if "RANK" in os.environ and threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.SIG_IGN)


def leave(code: ExitCode, error: str | None = None) -> NoReturn:
    """Ends the process at once, without cleanup. Everything must be on disk before."""
    report_startup_failure(code, error)
    record_exit(code, error=error)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    process_exit.exit_process(code)


def postpone(*, status: bool) -> None:
    """Ends the process from any thread after a stop request before training, while the main thread hangs.

    The request may come from a launcher or a watchdog after another rank failed; then that failure is reported.
    """
    error: ForgeError | None = failure_of_another()
    if error is None or error.exit_code == ExitCode.PREEMPTED:
        hint = "nothing is lost: the same command starts it again"
        error = StoppedBeforeStart("stopped before training began", hints=[hint])
    if os.environ.get("RANK", "0") == "0":
        complain(error)
        if status:
            click.echo(json.dumps(failure(error)))
    said = str(failure(error)["error"])
    report_startup_failure(error.exit_code, said)
    record_exit(error.exit_code, error=said)
    os._exit(error.exit_code)
