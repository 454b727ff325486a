"""Policy for gradients that are not finite; norms are read rarely, because reading one waits for the device."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch
from torch import Tensor

from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.errors import Diverged
from ddpforge.interfaces import Replica
from ddpforge.training.progress import Progress

__all__ = ["GradientNorms", "NonfinitePolicy", "RollBack", "Rollbacks"]

log = logging.getLogger("ddpforge")

_MOST_SKIPS = 100  # steps in a row without a finite gradient, after which the policy "skip" raises Diverged

_MOST_ROLLBACKS = 10  # in a row to the same step


class GradientNorms:
    """Gradient norms of the steps since the last `take`."""

    def __init__(self) -> None:
        self.newest = math.nan  # the newest norm that was taken
        self.nonfinite_in_a_row = 0
        self._pending: dict[int, Tensor] = {}

    def add(self, step: int, norm: Tensor) -> None:
        """Records the norm of a step (0-d, on any device); does not wait for the device."""
        self._pending[step] = norm

    def take(self) -> list[int]:
        """Takes all recorded norms in one transfer from the device; returns the steps with a non-finite norm."""
        if not self._pending:
            return []
        bad: list[int] = []
        norms = list(self._pending.values())
        values: list[float] = torch.stack(norms).tolist() if len(norms) > 1 else [norms[0].item()]
        for step, value in zip(self._pending, values, strict=True):
            self.nonfinite_in_a_row = 0 if math.isfinite(value) else self.nonfinite_in_a_row + 1
            if self.nonfinite_in_a_row:
                bad.append(step)
        self.newest = values[-1]
        self._pending.clear()
        return bad


class RollBack(Exception):
    """Raised to continue from the last checkpoint, without the steps in `bad`."""

    def __init__(self, bad: Sequence[int], why: str) -> None:
        self.bad, self.why = bad, why


class Rollbacks:
    """Number of rollbacks in a row to the same step."""

    def __init__(self) -> None:
        self._number, self._step = 0, -1

    def count(self, request: RollBack, checkpoint: CheckpointReader | None) -> CheckpointReader:
        """Counts a rollback to `checkpoint`, and returns it; raises Diverged without one, and after too many."""
        if checkpoint is not None and checkpoint.metadata.step != self._step:
            self._number, self._step = 0, checkpoint.metadata.step
        self._number += 1
        if checkpoint is None or self._number > _MOST_ROLLBACKS:
            raise Diverged(f"{request.why}, after {self._number - 1} rollbacks")
        return checkpoint


class NonfinitePolicy:
    """Policy of `train.on_nonfinite`: stop, skip or roll back.

    The norm is that of the reduced gradient and the same on every rank, so all ranks decide equally, without
    communication. The strategy has not updated the weights with such a gradient.
    """

    def __init__(self, policy: Literal["stop", "skip", "rollback"], replica: Replica, norms: GradientNorms) -> None:
        self._policy, self._replica, self.norms = policy, replica, norms

    def apply(self, progress: Progress, log_row: Callable[[int, float], None], *, logs: bool) -> None:
        """Reads the norms since the last call; raises RollBack or Diverged.

        `log_row` logs the row of the newest bad step, which it receives with its norm. It is not called if training
        continues and this step is the current one, which is logged anyway (`logs`).
        """
        bad = self.norms.take()
        progress.nonfinite_steps += len(bad)
        if not bad or self._replica.overflowed():
            return
        goes_on = self._policy == "skip" and self.norms.nonfinite_in_a_row < _MOST_SKIPS
        if not (goes_on and logs and bad[-1] == progress.step):
            log_row(bad[-1], self.norms.newest)
        if self._policy == "rollback":
            raise RollBack(bad, f"the gradient of step {bad[0]} is not finite")
        if not goes_on:
            raise Diverged(
                f"the gradient of step {bad[0]} is not finite; the weights were not updated with it",
                hints=[
                    "lower optimizer.lr, set train.clip_norm, or look at that step's samples",
                    'or let the run continue with train.on_nonfinite = "skip" or "rollback"',
                ],
            )
        log.warning("step %s: the gradient is not finite; the update is skipped", ", ".join(map(str, bad)))
