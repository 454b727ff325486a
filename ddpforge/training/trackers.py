"""All of a run's trackers as one, so that a broken one cannot hurt the training it watches."""

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ddpforge.interfaces import ShownKind, Tracker
from ddpforge.runs.metrics import JSONLTracker

logger = logging.getLogger("ddpforge")


class TrackerGroup(Tracker):
    """Passes every call on to each of `trackers` (by name, in order).

    A tracker that raises is reported in one warning and dropped for the rest of the run. Only the errors of
    JSONLTracker go through: without `metrics.jsonl` nobody would know how the run went. A tracker that has not
    started hears nothing, so that a run which fails before its first step can simply `finish`; what is shown before
    waits, and belongs to the step that training begins at.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)
        self._started: dict[str, Tracker] = {}
        self._early: list[tuple[str, Any, ShownKind]] | None = []  # None from the start on

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Starts each tracker."""
        for key, tracker in self._trackers.items():
            with self._guard(key, tracker):
                tracker.start(name=name, folder=folder, config=config, resumed_at=resumed_at)
                self._started[key] = tracker
        early, self._early = self._early or [], None
        for shown in early:
            self.show(resumed_at or 0, *shown)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the row on."""
        self._each(lambda tracker: tracker.log(step, metrics))

    def show(self, step: int, name: str, value: Any, kind: ShownKind) -> None:
        """Passes it on."""
        if self._early is not None:
            self._early.append((name, value, kind))
        self._each(lambda tracker: tracker.show(step, name, value, kind))

    def checkpoint(self, step: int, folder: Path) -> None:
        """Passes it on."""
        self._each(lambda tracker: tracker.checkpoint(step, folder))

    def rewind(self, step: int) -> None:
        """Passes it on."""
        self._each(lambda tracker: tracker.rewind(step))

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Finishes each tracker that is left."""
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
            logger.warning("tracker %s failed and is off from here on: %r", key, error)
