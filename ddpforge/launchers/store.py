"""TCP store on the launcher through which watchdogs exchange the status of ranks.

It runs in the launcher, so it answers while ranks hang, freeze or die. Request and reply are a line of JSON each.
`{"attempt": …, "row": {…}}` writes a rank's row, `"alarm": true` calls all watchdogs, `"ask": true` reads all rows.
`"cause": {…}` reports the failed rank: the first report counts, and every reply has it. `{"clock": true}` reads the
clock of the store's machine and the seconds since the last row.
"""

from __future__ import annotations

import json
import socket
import socketserver
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

__all__ = ["ADDRESS", "Attempts", "clock_at", "serving", "store_at"]

ADDRESS = "DDPFORGE_STORE"
LONGEST = 1 << 16  # bytes of a request
_WAIT = 5.0  # seconds
MOST = 8  # attempts; the ranks of older attempts have ended


class Attempts:
    """Newest attempts: for each its rows by rank, whether the watchdogs are called, and the first failure."""

    def __init__(self) -> None:
        self._attempts: dict[str, tuple[dict[int, Any], list[str], list[Any]]] = {}
        self._lock = threading.Lock()
        self._newest: float | None = None  # when the newest row came

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Stores the contents of a request and returns the reply. Raises KeyError or TypeError if it is invalid."""
        if "clock" in question:
            quiet = None if self._newest is None else time.monotonic() - self._newest
            return {"clock": time.time(), "host": socket.gethostname(), "quiet": quiet}
        with self._lock:
            rows, calls, causes = self._attempts.setdefault(str(question["attempt"]), ({}, [], []))
            if len(self._attempts) > MOST:
                del self._attempts[next(iter(self._attempts))]
            if row := question.get("row"):
                rows[int(row["rank"])] = row
                self._newest = time.monotonic()
            if question.get("alarm"):
                calls.append("alarm")
            if question.get("cause"):
                causes.append(question["cause"])
            answer: dict[str, Any] = {"alarm": bool(calls)}
            if causes:
                answer["cause"] = causes[0]
            return answer | {"rows": list(rows.values())} if question.get("ask") else answer


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = daemon_threads = True
    request_queue_size = 1024
    attempts: Attempts

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignores the error: the rank has ended during the reply, or the request was invalid."""


class _Talk(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Replies to one line after the other; ends at the first invalid one."""
        while line := self.rfile.readline(LONGEST):
            with suppress(BrokenPipeError, ConnectionResetError):
                answer = self.server.attempts.answer(json.loads(line))
                self.wfile.write(json.dumps(answer).encode() + b"\n")


def clock_at(address: str) -> dict[str, Any] | None:
    """Returns the clock reply of the store at HOST:PORT; None if no store replies within 5 s."""
    host, _, port = address.rpartition(":")
    with (
        suppress(OSError, ValueError),
        socket.create_connection((host.strip("[]"), int(port)), timeout=_WAIT) as line,
        line.makefile("rw") as words,
    ):
        words.write(json.dumps({"clock": True}) + "\n")
        words.flush()
        answer = json.loads(words.readline(LONGEST))
        return answer if isinstance(answer, dict) and "clock" in answer else None
    return None


@contextmanager
def store_at(address: str | None, *, here: bool) -> Iterator[Mapping[str, str]]:
    """Yields the environment variables of a store for watchdogs. Serves one unless `address` is on another machine.

    Without an `address` the store is for this machine only. `here`: serve the store at `address` in this process.
    """
    if address and not here:
        yield {ADDRESS: address}
        return
    with ExitStack() as life:
        variables: dict[str, str] = {}
        try:
            port = life.enter_context(serving("", int(address.rpartition(":")[2])) if address else serving())
            variables[ADDRESS] = address or f"127.0.0.1:{port}"
        except OSError as error:  # the watchdogs then use files
            print(f"warning: cannot serve the watchdogs' store at {address}: {error}", file=sys.stderr)
        yield variables


@contextmanager
def serving(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Serves a store inside this context; yields its port."""
    with _Server((host, port), _Talk) as server:
        server.attempts = Attempts()
        threading.Thread(target=server.serve_forever, name="store of the watch", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
