"""Checks the machine's resources for loader processes, and builds the errors if one is missing."""

from __future__ import annotations

import multiprocessing
import re
import resource
import shutil
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpforge import compat
from ddpforge.errors import ForgeError, PluginError, SetupError
from ddpforge.machine import open_files, shared_memory_folder
from ddpforge.ranks.failures import phrase

__all__ = ["explained", "lacks_resources", "refuse_missing_resources", "reporting_context", "starting", "takes_sockets"]

_LEAST = 1 << 20  # minimum bytes of shared memory; even the smallest batches take one page for each tensor
_SOCKET = len("/pymp-12345678/listener-12345678")  # multiprocessing appends this to the folder of temporary files
_FILES = 4  # file descriptors of this process for each loader process: queues, and a sentinel for its end
_NO_ROOM = re.compile(r"No space left|shared memory|DataLoader worker .*Bus error", re.I)
_NO_FILES = "Too many open files"
_ALONE = "or fetch in the training process: data.workers = 0"


def refuse_missing_resources(workers: int, prefetch: int, *, shm: Path | None = None) -> None:
    """Raises SetupError if loader processes could start but could not send micro-batches."""
    needs = f"data.workers = {workers} needs"
    place = shm or shared_memory_folder()
    folder = tempfile.gettempdir()
    if not takes_sockets(folder):
        raise SetupError(
            f"{needs} sockets in the folder for temporary files, but its path is too long for them: {folder}",
            hints=["set TMPDIR to a shorter path, such as /tmp", _ALONE],
        )
    if place and place.is_dir() and (free := shutil.disk_usage(place).free) < _LEAST:
        raise SetupError(
            f"{needs} shared memory for micro-batches, but {place} has only {free} bytes free",
            hints=[f"remove files in {place}, or make it larger: docker run --shm-size=8g", _ALONE],
        )
    _raise_limit(workers, prefetch, needs)


def takes_sockets(folder: str) -> bool:
    """True if multiprocessing can create its sockets in that folder: a path may have 107 bytes on Linux."""
    with socket.socket(socket.AF_UNIX) as one:
        try:
            one.connect(f"{folder}{'x' * _SOCKET}")
        except OSError as error:
            return "too long" not in str(error)
    return True


def _raise_limit(workers: int, prefetch: int, needs: str) -> None:
    """Raises this process's limit of open files if loader processes would come near it.

    Raises SetupError if the system does not allow a sufficient limit.
    """
    limit, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    there = open_files()
    needed = there + workers * (_FILES + 2 * prefetch)  # each tensor that is sent takes one: inputs and targets
    if limit != resource.RLIM_INFINITY and limit < 4 * needed and limit != most:
        limit = 4096 if most == resource.RLIM_INFINITY else min(most, max(4096, 4 * needed))
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, most))
    if limit != resource.RLIM_INFINITY and limit < needed:
        raise SetupError(
            f"{needs} about {needed} open files in this process, but the limit is {limit}",
            hints=[f"ulimit -n {max(1024, 4 * needed)}", _ALONE],
        )


# ---------------------------------------------------------------------------------------------- errors of processes
class _Telling(compat.ReportingQueue):
    """Queue that sends an error in place of an object that cannot be sent; otherwise the rank would wait forever."""

    def instead_of(self, item: Any, error: Exception) -> Any:
        """Returns the number of the micro-batch, and the error."""
        number = item[0] if isinstance(item, tuple) else item
        return number, explained(error, "a loader process could not send a micro-batch")


def reporting_context() -> Any:
    """Returns multiprocessing's default context for loader processes, but with queues of the class `_Telling`."""
    usual: Any = multiprocessing.get_context()

    def queue(self: Any, maxsize: int = 0) -> _Telling:
        return _Telling(maxsize, ctx=self.get_context())

    return type("TellingContext", (type(usual),), {"Queue": queue})()


@contextmanager
def starting() -> Iterator[None]:
    """Raises SetupError if the system cannot start loader processes in this context."""
    try:
        yield
    except OSError as error:
        raise explained(error, "loader processes could not be started") from error


def lacks_resources(error: Exception) -> bool:
    """True if an error of torch or the system means that shared memory or open files are exhausted."""
    return bool(_NO_ROOM.search(str(error))) or _NO_FILES in str(error)


def explained(error: Exception, what: str) -> ForgeError:
    """Returns a readable error: `what` happened, the reason, and hints."""
    text, hints = str(error), [_ALONE]
    if "too long" in text:
        hints.insert(0, "set TMPDIR to a shorter path, such as /tmp")
    elif _NO_ROOM.search(text):
        hints.insert(0, "make /dev/shm larger (docker run --shm-size=8g), or lower data.workers or data.prefetch")
    elif _NO_FILES in text:
        hints.insert(0, "raise the limit of open files: ulimit -n 65536")
    elif not isinstance(error, OSError | RuntimeError):
        hint = "pickle must be able to send all objects in a micro-batch: no lambdas, locks, open files"
        return PluginError(f"{what}: {phrase(error)}", hints=[hint, _ALONE])
    return SetupError(f"{what}: {phrase(error)}", hints=hints)
