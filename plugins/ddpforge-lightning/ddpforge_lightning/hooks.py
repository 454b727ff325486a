"""Hooks of a LightningModule that need no Trainer, called as Lightning orders them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddpforge.errors import UsageError
from ddpforge.interfaces import Callback

from ddpforge_lightning.module import overrides, run_of

if TYPE_CHECKING:
    from ddpforge.interfaces import RunContext, StepInfo

__all__ = ["ModuleHooks"]


class ModuleHooks(Callback):
    """Calls the hooks of the module at the begin and the end of the run, of epochs and of evaluations.

    `kind` is "validation" or "test". As in Lightning, `on_train_epoch_end` comes after the evaluation at the end of an
    epoch. A copy, as checks before training make one with the task, calls nothing.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._module: Any = None
        self._trains = False  # whether the first training step of this process has begun
        self._epoch: int | None = None  # the epoch that has begun and not ended

    def __deepcopy__(self, memo: dict[int, Any]) -> ModuleHooks:
        return ModuleHooks(self._kind)

    def on_start(self, run: RunContext) -> None:
        """Keeps the module."""
        self._module = run.model

    def before_training_step(self) -> None:
        """Calls the hooks that are due before a training step: of the run, and of the epoch that begins."""
        if self._module is None:
            return
        if not self._trains:
            self._trains = True
            self._call("on_fit_start")
            self._call("on_train_start")
        run = run_of(self._module)
        needed = any(overrides(self._module, name) for name in ("on_train_epoch_start", "on_train_epoch_end"))
        if needed or (run.horizon and run.horizon.steps_per_epoch):
            epoch = run.current_epoch
            if epoch != self._epoch:
                self._end_epoch()
                self._epoch = epoch
                self._call("on_train_epoch_start")

    def on_step(self, info: StepInfo) -> None:
        """Counts the step: `self.global_step` is the number of steps so far."""
        run_of(self._module).step = info.step

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Calls the hooks of an evaluation."""
        with run_of(self._module).in_epoch(self._epoch):
            self._call(f"on_{self._kind}_start")
            self._call(f"on_{self._kind}_epoch_start")
            yield
            self._call(f"on_{self._kind}_epoch_end")
            self._call(f"on_{self._kind}_end")

    def on_end(self, error: BaseException | None) -> None:
        """Calls the hooks at the end of training, unless it has failed."""
        if error is None and self._trains:
            self._end_epoch()
            self._call("on_train_end")
            self._call("on_fit_end")

    def _end_epoch(self) -> None:
        if self._epoch is not None:
            with run_of(self._module).in_epoch(self._epoch):
                self._call("on_train_epoch_end")
            self._epoch = None

    def _call(self, name: str) -> None:
        if self._module is not None and overrides(self._module, name):
            self._module.log = self._module.log_dict = _refuse_log(name)
            try:
                getattr(self._module, name)()
            finally:
                del self._module.log, self._module.log_dict


def _refuse_log(hook: str) -> Any:
    def log(*_: Any, **__: Any) -> None:
        raise UsageError(
            f"the LightningModule logs in {hook}",
            hints=["log in training_step or validation_step: ddpforge reports means over all samples of all ranks"],
            key="model.use",
        )

    return log
