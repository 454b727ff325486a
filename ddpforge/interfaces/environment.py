"""Environment of ranks: the scheduler or launcher that has started them, and a watchdog of each.

An environment is a class without arguments in the entry-point group `ddpforge.environment`. All installed environments
take part in every run, on every rank; ddpforge's own first. A method that a class does not define does nothing.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ddpforge.errors import ForgeError

if TYPE_CHECKING:
    import torch

__all__ = ["Environment", "RankWatch", "RunAttempt"]


@dataclass(frozen=True, kw_only=True)
class RunAttempt:
    """Attempt of a run on one rank, about to build its data and model.

    Args:
        folder: the run's folder.
        token: identifies the attempt, the same on all ranks.
        rank: this rank, of `size` ranks.
        size: the number of ranks.
        device: the rank's device.
        strategy: the name of the strategy.
        hang_timeout: maximum seconds without progress; 0 for no limit.
        compiles: True if the first step has to compile.
    """

    folder: Path
    token: str
    rank: int
    size: int
    device: torch.device
    strategy: str
    hang_timeout: float
    compiles: bool


class RankWatch:
    """Context manager around an attempt on one rank. This base class does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends the watch; the attempt has reported its own end."""

    def call(self) -> None:
        """Makes the environment find the rank at fault: this rank has only lost its connection to other ranks."""


class Environment:
    """Scheduler, launcher or watchdog of a run's ranks. The order of the methods is that of their calls."""

    def export_variables(self) -> None:
        """Sets torchrun's environment variables (RANK, LOCAL_RANK, WORLD_SIZE, …) from those of a scheduler.

        Called before the recipe is read, and possibly again. Must do nothing if RANK is set.
        """

    def running(self) -> AbstractContextManager[None]:
        """Returns a context around a run, an evaluation or a prediction in this process, until the process may go on.

        Its exit receives the error of a run that failed.
        """
        return nullcontext()

    def before_join(self, device: torch.device) -> None:
        """Prepares this process for the process group, which forms next. Raises SetupError if it cannot form."""

    def is_restart(self) -> bool:
        """True if earlier ranks of the same start have had the run's folder: these ranks resume their run."""
        return False

    def on_begin(self) -> None:
        """Called once the run's folder is locked for this run."""

    def watch(self, attempt: RunAttempt) -> RankWatch:
        """Returns the watch of an attempt; it is entered next, and exited after the attempt, also after a failure."""
        return RankWatch()

    def peer_failure(self) -> ForgeError | None:
        """Returns the failure of another rank, after this one has lost its connection while ranks start.

        Returns None if it is not known. May wait some seconds for it.
        """
        return None

    def on_halt(self) -> None:
        """Called on each rank when the run's owner stops the whole run, so that nothing restarts its ranks."""
