"""Installed environments of ranks, as one: schedulers, launchers, watchdogs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import cache
from types import TracebackType
from typing import TYPE_CHECKING, Self

from ddpforge.components.hooks import hooks
from ddpforge.errors import ForgeError
from ddpforge.interfaces.environment import Environment, RankWatch, RunAttempt
from ddpforge.local_world import check_launcher_env, use_launcher_env
from ddpforge.ranks.failures import is_symptom, phrase

if TYPE_CHECKING:
    import torch

__all__ = ["Environments", "environment", "raising_peer_failures"]


def environment() -> Environments:
    """Returns all installed environments as one. Raises PluginError if one cannot be imported."""
    return _made(hooks("environment"))


@cache
def _made(classes: tuple[type[Environment], ...]) -> Environments:
    return Environments([one() for one in classes])


class Environments(Environment):
    """Several environments as one; see `Environment` for the methods."""

    def __init__(self, parts: Sequence[Environment]) -> None:
        self._parts = parts

    def export_variables(self) -> None:
        """Checks the variables of a launcher, and sets them in a scheduler's step. Raises SetupError."""
        use_launcher_env()
        for part in self._parts:
            part.export_variables()
        check_launcher_env()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Enters the context of each environment."""
        with ExitStack() as life:
            for part in self._parts:
                life.enter_context(part.running())
            yield

    def before_join(self, device: torch.device) -> None:
        """Calls each environment."""
        for part in self._parts:
            part.before_join(device)

    def is_restart(self) -> bool:
        """True if it is for any environment."""
        return any(part.is_restart() for part in self._parts)

    def on_begin(self) -> None:
        """Calls each environment."""
        for part in self._parts:
            part.on_begin()

    def watch(self, attempt: RunAttempt) -> RankWatch:
        """Returns the watches of all environments as one."""
        return _Watches([part.watch(attempt) for part in self._parts])

    def peer_failure(self) -> ForgeError | None:
        """Returns the first failure that an environment knows."""
        return next((found for part in self._parts if (found := part.peer_failure())), None)

    def on_halt(self) -> None:
        """Calls each environment."""
        for part in self._parts:
            part.on_halt()


class _Watches(RankWatch):
    def __init__(self, parts: Sequence[RankWatch]) -> None:
        self._parts, self._life = parts, ExitStack()

    def __enter__(self) -> Self:
        for part in self._parts:
            self._life.enter_context(part)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Ends all watches, the last one first."""
        self._life.__exit__(kind, error, trace)

    def call(self) -> None:
        """Calls each watch."""
        for part in self._parts:
            part.call()


@contextmanager
def raising_peer_failures() -> Iterator[None]:
    """Replaces a lost connection by the failure of the rank that caused it, while ranks start.

    A missing rank is detected after the others have waited `train.collective_timeout` for it.
    """
    try:
        yield
    except RuntimeError as error:
        if not is_symptom(error):
            raise
        if cause := environment().peer_failure():
            raise cause from error
        raise ForgeError(f"another rank did not answer before training began: {phrase(error)}") from error
