"""All of a run's trackers as one, so that a broken one cannot hurt the training it watches."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ddpforge.interfaces import Tracker
from ddpforge.trackers.jsonl import JSONLTracker

logger = logging.getLogger("ddpforge")


class Several(Tracker):
    """Passes every call on to each of `trackers` (by name, in order).

    A tracker that raises is reported in one warning and dropped for the rest of the run. Only the errors of
    JSONLTracker go through: without `metrics.jsonl` nobody would know how the run went.
    """

    def __init__(self, trackers: Mapping[str, Tracker]) -> None:
        self._trackers = dict(trackers)

    def start(self, *, name: str, folder: Path, config: Mapping[str, Any], resumed_at: int | None) -> None:
        """Starts each tracker."""
        self._each(lambda t: t.start(name=name, folder=folder, config=config, resumed_at=resumed_at))

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Passes the row on."""
        self._each(lambda t: t.log(step, metrics))

    def rewind(self, step: int) -> None:
        """Passes it on."""
        self._each(lambda t: t.rewind(step))

    def finish(self, *, state: str, summary: Mapping[str, float]) -> None:
        """Finishes each tracker that is left."""
        self._each(lambda t: t.finish(state=state, summary=summary))

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for name, tracker in tuple(self._trackers.items()):
            try:
                call(tracker)
            except Exception as error:
                if isinstance(tracker, JSONLTracker):
                    raise
                del self._trackers[name]
                logger.warning("tracker %s failed and is off from here on: %r", name, error)
