"""What rank 0 does alone, told to every rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

from ddpforge.errors import ExitCode, ForgeError, PeerFailed

__all__ = ["on_main"]

T = TypeVar("T")


def on_main(action: Callable[[], T], *, is_main: bool, broadcast: Callable[[Any], Any]) -> T:
    """What `action` returns on rank 0, on every rank. `broadcast` is a strategy's: rank 0's value everywhere.

    When `action` raises, rank 0 raises that and the others PeerFailed: nobody is left waiting, and one rank speaks.
    """
    result: T | None = None
    code: ExitCode | None = None
    failure: Exception | None = None
    if is_main:
        try:
            result = action()
        except Exception as error:
            failure = error
            code = error.exit_code if isinstance(error, ForgeError) else ExitCode.FAILED

    result, code = broadcast((result, code))
    if failure is not None:
        raise failure
    if code is not None:
        raise PeerFailed(code)
    return cast(T, result)
