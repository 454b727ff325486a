"""Observers of a run: what watches, copies or measures it, and changes nothing that it computes.

The entry-point group `ddpforge.observer` has subclasses of `RunObserver`, or lists of them; ddpforge's own mirror,
profiler and memory check come in by it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self

from ddpforge.components.hooks import found as installed

if TYPE_CHECKING:
    from ddpforge.interfaces import Tracker, World
    from ddpforge.recipe import Recipe
    from ddpforge.recipe.run_plan import StepWindow
    from ddpforge.runs.folder import RunFolder

__all__ = ["Around", "ObservedRun", "RunObserver", "observers_of"]


class Around(Protocol):
    """Context around training that receives the number of every step, e.g. to profile some steps."""

    def __enter__(self) -> Self: ...

    def __exit__(self, *error: Any) -> None: ...

    def before(self, step: int) -> None:
        """Prepares for the next step, `step`."""

    def close(self, step: int) -> None:
        """Finishes: no step follows; the next one would have been `step`."""


@dataclass(frozen=True, kw_only=True)
class ObservedRun:
    """Run on one rank, before its folder is opened. `window` has the steps to profile."""

    folder: RunFolder
    recipe: Recipe
    world: World
    window: StepWindow | None = None


class RunObserver:
    """Observer of a run on one rank. The order of the methods is that of their calls; each does nothing here."""

    @classmethod
    def of(cls, run: ObservedRun) -> Self | None:
        """Returns the observer of a run; None if there is nothing to observe. Called before any tensor exists."""
        return None

    def before_open(self, *, fresh: bool) -> None:
        """Called on rank 0 before the folder is opened; its errors are raised on every rank."""

    def on_finished(self) -> None:
        """Called on rank 0 if the run had finished earlier, so that nothing is trained."""

    def tracker(self) -> Tracker | None:
        """Returns a tracker that also receives rows and checkpoints, on rank 0."""
        return None

    def check(self, total: int | None) -> None:
        """Raises UsageError for a setting that fits no step of the run, which has `total` steps; None: not known."""

    def on_begin(self) -> None:
        """Called on rank 0 once the folder records the attempt; its errors are raised on every rank."""

    def around(self, parameters: int) -> Around | None:
        """Returns a context around all steps, on every rank; `parameters` is the number of the model's parameters."""
        return None

    def explain(self, error: BaseException) -> BaseException:
        """Returns the error of this rank, possibly with further hints. May take a while: other ranks do not wait."""
        return error

    def on_end(self, error: BaseException | None) -> None:
        """Called on every rank at the end of the attempt, with its error; may raise if there is none."""


def observers_of(run: ObservedRun) -> Sequence[RunObserver]:
    """Returns the observers of a run. Raises PluginError for an entry point that is not an observer."""
    found: list[RunObserver] = []
    for hook in installed("observer"):
        loaded = hook.load()
        for one in loaded if isinstance(loaded, list | tuple) else [loaded]:
            if not (isinstance(one, type) and issubclass(one, RunObserver)):
                raise hook.error("is not a subclass of `RunObserver`, nor a list of them")
            if (observer := one.of(run)) is not None:
                found.append(observer)
    return found
