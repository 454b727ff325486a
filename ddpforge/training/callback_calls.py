"""Calls of a run's callbacks between two steps, and the requests that they return."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

from torch import Tensor

from ddpforge.errors import PluginError
from ddpforge.interfaces import Callback, GoBack, Ranks, Replica, StepInfo
from ddpforge.training.callbacks import add_numbers, may_end, overriding, reads_gradients

__all__ = ["CallbackCalls"]

_FACTOR = "callbacks/lr_factor"
_WISHES = "?wishes"  # of callbacks, on this rank

Wishes = Mapping[str, bool | GoBack | None]


class CallbackCalls:
    """Calls the callbacks of a run in their order; a request of one rank holds for all ranks.

    `sets_rates` is True if a callback multiplies learning rates.
    """

    def __init__(self, callbacks: Mapping[str, Callback], replica: Replica, ranks: Ranks) -> None:
        self.callbacks, self._replica, self._ranks = callbacks, replica, ranks
        self.step = 0  # the current step
        self.ending = {method: may_end(callbacks, method) for method in ("on_step", "on_eval")}
        self.reads_gradients = reads_gradients(callbacks)
        self._shown_gradient: int | None = None  # the last step whose gradient callbacks received
        if self.reads_gradients:
            replica.on_gradient = self._show_gradient
        self.restart()

    def restart(self) -> None:
        """Finds the methods of callbacks anew: a callback may have got one when it started."""
        self._setting_rates = overriding(self.callbacks, "lr_factor")
        self.sets_rates = bool(self._setting_rates)
        self._adding_columns = overriding(self.callbacks, "on_log")
        self._factor = 1.0  # product of the callbacks' `lr_factor`

    # -- learning rates
    def lr_factor(self) -> float:
        """Returns the product of the callbacks' `lr_factor`; raises PluginError for an invalid factor."""
        self._factor = 1.0
        for name in self._setting_rates:
            wanted: Any = self.callbacks[name].lr_factor()
            if not (isinstance(wanted, Real) and 0 <= float(wanted) < math.inf):
                raise PluginError(
                    f"callback `{name}` multiplies the learning rate of step {self.step} by {wanted!r}",
                    hints=["return a finite number of 0 or more from `lr_factor`"],
                )
            self._factor *= float(wanted)
        return self._factor

    def totals(self) -> dict[str, float]:
        """Returns the factor, whose mean over ranks `take` receives."""
        return {_FACTOR: self._factor}

    def take(self, means: dict[str, float]) -> None:
        """Removes the mean factor; raises PluginError if it differs between ranks: weights would diverge."""
        mean = means.pop(_FACTOR)
        if not math.isclose(mean, self._factor, rel_tol=1e-9, abs_tol=1e-12):
            raise PluginError(
                f"callbacks {', '.join(self._setting_rates)} multiply the learning rate of step {self.step} "
                f"by {self._factor:g} on this rank and {mean:g} on average",
                hints=["compute `lr_factor` only from values that are the same on every rank, e.g. from StepInfo"],
            )

    # -- gradients
    def _show_gradient(self, norm: Tensor) -> None:
        self._shown_gradient = self.step
        for callback in self.callbacks.values():
            callback.on_gradient(self.step, norm)

    def check_gradient(self) -> None:
        """Raises PluginError if the replica has shown no gradient in any step so far."""
        if self._shown_gradient is None:
            kind = type(self._replica).__name__
            raise PluginError(
                f"{kind} promises that callbacks can read gradients, but its step did not call `on_gradient`"
            )

    # -- after a step or an evaluation
    def on_step(self, info: StepInfo) -> Wishes:
        """Calls `on_step` of each callback; returns the requests of this rank."""
        with self._replica.weights.callback_guard():
            return {name: callback.on_step(info) for name, callback in self.callbacks.items()}

    def on_eval(self, step: int, row: Mapping[str, float]) -> Wishes:
        """Calls `on_eval` of each callback; returns the requests of this rank."""
        with self._replica.weights.callback_guard():
            return {name: callback.on_eval(step, row) for name, callback in self.callbacks.items()}

    def with_columns(self, info: StepInfo) -> dict[str, float]:
        """Returns the row of a step with the columns that callbacks add."""
        row = {**info.metrics}
        for name in self._adding_columns:
            add_numbers(row, name, "on_log", self.callbacks[name].on_log(replace(info, metrics=dict(row))))
        return row

    def agreed(self, method: str, wishes: Wishes) -> Sequence[bool | GoBack | None]:
        """Returns the requests of callbacks on all ranks: a request on one rank holds for all.

        If a callback may have any (see `may_end`), ranks add up a number on the host, and exchange requests if there
        are some.
        """
        asking = self.ending[method]
        for name, wish in wishes.items():
            if wish and name not in asking and self._ranks.size > 1:
                raise PluginError(
                    f"callback `{name}` returned {wish!r} from `{method}`, which is declared to return None",
                    hints=[f"declare it: def {method}(...) -> bool | None"],
                )
        mine, ranks = [wishes[name] for name in asking if wishes.get(name)], self._ranks
        if ranks.size == 1 or not asking:
            return [wish for wish in wishes.values() if wish]
        if not ranks.all_reduce_mean({_WISHES: float(bool(mine))})[_WISHES]:
            return ()
        return [wish for every in ranks.all_gather_object(mine) for wish in every]
