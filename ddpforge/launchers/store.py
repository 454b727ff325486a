"""A small store of the launcher's: who beside a rank writes where that stands, and reads where the others do.

It lives in the launcher, so it answers while ranks hang, freeze or die. One line of JSON asks, one answers:
`{"attempt": …, "row": {…}}` writes a rank's row, `"alarm": true` calls everybody, `"ask": true` reads all rows.
"""

from __future__ import annotations

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

__all__ = ["ADDRESS", "Attempts", "serving"]

ADDRESS = "DDPFORGE_STORE"
LONGEST = 1 << 16  # bytes of a question


class Attempts:
    """The rows of the newest attempt, by rank, and whether somebody has called the others."""

    def __init__(self) -> None:
        self._attempt, self._rows, self._alarm = "", dict[int, Any](), False
        self._lock = threading.Lock()

    def answer(self, question: dict[str, Any]) -> dict[str, Any]:
        """Takes what `question` tells, and answers it; raises KeyError or TypeError for what is none."""
        with self._lock:
            if question["attempt"] != self._attempt:  # ranks of an older one are gone
                self._attempt, self._rows, self._alarm = question["attempt"], {}, False
            if row := question.get("row"):
                self._rows[int(row["rank"])] = row
            self._alarm = self._alarm or bool(question.get("alarm"))
            answer: dict[str, Any] = {"alarm": self._alarm}
            return answer | {"rows": list(self._rows.values())} if question.get("ask") else answer


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
