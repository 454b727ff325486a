"""Ends a process that may have threads of torch, which do not survive the interpreter's clean-up."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["exit_process", "forbid_sys_exit", "skip_interpreter_cleanup"]

_threads = False


def skip_interpreter_cleanup() -> None:
    """Records that this process may have threads of torch from now on: those of gloo and autograd."""
    global _threads
    _threads = True


def exit_process(code: int) -> NoReturn:
    """Ends the process; without the interpreter's clean-up if it is a rank of a launcher or may have torch's threads.

    Runs exit functions (atexit) of Python code, except on a rank of a launcher, for which other ranks wait.
    """
    # torch's threads sometimes abort the process in the clean-up, which turns a finished run into a failed one.
    if "RANK" in os.environ:
        os._exit(code)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler would report the loader processes that end now
    if _threads:
        from ddpforge import compat

        compat.run_exit_functions()
        os._exit(code)
    sys.exit(code)


@contextmanager
def forbid_sys_exit() -> Iterator[None]:
    """Raises RuntimeError in place of a component's SystemExit, so that its exit code is not taken for the run's."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(
            f"a component called sys.exit({error.code!r}); it must raise an exception instead"
        ) from error
