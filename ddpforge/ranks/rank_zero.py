"""Runs an action on rank 0 alone, and tells every rank what came of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar, cast

from ddpforge.errors import ExitCode, ForgeError, PeerFailed
from ddpforge.interfaces import Ranks

__all__ = ["on_rank_zero"]

T = TypeVar("T")


def on_rank_zero(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; returns its result on every rank.

    When `action` raises, rank 0 raises that and the others PeerFailed with its words: nobody is left waiting, and one
    rank of each node speaks.
    """
    result: T | None = None
    told: tuple[ExitCode, str, Sequence[str]] | None = None
    failure: Exception | None = None
    if ranks.is_main:
        try:
            result = action()
        except Exception as error:
            failure = error
            if isinstance(error, ForgeError):
                told = error.exit_code, error.message, error.hints
            else:
                told = ExitCode.FAILED, f"rank 0 failed first: {type(error).__name__}: {error}", ()

    result, told = ranks.broadcast((result, told))
    if failure is not None:
        raise failure
    if told is not None:
        code, message, hints = told
        raise PeerFailed(code, message, hints=hints)
    return cast(T, result)
