"""Ranks that one process brings up: it has imported what all of them need, and each is a copy of it.

A rank that starts by itself spends seconds on importing torch, and so does every other. Here the launcher's own import
serves them all. Copied is a process that has never had a second thread and never touched a device, long before anything
of the run is known: https://docs.python.org/3/library/os.html#os.fork says what is unsafe otherwise.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any, NoReturn

from ddpforge.launchers.command import RANK
from ddpforge.launchers.requests import stop_with_parent

__all__ = ["FORK", "Brought", "Nursery", "is_safe"]

FORK = "DDPFORGE_FORK"  # 0: every rank starts by itself
_IMPORTED = ("ddpforge.app.run", "ddpforge.cli.run", "torch._dynamo")  # the last by every first optimizer
_SUBREAPER = 36  # of <linux/prctl.h>
_HEADER = 8  # bytes: how long a request is
_LOOK = 0.01  # seconds


def is_safe() -> bool:
    """True on Linux in a process that writes at once and has no second thread, unless the environment says no."""
    writes_at_once = getattr(sys.stdout, "write_through", False)  # python -u, as torchrun has it for ranks
    alone = threading.active_count() == 1
    return sys.platform == "linux" and alone and writes_at_once and os.environ.get(FORK) != "0"


class Brought:
    """A rank, with what torchrun uses of a `subprocess.Popen`."""

    def __init__(self, pid: int, words: Sequence[str]) -> None:
        self.pid, self.args = pid, words
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """The exit code, or minus the number of the signal that ended it; None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self.returncode = os.waitstatus_to_exitcode(status) if pid else None
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The same at its end; raises subprocess.TimeoutExpired when that does not come within `timeout` seconds."""
        limit = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if limit is not None and time.monotonic() > limit:
                raise subprocess.TimeoutExpired(list(self.args), timeout or 0.0)
            time.sleep(_LOOK)
        return code


class Nursery:
    """A process beside this one that becomes ranks, which are this process' children."""

    def __init__(self, signals: Mapping[int, Any]) -> None:
        """`signals` are handled in ranks as said there: by a handler, or by what the system does."""
        here, there = socket.socketpair()
        parent = os.getpid()
        _prctl(_SUBREAPER, 1)
        sys.stdout.flush()
        sys.stderr.flush()
        if os.fork() == 0:
            here.close()
            _serve(there, parent, signals)
        there.close()
        self._socket = here

    def bring(self, words: Sequence[str], environment: Mapping[str, str], streams: tuple[int, int]) -> Brought | None:
        """Starts `words` in `environment`, with `streams` as stdout and stderr, in a session of its own.

        None where these are not the words of a rank, the nursery is gone, or the kernel would not give the rank to this
        process: whoever asks starts it by itself.
        """
        if tuple(words[: 1 + len(RANK)]) != (sys.executable, *RANK):
            return None
        request = json.dumps([words[len(RANK) :], dict(environment)]).encode()
        answer, door = os.pipe()
        with os.fdopen(answer, "rb") as said:
            try:
                header = len(request).to_bytes(_HEADER, "big")
                socket.send_fds(self._socket, [header], [*streams, door])
                self._socket.sendall(request)
            except OSError:
                return None
            finally:
                os.close(door)
            pid = said.read()
        return Brought(int(pid), words) if pid else None


def _serve(requests: socket.socket, parent: int, signals: Mapping[int, Any]) -> NoReturn:
    """Becomes a rank for each request, until there are no more."""
    stop_with_parent(signal.SIGKILL)  # which ranks do not inherit
    if os.getppid() != parent:
        os._exit(0)
    for number in signals:
        signal.signal(number, lambda *_: None)  # what a scheduler sends to all processes is for others
    try:
        for name in _IMPORTED:
            __import__(name)
        from ddpforge.components.registry import Registry

        Registry.installed()  # ranks find it read
    except BaseException:  # the ranks will say why
        os._exit(1)
    gc.freeze()  # a rank need not look through it, which would copy it
    while True:
        header, descriptors, *_ = socket.recv_fds(requests, _HEADER, 3)
        if not header:
            os._exit(0)
        words, environment = json.loads(_exactly(requests, int.from_bytes(header, "big")))
        middle = os.fork()
        if middle == 0:
            middle = os.getpid()
            if os.fork() == 0:
                requests.close()
                _settle(environment, descriptors, middle, parent, signals)
                _run(words)
            os._exit(0)  # an orphan falls to the parent
        for descriptor in descriptors:
            os.close(descriptor)
        os.waitpid(middle, 0)


def _exactly(requests: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        data += requests.recv(size - len(data)) or os._exit(0)
    return data


def _settle(
    environment: Mapping[str, str], descriptors: Sequence[int], middle: int, parent: int, signals: Mapping[int, Any]
) -> None:
    """Makes of this process what a new one would be, in a session of its own, and tells its number."""
    stdout, stderr, door = descriptors
    os.setsid()
    for number, handler in signals.items():
        signal.signal(number, handler)
    for stream, descriptor in ((1, stdout), (2, stderr)):
        os.dup2(descriptor, stream)
        os.close(descriptor)
    os.environ.clear()
    os.environ.update(environment)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed()  # as anew in every process; Python's own generator does so by itself
    while os.getppid() == middle:
        time.sleep(0.001)
    stop_with_parent()
    if os.getppid() != parent:  # which is gone, or has not become the one that orphans fall to
        os._exit(1)
    try:
        os.write(door, str(os.getpid()).encode())
    except BrokenPipeError:  # it asked, and is ending now
        os._exit(1)
    os.close(door)


def _run(words: list[str]) -> NoReturn:
    """`python -m WORDS`, to its end."""
    sys.argv = words
    code: Any = 0
    try:
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    except SystemExit as ending:
        code = ending.code
        if not isinstance(code, int | None):
            print(code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, value)
