"""Tells of a rank that stood still or died before its run's folder was known: to the others, and on the screen."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import suppress

from ddpforge.errors import ExitCode
from ddpforge.launchers.verdict import is_launched, record_verdict
from ddpforge.watchdog.blame import Blame
from ddpforge.watchdog.board import Board
from ddpforge.watchdog.rows import Row

__all__ = ["Early"]

_SEEN = 15.0  # seconds in which all ranks have looked
_ALIKE = 4.0  # seconds in which ranks find out for themselves what is wrong with a recipe that all of them read


class Early:
    """A teller (see `sentry.Teller`) for a rank that starts, process `pid`; it needs no more than the standard library.

    Where another rank has failed it asks this one to stop: `ranks.signals.stopping_early` hears that wherever it waits.
    """

    def __init__(self, board: Board, rank: int, pid: int) -> None:
        self._board, self._rank, self._pid = board, rank, pid
        self._asked = False
        self._seen: float | None = None  # when the failure of another rank was first seen
        os.environ["RANK"] = str(rank)

    def someone_failed(self) -> bool:
        """True when a rank is known that failed first; where that has said why, others may be about to say the same."""
        cause = self._board.cause()
        if cause is None:
            return False
        self._seen = self._seen or time.monotonic()
        if cause.get("told") and time.monotonic() - self._seen < _ALIKE:
            return False
        if not self._asked and cause["rank"] != self._rank:
            self._asked = True
            with suppress(OSError):
                os.kill(self._pid, signal.SIGTERM)
        return True

    def keep_stacks(self, stacks: str) -> None:
        """There is no folder for them; the line on which a rank stands is told."""

    def tell(self, found: Blame, rows: Mapping[int, Row]) -> None:
        """Tells the other ranks and the launcher which rank failed; prints where all stand, and the error."""
        error = f"rank {found.ranks[0]} {found.sentence}"
        cause = {"rank": found.ranks[0], "error": error, "code": 1, "by": self._rank}
        if not self._board.tell(cause) and self._board.cause():
            return  # another one failed first
        record_verdict(1, spoke=False, error=error, by_watch=True)
        lines = [f"  {row}{'  <-' if rank in found.ranks else ''}" for rank, row in sorted(rows.items())]
        lines = [*(lines if len(rows) > 1 else []), *([] if is_launched() else [f"error: {error}"])]
        if lines:
            print("\n".join(lines), file=sys.stderr, flush=True)

    def tell_end(self, why: str) -> None:
        """Records the exit code of the rank that failed as that of this one, which is ended.

        Of what every rank finds out alike, as of a recipe, rank 0 alone speaks: where it did not find out, this does.
        """
        cause = self._board.cause() or {}
        code = cause.get("code", 1)
        record_verdict(code, spoke=False)
        if self._rank == 0 and cause.get("told") and code == ExitCode.USAGE:
            print(f"error: rank {cause['rank']} failed first: {cause['error']}", file=sys.stderr, flush=True)

    def leave(self) -> None:
        """Clears the place up where ranks without a store meet, once the others have seen what there is to be seen."""
        if (logs := self._board.place) is None:
            return
        if self._board.cause():
            for stream in (1, 2):
                os.close(stream)  # a program that reads them waits for their end
            time.sleep(_SEEN)
        shutil.rmtree(logs, ignore_errors=True)
