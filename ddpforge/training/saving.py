"""Saves a trainer's state while training goes on, and learns what came of it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from ddpforge.checkpoint.contents import Facts, RankState
from ddpforge.checkpoint.manager import Checkpoints
from ddpforge.checkpoint.reader import Reader
from ddpforge.errors import CheckpointError
from ddpforge.interfaces import Callback, CanonicalState, Ranks, Replica, Tracker
from ddpforge.ranks import phases
from ddpforge.recipe.schema import CheckpointSection
from ddpforge.training.callbacks import state_of
from ddpforge.training.left_out import has_left_out, same, without_frozen
from ddpforge.training.progress import Progress

__all__ = ["Saving"]

log = logging.getLogger("ddpforge")


class Saving:
    """Writes checkpoints of a replica and of callbacks; one at a time is on its way.

    `origin` is what a checkpoint says of where it comes from: recipe, lineage, strategy, ranks. Every method is called
    on all ranks after the same step, so that they all continue or all stop.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        settings: CheckpointSection,
        replica: Replica,
        callbacks: Callable[[], Mapping[str, Callback]],
        tracker: Tracker,
        ranks: Ranks,
    ) -> None:
        self.checkpoints = checkpoints
        self.settings = settings
        self.origin: Mapping[str, Any] = {}
        self.rows: Callable[[], int | None] = lambda: None  # of metrics.jsonl, where this rank writes it
        self.step: int | None = None  # the newest that is in a checkpoint, or on its way there
        self._replica = replica
        self._callbacks, self._tracker = callbacks, tracker
        self._ranks = ranks
        self._reserved = False  # whether memory for copies was taken
        self._left_out: Mapping[str, Any] = {}  # what is known of the weights that no checkpoint holds

    @property
    def ready(self) -> bool:
        """True if waiting for what this rank writes would cost nothing."""
        return self.checkpoints.ready()

    def save(self, progress: Progress, metrics: Mapping[str, float], *, last: bool) -> None:
        """Begins to save; see `settle` for the end of it."""
        phases.mark(phases.SAVE)
        self.settle()
        self._replica.sync_buffers()
        state = self._replica.state()
        if self.settings.save == "trainable":
            state = without_frozen(state, self._replica, self._ranks)
            self._refuse_moved(state.numbers)
        facts = Facts(
            step=progress.step,
            samples=progress.samples,
            loop=dict(state.numbers),
            position=progress.to_json(),
            metrics=dict(metrics),
            rows=self.rows(),
            **self.origin,
        )
        self.checkpoints.save(facts, self._own(state))
        self.step = progress.step
        if not self.settings.async_save:
            self.settle(last=last)

    def reserve(self) -> None:
        """Takes memory for copies from GPUs early, once: after the first step, when the optimizer has its state."""
        if self._reserved or not self.settings.async_save:
            return
        self._reserved = True
        if self.settings.save == "all":  # else there is little to copy
            self.checkpoints.reserve(self._own(self._replica.state()))

    def before_update(self) -> None:
        """Finishes the copy of weights that are being saved: call before an update, or whatever else changes them."""
        self.checkpoints.before_update()

    def _own(self, state: CanonicalState[Any]) -> RankState:
        return RankState.of(state, {name: state_of(name, callback) for name, callback in self._callbacks().items()})

    def _refuse_moved(self, numbers: Mapping[str, Any]) -> None:
        """Raises CheckpointError where weights that are left out are not what they were at the first checkpoint."""
        now = {name: x for name, x in numbers.items() if has_left_out([name])}
        if self._left_out and not same(now, self._left_out):
            raise CheckpointError(
                "weights that are not trained have changed during the run, and checkpoints leave them out",
                hints=['set checkpoint.save = "all"'],
            )
        self._left_out = now

    def settle(self, *, last: bool = False) -> None:
        """Waits for the checkpoint that is being written, if there is one, and tells callbacks and tracker of it.

        After the `last` one nothing is left to do. Raises CheckpointError when it could not be written and the recipe
        says stop, or it is the `last` one.
        """
        if self.checkpoints.pending:
            self._settle(last=last)
        if last:
            self.checkpoints.finish()

    def _settle(self, *, last: bool) -> None:
        assert self.step is not None
        phases.mark(phases.SAVE)
        try:
            folder = self.checkpoints.wait()
        except CheckpointError as error:
            if last or self.settings.on_failure == "stop":
                raise
            log.warning("%s; training continues without it", error.message)
            return
        for callback in self._callbacks().values():
            callback.on_checkpoint(self.step, folder)
        self._tracker.checkpoint(self.step, folder)

    def newest(self) -> Reader | None:
        """The newest intact checkpoint, once nothing is on its way."""
        self.settle()
        return self.checkpoints.open()

    def is_best(self, metrics: Mapping[str, float]) -> bool:
        """True if `metrics` beat those of every checkpoint, also of the one that is being written."""
        if not self.settings.keep.best:
            return False
        self.settle()
        return self.checkpoints.is_best(metrics)
