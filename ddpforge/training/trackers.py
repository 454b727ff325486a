"""All trackers of a run as one tracker: a failing tracker does not stop training."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpforge.interfaces import MediaKind, Tracker
from ddpforge.runs.metrics import JSONLTracker

logger = logging.getLogger("ddpforge")


class TrackerGroup(Tracker):
    """Passes every call on to each of `trackers` (by name, in order).

    A tracker that raises is reported in one warning and dropped for the rest of the run. Only errors of JSONLTracker
    are raised: without `metrics.jsonl` a run has no record. A tracker that has not started receives no calls, so a run
    that fails before its first step can call `finish`. Values that are shown before the start are kept, and belong to
    the step at which training begins.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._started: dict[str, Tracker] = {}
        self._early: list[tuple[str, Any, MediaKind]] | None = []  # None after `start`

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Starts each tracker."""
        for key, tracker in self._trackers.items():
            with self._guard(key, tracker):
                tracker.start(name=name, folder=folder, config=config, resumed_at=resumed_at)
                self._started[key] = tracker
        early, self._early = self._early or [], None
        for shown in early:
            self.log_media(resumed_at or 0, *shown)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the row on."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def log_media(self, step: int, name: str, value: Any, kind: MediaKind) -> None:
        """Passes the value on, or keeps it until `start`."""
        if self._early is not None:
            self._early.append((name, value, kind))
        self._each(lambda tracker: tracker.log_media(step, name, value, kind))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Passes the checkpoint on."""
        self._each(lambda tracker: tracker.checkpoint(step, folder))

    def rewind(self, step: int) -> None:
        """Passes the rollback on."""
        self._each(lambda tracker: tracker.rewind(step))

    def join(self, folder: Path) -> bool:
        """Joins with each tracker that can; logs the others."""
        for key, tracker in self._trackers.items():
            with self._guard(key, tracker):
                if tracker.join(folder):
                    self._started[key] = tracker
                else:
                    logger.info("track.%s does not receive these evaluations: one process alone can log to it", key)
        return bool(self._started)

    def leave(self) -> None:
        """Leaves each tracker that was joined."""
        self._each(lambda tracker: tracker.leave())

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Finishes each tracker that still runs."""
        self._each(lambda tracker: tracker.finish(state=state, summary=summary))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for key, tracker in tuple(self._started.items()):
            with self._guard(key, tracker):
                call(tracker)

    @contextmanager
    def _guard(self, key: str, tracker: Tracker) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if isinstance(tracker, JSONLTracker):
                raise
            self._started.pop(key, None)
            logger.warning("tracker %s failed and is off for the rest of the run: %r", key, error)
