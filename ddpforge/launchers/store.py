"""A small store of the launcher's: who beside a rank writes where that stands, and reads where the others do.

It lives in the launcher, so it answers while ranks hang, freeze or die. One line of JSON asks, one answers:
`{"attempt": …, "row": {…}}` writes a rank's row, `"alarm": true` calls everybody, `"ask": true` reads all rows, and
`"cause": {…}` says which rank failed: the first one counts, and every answer has it. `{"clock": true}` reads the clock
of the store's machine, and for how many seconds no rank has written.
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
LONGEST = 1 << 16  # bytes of a question
_WAIT = 5.0  # seconds
MOST = 8  # attempts; ranks of older ones are gone


class Attempts:
    """The newest attempts: of each the rows, by rank, whether a rank has called the others, and what failed first."""

    def __init__(self) -> None:
        self._attempts: dict[str, tuple[dict[int, Any], list[str], list[Any]]] = {}
        self._lock = threading.Lock()
        self._heard: float | None = None  # when the newest row came

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Takes what `question` tells, and answers it; raises KeyError or TypeError for what is none."""
        if "clock" in question:
            quiet = None if self._heard is None else time.monotonic() - self._heard
            return {"clock": time.time(), "host": socket.gethostname(), "quiet": quiet}
        with self._lock:
            rows, calls, causes = self._attempts.setdefault(str(question["attempt"]), ({}, [], []))
            if len(self._attempts) > MOST:
                del self._attempts[next(iter(self._attempts))]
            if row := question.get("row"):
                rows[int(row["rank"])] = row
                self._heard = time.monotonic()
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
        """Nobody needs to know of a rank that went while it was answered."""


class _Talk(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        """Answers one line after the other; ends at the first that is none."""
        while line := self.rfile.readline(LONGEST):
            with suppress(BrokenPipeError, ConnectionResetError):
                answer = self.server.attempts.answer(json.loads(line))
                self.wfile.write(json.dumps(answer).encode() + b"\n")


def clock_at(address: str) -> dict[str, Any] | None:
    """Returns what the store at HOST:PORT answers about its clock; None where none answers within seconds."""
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
    """The variables with which ranks find a store: one for this machine, or that at `address`, which may be `here`."""
    if address and not here:
        yield {ADDRESS: address}
        return
    with ExitStack() as life:
        variables: dict[str, str] = {}
        try:
            port = life.enter_context(serving("", int(address.rpartition(":")[2])) if address else serving())
            variables[ADDRESS] = address or f"127.0.0.1:{port}"
        except OSError as error:  # ranks then write files for each other
            print(f"warning: the watch over ranks has no store at {address}: {error}", file=sys.stderr)
        yield variables


@contextmanager
def serving(host: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """Serves until it is left; yields the port."""
    with _Server((host, port), _Talk) as server:
        server.attempts = Attempts()
        threading.Thread(target=server.serve_forever, name="store of the watch", daemon=True).start()
        try:
            yield server.server_address[1]
        finally:
            server.shutdown()
