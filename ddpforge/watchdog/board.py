"""A place where everybody shows rows to all others: the launcher's store where there is one, and files in `logs`."""

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

from ddpforge.watchdog.rows import Row

__all__ = ["Board", "within"]

T = TypeVar("T")
_WAIT = 2.0  # seconds that a store, or a disk, may take
_MOST = 1 << 20  # bytes of a row
_AGAIN = 5.0  # seconds for which a store that did not answer is left alone
_FIRST = "failure-first"  # the file that says what failed first
_IN_NAME = "phase-rank-name-"  # begins the name of a file that has a row in its name
_PLAIN = ' ,[]":'  # what needs no quoting in a name
_LONGEST = 255


class Board:
    """Shows the row of one rank, and reads those of the others; nothing here hangs or raises.

    `store` is HOST:PORT of the launcher's, or empty. `attempt` is that of the rows which count; `seldom` is how many
    seconds lie between two files of a rank that gets on.
    """

    def __init__(
        self, logs: str, attempt: str, store: str, seldom: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        # Without a folder there are no files.
        self._logs, self._attempt, self._store, self._seldom, self._clock = logs, attempt, store, seldom, clock
        self._talk: Any = None
        self._asks_again = clock()  # when, after the store was out of reach
        self._written = clock()
        self._reached: float | None = None
        self._shown: tuple[int, int] | None = None
        self._alarm = False
        self._cause: Any = None

    @property
    def place(self) -> str | None:
        """The folder of rows and words, where there is no store."""
        return None if self._store else self._logs

    @property
    def cut_off(self) -> float:
        """Seconds since the store was last reached; 0 where it has just been, or never was."""
        since = 0.0 if self._reached is None else self._clock() - self._reached
        return since if since > _WAIT else 0.0

    def show(self, row: Row) -> None:
        """Shows a rank's row to the others: to the store at once, in a file when it stands still, and now and then."""
        self._ask(row=row._asdict())
        now, new = self._clock(), (row.step, row.marks) != self._shown
        if row.answers or (new and (row.seconds > 1 or now - self._written > self._seldom)):
            self._shown, self._written = (row.step, row.marks), now
            self._on_disk(lambda: self._write(row))

    def call(self) -> None:
        """Calls everybody to show where they stand."""
        self._alarm = True
        self._ask(alarm=True)
        self._on_disk(lambda: open(self._path("failure-alarm"), "a").close())

    def called(self) -> bool:
        """True when somebody has."""
        return self._alarm or bool(self._on_disk(lambda: os.path.exists(self._path("failure-alarm"))))

    def rows(self) -> dict[int, Row]:
        """The newest row of every rank that has shown one."""
        found: dict[int, Row] = {}
        asked = self._ask(ask=True) or {}
        for row in [*asked.get("rows", ()), *(self._on_disk(self._files) or ())]:
            try:
                one = Row.read(row).as_of(time.time())
            except (TypeError, ValueError):
                continue
            known = found.get(one.rank)
            if known is None or (one.answers, one.marks) > (known.answers, known.marks):
                found[one.rank] = one
        return found

    def tell(self, cause: Mapping[str, Any]) -> bool:
        """Tells everybody what failed first; False where that was another one, or could not be told."""
        self._ask(cause=cause)
        if not self._store:
            self._on_disk(lambda: self._leave_word(cause))
        return bool(self.cause() == cause)

    def cause(self) -> Any:
        """Returns the first failure, as `tell` was given it; None before one is known."""
        if self._cause is None and not self._store:
            self._cause = self._on_disk(lambda: json.loads(Path(self._path(_FIRST)).read_bytes()))
        return self._cause

    # -- files
    def _leave_word(self, cause: Mapping[str, Any]) -> None:
        part = self._path(f"{_FIRST}-{os.getpid()}")
        with open(part, "w") as file:
            json.dump(cause, file)
        try:
            os.link(part, self._path(_FIRST))  # complete, and only if there is none
        finally:
            os.unlink(part)

    def _on_disk(self, action: Callable[[], T]) -> T | None:
        return within(_WAIT, action) if self._logs else None

    def _path(self, name: str) -> str:
        return os.path.join(self._logs, name)

    def _write(self, row: Row) -> None:
        path = self._path(f"phase-rank-{row.rank}.json")
        try:
            with open(f"{path}.tmp", "w") as file:
                json.dump({"attempt": self._attempt, "row": row._asdict()}, file)
            os.replace(f"{path}.tmp", path)
        except OSError:  # on a full disk there still is room for a name
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

    def _as_name(self, row: Row) -> str:
        """A row as the name of a file, without a host, and with the end of the line."""
        short = row._replace(host="", at=row.at[-80:], seconds=int(row.seconds), time=int(row.time))
        values = [self._attempt, *(int(x) if isinstance(x, bool) else x for x in short)]
        return f"{_IN_NAME}{quote(json.dumps(values, separators=(',', ':')), safe=_PLAIN)}"[:_LONGEST]

    def _of_name(self, name: str) -> dict[str, Any]:
        attempt, *values = json.loads(unquote(name.removeprefix(_IN_NAME)))
        if attempt != self._attempt:
            raise ValueError("of an earlier attempt")
        row = Row(*values)
        flags = {"frozen": bool(row.frozen), "answers": bool(row.answers), "left": bool(row.left)}
        return {**row._asdict(), **flags}

    # -- the store
    def _ask(self, **question: Any) -> Any:
        if not self._store or self._clock() < self._asks_again:
            return None
        try:
            if self._talk is None:
                host, _, port = self._store.rpartition(":")
                connection = socket.create_connection((host.strip("[]"), int(port)), timeout=_WAIT)
                self._talk = connection.makefile("rwb")
            self._talk.write(json.dumps({"attempt": self._attempt, **question}).encode() + b"\n")
            self._talk.flush()
            answer = json.loads(self._talk.readline())
        except (OSError, ValueError):
            self._talk, self._asks_again = None, self._clock() + _AGAIN
            return None
        self._reached = self._clock()
        self._alarm = self._alarm or bool(answer.get("alarm"))
        self._cause = answer.get("cause") or self._cause
        return answer


def _contents(path: str) -> bytes:
    """The contents of a small file; `disk.read_plain` needs more than the standard library, all that is here."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        return file.read(_MOST)


def within(seconds: float, action: Callable[[], T]) -> T | None:
    """Runs `action` in a thread of its own; None where it fails, or takes longer: a disk may never answer."""
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
