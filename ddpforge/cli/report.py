"""`ddpforge report`: writes an HTML file about runs, or serves the same page while they train."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import click

from ddpforge.errors import SetupError, UsageError


@click.command()
@click.argument("runs", metavar="RUN...", nargs=-1, required=True)
@click.option(
    *("-o", "--output"),
    default="report.html",
    show_default=True,
    metavar="FILE",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The file to write; an existing file is replaced.",
)
@click.option(
    "--watch", is_flag=True, help="Serve the page on this machine with current data, instead of writing a file."
)
@click.option(
    "--port", default=0, metavar="PORT", type=click.IntRange(0, 65535), help="Port for --watch; default: a free one."
)
@click.option(
    "--every",
    default=5.0,
    show_default=True,
    metavar="SECONDS",
    type=click.FloatRange(0.5, 3600),
    help="Interval in which the page of --watch updates.",
)
def report(runs: tuple[str, ...], output: Path, watch: bool, port: int, every: float) -> None:
    """Make one HTML page about runs: curves, resumes, shown pictures and texts, checkpoints, recipes, environment.

    RUN is a run's folder, its name in runs/, or a folder of runs such as a sweep's. The page needs no other files: it
    can be mailed, archived, and read offline.
    """
    from ddpforge.api import named_runs
    from ddpforge.tools.reports import gather, render

    folders = named_runs(runs)
    if watch:
        _serve(lambda: render(gather(folders), live=every), port)
        return
    from ddpforge import disk

    page = render(gather(folders)).encode()
    try:
        disk.replace(output, page)
    except OSError as error:
        raise UsageError(f"cannot write {output}: {error.strerror}", hints=["e.g. -o report.html"]) from error
    click.echo(f"{output}: {len(page) / 1e6:.2f} MB")


def _serve(page: Callable[[], str], port: int) -> None:
    """Serves the page until Ctrl-C."""
    page()  # raises errors about the folders here, before a browser requests the page
    with server_of(page, port) as server:
        click.echo(f"http://127.0.0.1:{server.server_port}/ until Ctrl-C", err=True)
        with suppress(KeyboardInterrupt):
            server.serve_forever()


# ---------------------------------------------------------------------------------------------- serving
def server_of(page: Callable[[], str], port: int) -> ThreadingHTTPServer:
    """Returns a server on localhost that renders the page at every request. Port 0 takes a free port.

    Raises SetupError if the port is in use.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Sends the page."""
            if self.path != "/":
                self.send_error(404)
                return
            if not _is_local(self.headers.get("Host", "")):  # DNS rebinding: another site's name resolves to localhost
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
            """Does nothing: requests are not logged."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), Handler)
    except OSError as error:
        raise SetupError(
            f"cannot listen on port {port} of this machine: {error.strerror}", hints=["use another --port"]
        ) from error


def _is_local(host: str) -> bool:
    return host.rpartition(":")[0] in ("127.0.0.1", "localhost")
