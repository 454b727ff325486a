"""Ends a rank that waits, where Python cannot interrupt it, for one that has failed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from ddpforge.ranks.failures import Failures, Report

__all__ = ["Watch"]

log = logging.getLogger("ddpforge")

_LOOK = 1.0  # seconds between two looks
_PATIENCE = 5.0
_GRACE = 10.0  # seconds that a rank has to notice by itself that another one failed


class Watch:
    """Looks, from a thread of its own, whether another rank has failed; until `stop`.

    On gloo a rank notices by itself, within milliseconds. On NCCL it sits in a kernel until `train.timeout` is over,
    and SIGTERM is not looked at there: `give_up` is called, which must end the process.
    """

    def __init__(
        self,
        failures: Failures,
        give_up: Callable[[Report], None],
        *,
        look: float = _LOOK,
        grace: float = _GRACE,
    ) -> None:
        self._failures, self._give_up = failures, give_up
        self._look, self._grace = look, grace
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch over other ranks", daemon=True)
        if len(failures.peers) > 1:
            self._thread.start()

    def stop(self) -> None:
        """The thread that trains has noticed, or is done; where the process is being ended, this does not return."""
        self._stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_PATIENCE)  # it may be looking at a disk that hangs

    def _run(self) -> None:
        while not self._stopped.wait(self._look):
            if self._failures.someone_failed():
                if not self._stopped.wait(self._grace):
                    self._give_up(self._failures.explain(patience=0.0) or self._failures.mine())
                return
