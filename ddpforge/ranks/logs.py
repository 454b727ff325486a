"""Logging of ranks: messages of rank 0 go to stderr, messages of each rank to its file in the run folder."""

import errno
import logging
import os
import re
import socket
import sys
from contextlib import suppress
from io import BufferedWriter, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any

from ddpforge import disk
from ddpforge.errors import SetupError
from ddpforge.secret_redaction import redact

logger = logging.getLogger("ddpforge")


def setup_logging(rank: int, folder: Path | None = None, level: int = logging.INFO) -> None:
    """Configures the "ddpforge" logger. Call it again when the run's `folder` is known.

    Rank 0 writes records of at least `level` to stderr. Other ranks write only warnings and errors, marked
    `[rank 3]`, or `[rank 3 node07]` when the job spans several nodes. All records are appended to `logs/rank-N.log`
    in `folder`. Records with `extra={"in_file_only": True}` are not written to stderr.
    """
    logger.setLevel(logging.DEBUG)
    logger.propagate = False  # a library's basicConfig() would print every rank's messages once more
    for handler in logger.handlers[:]:
        logger.removeHandler(handler)
        handler.close()

    stderr = _Stderr(level if rank == 0 else max(level, logging.WARNING))
    stderr.setFormatter(_Formatter(_prefix(rank)))
    stderr.addFilter(lambda record: not getattr(record, "in_file_only", False))
    logger.addHandler(stderr)

    if folder is not None:
        path = folder / "logs" / f"rank-{rank}.log"
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            file = _File(path, encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{path} cannot be written: {error.strerror or error}") from error
        file.setFormatter(_Redacting("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(file)


def keep_output() -> None:
    """Keeps this process alive when stdout or stderr fails: a closed pipe or terminal, a full disk.

    After the first failed write, further output to that stream is lost; the log files of the run still get messages.
    """
    for number in (0, 1, 2):  # a closed one would otherwise be reused for the next file that is opened
        try:
            os.fstat(number)
        except OSError:
            nowhere = os.open(os.devnull, os.O_RDWR)
            if nowhere != number:
                os.dup2(nowhere, number)
                os.close(nowhere)
            os.set_inheritable(number, True)
    for name, number in (("stdout", 1), ("stderr", 2)):
        if getattr(sys, name) is None:  # Python sets None for a closed descriptor
            setattr(sys, name, open(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False))  # noqa: SIM115  # for good
        stream = getattr(sys, name)
        try:
            real = isinstance(stream, TextIOWrapper) and stream.fileno() == number
        except (OSError, ValueError):
            real = False
        if real and not isinstance(getattr(stream.buffer, "raw", stream.buffer), _Lasting):
            with suppress(OSError):
                stream.flush()
            how = {"encoding": stream.encoding, "errors": stream.errors, "line_buffering": stream.line_buffering}
            lasting = TextIOWrapper(BufferedWriter(_Lasting(number, "wb", closefd=False)), **how, write_through=True)
            setattr(sys, name, lasting)


class _Lasting(FileIO):
    """Stream with writes that never fail: after an error, its descriptor is redirected to /dev/null."""

    def write(self, data: Any) -> int:
        try:
            return super().write(data) or 0
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EINTR):
                raise
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self.fileno())  # also for non-Python code and for child processes
            os.close(nowhere)
            return len(data)


class _File(logging.FileHandler):
    """Log file that prints one warning when it cannot be written, instead of a traceback for each record."""

    _said = False

    def _open(self) -> TextIOWrapper:
        return TextIOWrapper(disk.open_plain(Path(self.baseFilename), "ab"), encoding="utf-8")

    def handleError(self, record: logging.LogRecord) -> None:
        if not self._said:
            self._said = True
            print(f"warning: cannot write {self.baseFilename}: {sys.exc_info()[1]}", file=sys.stderr, flush=True)

    def close(self) -> None:
        with suppress(OSError):
            super().close()


class _Stderr(logging.Handler):
    """Handler that looks up sys.stderr for each record, because a progress bar replaces it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(_in_colour(self.format(record)), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


_LEVELS = {"warning": "\x1b[33m", "error": "\x1b[31m", "critical": "\x1b[31m"}


def _in_colour(text: str) -> str:
    """Returns a record with its level in colour, if stderr is a terminal that has colours and NO_COLOR is not set."""
    plain = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
    if plain or not getattr(sys.stderr, "isatty", bool)():
        return text
    return re.sub(r"^(\[rank [^\]]*\] )?(warning|error|critical):", _painted, text)


def _painted(found: re.Match[str]) -> str:
    return f"{found[1] or ''}{_LEVELS[found[2]]}{found[2]}:\x1b[0m"


class _Redacting(logging.Formatter):
    """Formatter that removes secrets, also from tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        return redact(super().format(record))


class _Formatter(_Redacting):
    """Formatter of the message only; for warnings and errors, with the level in front."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = prefix

    def formatMessage(self, record: logging.LogRecord) -> str:
        level = f"{record.levelname.lower()}: " if record.levelno >= logging.WARNING else ""
        return f"{self._prefix}{level}{record.message}"


def _prefix(rank: int) -> str:
    if rank == 0:
        return ""
    nodes = int(os.environ.get("GROUP_WORLD_SIZE") or os.environ.get("SLURM_NNODES") or 1)
    host = f" {socket.gethostname()}" if nodes > 1 else ""
    return f"[rank {rank}{host}] "
