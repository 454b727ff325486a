"""Ends a process once torch has threads in it, which do not survive the interpreter's clean-up."""

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

__all__ = ["at_once", "leave", "nobody_leaves"]

_threads = False


def at_once() -> None:
    """From here on there may be such threads: gloo's, and those of autograd, which may not even have begun."""
    global _threads
    _threads = True


def leave(code: int) -> NoReturn:
    """Ends the process; where it has such threads, or is one rank of many, without the interpreter's clean-up.

    Those threads now and then abort a process that takes the long way out, which turns a finished run into a failed
    one. What Python code has registered for the end is done all the same, but not on a rank: others wait for it.
    """
    if "RANK" in os.environ:
        os._exit(code)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's would complain of loader processes that are ended now
    if _threads:
        from ddpforge import compat

        compat.run_exit_functions()
        os._exit(code)
    sys.exit(code)


@contextmanager
def nobody_leaves() -> Iterator[None]:
    """Makes a RuntimeError of a component's sys.exit, which would end the process as if that were the run's verdict."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"a component called sys.exit({error.code!r}), where it should raise an error") from error
