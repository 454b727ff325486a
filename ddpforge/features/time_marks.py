"""Marks for the account of time: checkpoints, and the end of a rank's own part of a backward pass."""

from __future__ import annotations

import time
from typing import Any, Self

from torch import Tensor, nn
from typing_extensions import override

from ddpforge.features.time_record import ATTEMPT
from ddpforge.strategies.ddp_replica import DDPReplica
from ddpforge.training.features import Assembled, Feature

__all__ = ["GradientWait", "SaveMarks"]


class SaveMarks(Feature):
    """Records when checkpoints begin, because a run that resumes from one loses the work after it."""

    @classmethod
    @override
    def of(cls, run: Assembled) -> Self | None:
        if not run.trains:
            return None
        ATTEMPT.workers = run.parts.training.workers
        return cls()

    @override
    def before_save(self) -> None:
        ATTEMPT.note_save()


class GradientWait(Feature):
    """Measures how long each rank waits for the gradients of the others, under DDP.

    A rank has reached the reduction once its last gradient is complete; from there to the end of the backward pass only
    communication is left. Which parameter is the last is observed in the first step.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._last: Tensor | None = None
        self._at = 0.0
        self._hooks: dict[Any, Any] = {}

    @classmethod
    @override
    def of(cls, run: Assembled) -> Self | None:
        return cls(run.replica.module) if run.trains and isinstance(run.replica, DDPReplica) else None

    @override
    def start(self, stateful: nn.Module) -> None:
        trained = [one for one in self._module.parameters() if one.requires_grad]
        for parameter in trained:
            register: Any = parameter.register_post_accumulate_grad_hook
            self._hooks[parameter] = register(self._note)

    @override
    def after_passes(self) -> None:
        if self._at:
            ATTEMPT.note_wait(time.perf_counter() - self._at)
            self._at = 0.0
        if self._hooks:
            for parameter, hook in self._hooks.items():
                if parameter is not self._last:
                    hook.remove()
            self._hooks = {}

    def _note(self, parameter: Tensor) -> None:
        self._at, self._last = time.perf_counter(), parameter
