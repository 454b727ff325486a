"""The end of a launch, from what its ranks and its launcher said: each a line in a file that only they know."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

__all__ = ["VERDICT", "Death", "Ended", "conclude", "is_launched", "record_death", "record_verdict"]

VERDICT = "DDPFORGE_VERDICT"  # the variable that names the file


@dataclass(frozen=True)
class Death:
    """A rank that a signal ended, before any other had failed."""

    rank: int
    signal: int

    def __str__(self) -> str:
        with suppress(ValueError):
            return f"ended by signal {self.signal} ({signal.Signals(self.signal).name})"
        return f"ended by signal {self.signal}"


@dataclass(frozen=True)
class Ended:
    """The end of a launch: 0, or the exit code of the first rank that failed; and what only a launcher can know."""

    code: int
    death: Death | None = None
    ranks: frozenset[int] = frozenset()  # those that said how they ended


def is_launched() -> bool:
    """True in a rank that `start` has started, which says in the end what ranks could not."""
    return VERDICT in os.environ


def record_verdict(code: int, *, spoke: bool = True) -> None:
    """Called by a rank that ends: tells the launch, if there is one, how, and whether it could say why."""
    _record({"rank": int(os.environ.get("RANK", "0")), "code": int(code), "spoke": spoke})


def record_death(rank: int, signal: int) -> None:
    """Called by the launcher that has seen it."""
    _record({"rank": rank, "signal": signal})


def _record(word: Mapping[str, int]) -> None:
    if path := os.environ.get(VERDICT):
        with open(path, "a") as file:
            file.write(json.dumps(word) + "\n")


def conclude(path: Path, *, code: int, nproc: int, asked: int | None) -> Ended:
    """The end of a launch of `nproc` ranks, from the file at `path`, and from how the launcher ended.

    `code` is the launcher's exit code, negative for a signal; `asked` the first signal that asked it to stop.
    """
    words = [json.loads(line) for line in path.read_text().splitlines()]
    codes = [word["code"] for word in words if "code" in word]
    if code == 0 or codes[-nproc:] == [0] * nproc:
        return Ended(0)  # whatever an earlier attempt or the launcher itself came to
    signalled = asked or -code
    return Ended(
        next((code for code in codes if code), 128 + signalled if signalled > 0 else code),
        next((Death(word["rank"], word["signal"]) for word in reversed(words) if "signal" in word), None),
        frozenset(word["rank"] for word in words if word.get("spoke")),
    )
