"""Hides what only Linux has from ddpforge, in every Python process that has this folder on PYTHONPATH.

With it, `make test-portable` runs the tests on the ways that macOS takes. /proc and /dev/shm are hidden from ddpforge
alone, because psutil reads /proc itself.
"""

import builtins
import functools
import io
import mmap
import os
import select
import signal
import sys
from collections.abc import Callable
from typing import Any

_CALLS = (
    *("memfd_create", "pidfd_open", "posix_fadvise", "posix_fallocate", "copy_file_range", "SCHED_BATCH"),
    *("sched_getaffinity", "sched_setaffinity", "sched_getscheduler", "sched_setscheduler"),
)
_PLACES = ("/proc/", "/dev/shm", "/dev/nvidia", "/sys/")


def _hidden(path: Any) -> bool:
    """True if ddpforge, not a library that it calls, uses a path that only Linux has."""
    if not isinstance(path, str | os.PathLike) or not f"{os.fspath(path)!s}/".startswith(_PLACES):
        return False
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_globals.get("__name__", "")
        if name.startswith("psutil"):
            return False
        if name.startswith("ddpforge"):
            return True
        frame = frame.f_back
    return False


def _hiding(call: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(call)
    def hiding(path: Any, *arguments: Any, **options: Any) -> Any:
        if _hidden(path):
            raise FileNotFoundError(2, "hidden by the tests", os.fspath(path))
        return call(path, *arguments, **options)

    return hiding


for name in _CALLS:
    if hasattr(os, name):
        delattr(os, name)
for name in ("SIGRTMIN", "SIGRTMAX"):
    delattr(signal, name)
del select.epoll
del mmap.MADV_DONTFORK
io.open = builtins.open = _hiding(open)  # type: ignore[assignment]
os.listdir, os.stat = _hiding(os.listdir), _hiding(os.stat)
