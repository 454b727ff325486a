"""Runs an action on rank 0 alone, and tells every rank what came of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

from ddpforge.errors import ExitCode, ForgeError, PeerFailed
from ddpforge.interfaces import Ranks

__all__ = ["on_rank_zero"]

T = TypeVar("T")


def on_rank_zero(ranks: Ranks, action: Callable[[], T]) -> T:
    """Runs `action` on rank 0; returns its result on every rank.

    When `action` raises, rank 0 raises that and the others PeerFailed: nobody is left waiting, and one rank speaks.
    """
    result: T | None = None
    code: ExitCode | None = None
    failure: Exception | None = None
    if ranks.is_main:
        try:
            result = action()
        except Exception as error:
            failure = error
            code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED

    result, code = ranks.broadcast((result, code))
    if failure is not None:
        raise failure
    if code is not None:
        raise PeerFailed(code)
    return cast(T, result)
