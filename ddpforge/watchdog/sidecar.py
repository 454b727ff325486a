"""The process beside a rank: `python -S -E sidecar.py SETTINGS`, which ends with its rank.

A second process, because nothing in one that is frozen, or whose threads all wait for the interpreter's lock, can
notice that. It begins with nothing but the standard library, for there is one beside every rank.
"""

from __future__ import annotations

import json
import mmap
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if __name__ == "__main__":
    sys.path[0] = __file__.removesuffix("/ddpforge/watchdog/sidecar.py")

from ddpforge.ranks.phases import WORDS
from ddpforge.watchdog.board import Board, within
from ddpforge.watchdog.early import Early
from ddpforge.watchdog.process import Process
from ddpforge.watchdog.sentry import Limits, Sentry

if TYPE_CHECKING:
    from ddpforge.watchdog.blame import Blame
    from ddpforge.watchdog.report import Told
    from ddpforge.watchdog.rows import Row

__all__ = ["main"]


class Late:
    """A teller that is imported when there is something to tell: that needs what ddpforge needs."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._told: Told | None = None

    def someone_failed(self) -> bool:
        """Looks for the mark that the first failure leaves; a disk that hangs has none."""
        import os

        path = f"{self._settings['folder']}/logs/failure-cause"
        return bool(within(2.0, lambda: os.path.exists(path)))

    def keep_stacks(self, stacks: str) -> None:
        """See `Told`; so are the others."""
        within(3.0, lambda: self._teller().keep_stacks(stacks))

    def tell(self, found: Blame, rows: Mapping[int, Row]) -> None:
        """Tells."""
        within(5.0, lambda: self._teller().tell(found, rows))

    def leave(self) -> None:
        """Everything stays in the run's folder."""

    def tell_end(self, why: str) -> None:
        """Tells."""
        within(3.0, lambda: self._teller().tell_end(why))

    def _teller(self) -> Told:
        if self._told is None:
            sys.path[1:] = self._settings["path"]
            from ddpforge.watchdog.report import told_by

            self._told = told_by(self._settings, self._settings["rank"], self._settings["size"])
        return self._told


def main(settings: Mapping[str, Any]) -> None:
    """Watches until the rank has ended, or has been ended."""
    words = memoryview(mmap.mmap(settings["words"], WORDS * 8)).cast("q")
    process = Process(settings["pid"], words, settings["stacks"], settings["main"])
    limits = Limits(settings["stall"] or float("inf"), settings["compiles"], settings["grace"])
    board = Board(settings["logs"], settings["attempt"], settings["store"], seldom=min(10.0, limits.stall / 4))
    teller = Late(settings) if settings["folder"] else Early(board, settings["rank"], settings["pid"])
    sentry = Sentry(settings["rank"], settings["size"], process, board, teller, limits)
    while not process.ended(limits.look):
        if sentry.look():
            break
    else:
        sentry.died()
    teller.leave()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
