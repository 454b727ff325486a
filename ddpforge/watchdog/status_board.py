"""Board through which watchdogs exchange the status rows of ranks: the launcher's store, or files."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote, unquote

from ddpforge.ranks.heartbeat import RankStatus

__all__ = ["StatusBoard", "within"]

T = TypeVar("T")
_WAIT = 2.0  # seconds: timeout of the store and of the disk
_MOST = 1 << 20  # bytes of a row
_AGAIN = 5.0  # seconds until the next try of a store that did not answer
_FIRST = "failure-first"  # the file with the first failure
_IN_NAME = "phase-rank-name-"  # prefix of an empty file that has a row in its name
_PLAIN = ' ,[]":'  # characters that need no quoting in a name
_LONGEST = 255


class StatusBoard:
    """Publishes the row of one rank and reads the rows of the others. No method hangs or raises.

    Args:
        logs: the folder for files; without it there are none.
        attempt: the token of this attempt; rows of other attempts are ignored.
        store: HOST:PORT of the launcher's store, or empty.
        seldom: seconds between two files of a rank that makes progress.
    """

    def __init__(
        self, logs: str, attempt: str, store: str, seldom: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._logs, self._attempt, self._store, self._seldom, self._clock = logs, attempt, store, seldom, clock
        self._connection: Any = None
        self._next_try = clock()  # time of the next try after the store did not answer
        self._written = clock()
        self._reached: float | None = None
        self._shown: tuple[int, int] | None = None
        self._alarm = False
        self._cause: Any = None

    @property
    def place(self) -> str | None:
        """Returns the folder of the files if there is no store, else None."""
        return None if self._store else self._logs

    @property
    def cut_off(self) -> float:
        """Returns the seconds since the store was last reached; 0 if that was just now, or never."""
        since = 0.0 if self._reached is None else self._clock() - self._reached
        return since if since > _WAIT else 0.0

    def publish(self, row: RankStatus) -> None:
        """Publishes a rank's row: to the store always; to a file now and then, or if the rank makes no progress."""
        self._request(row=row._asdict())
        now, new = self._clock(), (row.step, row.beats) != self._shown
        if row.answers or (new and (row.seconds > 1 or now - self._written > self._seldom)):
            self._shown, self._written = (row.step, row.beats), now
            self._on_disk(lambda: self._write(row))

    def call(self) -> None:
        """Calls all watchdogs to publish the status of their ranks."""
        self._alarm = True
        self._request(alarm=True)
        self._on_disk(lambda: open(self._path("failure-alarm"), "a").close())

    def called(self) -> bool:
        """True if any watchdog or rank has called for status."""
        return self._alarm or bool(self._on_disk(lambda: os.path.exists(self._path("failure-alarm"))))

    def rows(self) -> dict[int, RankStatus]:
        """Returns the newest row of every rank that has published one."""
        found: dict[int, RankStatus] = {}
        answer = self._request(ask=True) or {}
        for row in [*answer.get("rows", ()), *(self._on_disk(self._files) or ())]:
            try:
                one = RankStatus.read(row).as_of(time.time())
            except (TypeError, ValueError):
                continue
            known = found.get(one.rank)
            if known is None or (one.answers, one.beats) > (known.answers, known.beats):
                found[one.rank] = one
        return found

    def record_cause(self, cause: Mapping[str, Any]) -> bool:
        """Publishes the first failure. False if another was published before, or if this one could not be."""
        self._request(cause=cause)
        if not self._store:
            self._on_disk(lambda: self._write_cause(cause))
        return bool(self.cause() == cause)

    def cause(self) -> Any:
        """Returns the first failure that any rank has published with `record_cause`; None if there is none yet."""
        if self._cause is None and not self._store:
            self._cause = self._on_disk(lambda: json.loads(Path(self._path(_FIRST)).read_bytes()))
        return self._cause

    # -- files
    def _write_cause(self, cause: Mapping[str, Any]) -> None:
        part = self._path(f"{_FIRST}-{os.getpid()}")
        with open(part, "w") as file:
            json.dump(cause, file)
        try:
            os.link(part, self._path(_FIRST))  # atomic: the file is complete, and never replaces another
        finally:
            os.unlink(part)

    def _on_disk(self, action: Callable[[], T]) -> T | None:
        return within(_WAIT, action) if self._logs else None

    def _path(self, name: str) -> str:
        return os.path.join(self._logs, name)

    def _write(self, row: RankStatus) -> None:
        path = self._path(f"phase-rank-{row.rank}.json")
        try:
            with open(f"{path}.tmp", "w") as file:
                json.dump({"attempt": self._attempt, "row": row._asdict()}, file)
            os.replace(f"{path}.tmp", path)
        except OSError:  # a full disk can still create an empty file
            open(self._path(self._as_name(row)), "w").close()

    def _files(self) -> list[Any]:
        found = []
        for name in os.listdir(self._logs):
            if name.startswith("phase-rank-") and name.endswith(".json"):
                try:
                    written = json.loads(_contents(self._path(name)))
                    if written["attempt"] == self._attempt:
                        found.append(written["row"])
                except (OSError, ValueError, KeyError, TypeError, RecursionError):
                    continue
            elif name.startswith(_IN_NAME):
                with suppress(ValueError):
                    found.append(self._of_name(name))
        return found

    def _as_name(self, row: RankStatus) -> str:
        """Returns a row as a file name, without the host, and with only the last 80 characters of `at`."""
        short = row._replace(host="", at=row.at[-80:], seconds=int(row.seconds), time=int(row.time))
        values = [self._attempt, *(int(x) if isinstance(x, bool) else x for x in short)]
        return f"{_IN_NAME}{quote(json.dumps(values, separators=(',', ':')), safe=_PLAIN)}"[:_LONGEST]

    def _of_name(self, name: str) -> dict[str, Any]:
        attempt, *values = json.loads(unquote(name.removeprefix(_IN_NAME)))
        if attempt != self._attempt:
            raise ValueError("the row is of an earlier attempt")
        row = RankStatus(*values)
        flags = {"frozen": bool(row.frozen), "answers": bool(row.answers), "left": bool(row.left)}
        return {**row._asdict(), **flags}

    # -- the store
    def _request(self, **question: Any) -> Any:
        if not self._store or self._clock() < self._next_try:
            return None
        try:
            if self._connection is None:
                host, _, port = self._store.rpartition(":")
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_WAIT)
                self._connection = connection.makefile("rwb")
            self._connection.write(json.dumps({"attempt": self._attempt, **question}).encode() + b"\n")
            self._connection.flush()
            answer = json.loads(self._connection.readline())
        except (OSError, ValueError):
            self._connection, self._next_try = None, self._clock() + _AGAIN
            return None
        self._reached = self._clock()
        self._alarm = self._alarm or bool(answer.get("alarm"))
        self._cause = answer.get("cause") or self._cause
        return answer


def _contents(path: str) -> bytes:
    """Reads a small file. Uses only the standard library, unlike `disk.read_plain`."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MOST)


def within(seconds: float, action: Callable[[], T]) -> T | None:
    """Runs `action` in its own thread. None if it fails or takes longer than `seconds`: a disk may hang."""
    found: list[T] = []

    def run() -> None:
        try:
            found.append(action())
        except (OSError, ValueError):
            return

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
