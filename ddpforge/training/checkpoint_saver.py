"""Saves a trainer's state while training continues, and handles the result of each save."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.checkpoint.state import CheckpointMetadata, RankState
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import CanonicalState, Replica, Tracker
from ddpforge.ranks import heartbeat
from ddpforge.recipe.schema import CheckpointSection
from ddpforge.training.callback_calls import CallbackCalls
from ddpforge.training.callbacks import state_of
from ddpforge.training.features import Feature, methods_of
from ddpforge.training.progress import Progress

__all__ = ["CheckpointSaver"]

log = logging.getLogger("ddpforge")


class CheckpointSaver:
    """Writer of checkpoints of a replica and its callbacks, one checkpoint at a time.

    Every method is called on all ranks after the same step, so that they all continue or all stop.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSection,
        replica: Replica,
        calls: CallbackCalls,
        tracker: Tracker,
        features: Sequence[Feature] = (),
    ) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.step: int | None = None  # the newest step that is saved or being saved
        self._replica = replica
        self._calls, self._tracker = calls, tracker
        self.begin({})
        self._saved_state = methods_of(features, "saved_state")
        self.copying = False  # whether weights may still be being copied, so that `before_update` must be called
        self._reserved = False  # whether memory for copies is reserved

    def begin(self, origin: Mapping[str, Any], rows: Callable[[], int | None] = lambda: None) -> None:
        """Sets the facts that the checkpoints of an attempt record.

        `origin` is their recipe, lineage, strategy and ranks; `rows` returns the number of rows in metrics.jsonl, on
        the rank that writes it.
        """
        self._origin, self._rows = origin, rows

    @property
    def ready(self) -> bool:
        """True if this rank has nothing left to write, so that waiting takes no time."""
        return self.checkpoints.ready()

    def save(self, progress: Progress, metrics: Mapping[str, float], *, last: bool) -> None:
        """Begins to save; `wait_for_pending` waits for the end."""
        heartbeat.beat(heartbeat.SAVE)
        self.wait_for_pending()
        self._replica.sync_buffers()
        state = self._replica.state()
        for changed in self._saved_state:
            state = changed(state)
        facts = CheckpointMetadata(
            step=progress.step,
            samples=progress.samples,
            loop=dict(state.scalars),
            position=progress.to_json(),
            metrics=dict(metrics),
            rows=self._rows(),
            **self._origin,
        )
        self.checkpoints.save(facts, self._own(state))
        self.step = progress.step
        self.copying = self.settings.async_save
        if not self.settings.async_save:
            self.wait_for_pending(last=last)

    def reserve(self) -> None:
        """Reserves memory for copies from GPUs, once; call it after the first step, when optimizer state exists."""
        if self._reserved or not self.settings.async_save:
            return
        self._reserved = True
        if self.settings.save == "all":  # otherwise there is little to copy
            self.checkpoints.reserve(self._own(self._replica.state()))

    def before_update(self) -> None:
        """Waits until the weights that are being saved are copied: call it before an update or any other change."""
        self.copying = False
        self.checkpoints.before_update()

    def _own(self, state: CanonicalState[Any]) -> RankState:
        return RankState.of(state, {name: state_of(name, callback) for name, callback in self._calls.callbacks.items()})

    def wait_for_pending(self, *, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if there is one, and reports it to callbacks and tracker.

        With `last`, it also ends all background work. Raises CheckpointError if the checkpoint could not be written,
        and it is the `last` one or `checkpoint.on_failure` is "stop".
        """
        if self.checkpoints.pending:
            self._settle(last=last)
        if last:
            self.checkpoints.finish()

    def _settle(self, *, last: bool) -> None:
        assert self.step is not None
        heartbeat.beat(heartbeat.SAVE)
        try:
            folder = self.checkpoints.wait()
        except CheckpointError as error:
            if last or self.settings.on_failure == "stop":
                raise
            log.warning("%s; training continues without it", error.message)
            return
        for callback in self._calls.callbacks.values():
            callback.on_checkpoint(self.step, folder)
        self._tracker.checkpoint(self.step, folder)

    def newest(self) -> CheckpointReader | None:
        """Returns the newest intact checkpoint, after the one that is being written."""
        self.wait_for_pending()
        return self.checkpoints.open()

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if `metrics` are better than those of every checkpoint, including the one that is being written."""
        if not self.settings.keep.best:
            return False
        self.wait_for_pending()
        return self.checkpoints.is_best(metrics)
