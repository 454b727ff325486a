"""Hooks of a LightningModule that need no Trainer, called as Lightning orders them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback

from ddpforge_lightning.metric_objects import MetricObjects
from ddpforge_lightning.module import others_named, overrides, run_of

if TYPE_CHECKING:
    from ddpforge.interfaces import RunContext, StepInfo

__all__ = ["ModuleHooks"]


@dataclass(slots=True)
class _Now:
    """Place in the run. A resumed run finds it by itself, so it needs no state: it has no `__dict__` to search."""

    trains: bool = False  # whether the first training step of this process has begun
    evaluated: bool = False  # whether all sets of an evaluation were evaluated
    epoch: int | None = None  # the epoch that has begun and not ended


class ModuleHooks(Callback):
    """Calls the hooks of the module at the begin and the end of the run, of epochs and of evaluations.

    `kind` is "validation" or "test". As in Lightning, `on_train_epoch_end` comes after the evaluation at the end of an
    epoch. A copy, as checks before training make one with the task, calls nothing.
    """

    def __init__(self, kind: str, metrics: MetricObjects | None = None) -> None:
        self._kind, self._metrics = kind, metrics or MetricObjects()
        self._module: Any = None
        self._now = _Now()

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        return ModuleHooks(self._kind)

    def on_start(self, run: RunContext) -> None:
        """Keeps the module."""
        self._module = run.model

    def before_training_step(self) -> None:
        """Calls the hooks that are due before a training step: of the run, and of the epoch that begins."""
        if self._module is None:
            return
        if not self._now.trains:
            self._now.trains = True
            self._call("on_fit_start")
            self._call("on_train_start")
        run = run_of(self._module)
        needed = any(overrides(self._module, name) for name in ("on_train_epoch_start", "on_train_epoch_end"))
        if needed or (run.horizon and run.horizon.steps_per_epoch):
            epoch = run.current_epoch
            if epoch != self._now.epoch:
                self._end_epoch()
                self._now.epoch = epoch
                self._call("on_train_epoch_start")

    def on_step(self, info: StepInfo) -> None:
        """Counts the step: `self.global_step` is the number of steps so far."""
        run_of(self._module).step = info.step

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Calls the hooks at the begin and the end of an evaluation."""
        self._metrics.begin()
        with run_of(self._module).in_epoch(self._now.epoch):
            self._call(f"on_{self._kind}_start")
            self._call(f"on_{self._kind}_epoch_start")
            yield
            if self._now.evaluated:
                self._now.evaluated = False
                self._call(f"on_{self._kind}_end")

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        """Calls the hook at the end of the evaluation's epoch; returns the results of metrics that it logs."""
        found: dict[str, float] = {}
        self._now.evaluated = True
        with self._metrics.evaluated() as exact:
            self._call(f"on_{self._kind}_epoch_end", lambda name, value, *_, **__: found.update(exact(name, value)))
        return found

    def on_end(self, error: BaseException | None) -> None:
        """Calls the hooks at the end of training, unless it has failed."""
        if error is None and self._now.trains:
            self._end_epoch()
            self._call("on_train_end")
            self._call("on_fit_end")

    def _end_epoch(self) -> None:
        if self._now.epoch is not None:
            with run_of(self._module).in_epoch(self._now.epoch):
                self._call("on_train_epoch_end")
            self._now.epoch = None

    def _call(self, name: str, log: Any = None) -> None:
        """Calls a hook if the module has it; `log` replaces `self.log` in it."""
        if self._module is not None and overrides(self._module, name):
            self._module.log = log or _refuse_log(name)
            try:
                with others_named(self._module):
                    getattr(self._module, name)()
            finally:
                del self._module.log


def _refuse_log(hook: str) -> Any:
    def log(*_: Any, **__: Any) -> None:
        raise UsageError(
            f"the LightningModule logs in {hook}",
            hints=[
                "log in training_step or validation_step: ddpforge reports means over all samples of all ranks, and "
                "the results of metric objects",
                "results of metrics may be logged in on_validation_epoch_end",
            ],
            key="model.use",
        )

    return log
