"""Serves a report to a browser on this machine while its runs train."""

from __future__ import annotations

from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ddpforge.errors import EnvironmentProblem

__all__ = ["server_of"]


def server_of(page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """A server on localhost that makes the page again for whoever asks; port 0 is any that is free.

    Raises EnvironmentProblem where the port is taken.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answers with the page."""
            if self.path != "/":
                self.send_error(404)
                return
            if not _is_local(self.headers.get("Host", "")):  # another site's name that leads here, to read the page
                self.send_error(403)
                return
            body = page().encode()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Requests are not worth a line each."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise EnvironmentProblem(
            f"port {port} of this machine cannot be used: {error.strerror}", hints=["name another with --port"]
        ) from error


def _is_local(host: str) -> bool:
    return host.rpartition(":")[0] in ("127.0.0.1", "localhost")
