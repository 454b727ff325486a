"""The end of a launch, from what its ranks and its launcher said: each a line in a file that only they know."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddpforge.errors import ExitCode

__all__ = [
    *("STARTED", "VERDICT", "Death", "Ended", "Words", "has_begun", "is_final", "is_launched"),
    *("record_begun", "record_death", "record_halt", "record_start", "record_verdict", "record_watch"),
]

VERDICT = "DDPFORGE_VERDICT"  # the variable that names the file
STARTED = "DDPFORGE_STARTED"  # when the launch began, in seconds since 1970: ranks may be started again


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
    told: bool = False  # whether `code` is a rank's own
    error: str | None = None  # of the first rank that failed and said why
    watched: str | None = None  # the failure of a rank that was starting, and could not say it


def is_launched() -> bool:
    """True in a rank that `start` has started, which says in the end what ranks could not."""
    return VERDICT in os.environ


def record_start() -> None:
    """Called by a rank that begins, once it hears requests to stop."""
    _record({"rank": _rank(), "pid": os.getpid()})


def record_watch(pid: int) -> None:
    """Called by a rank with a process beside it, which may have the last word."""
    _record({"rank": _rank(), "watch": pid})


def record_begun() -> None:
    """Called by a rank when the run's folder is its own."""
    _record({"rank": _rank(), "begun": True})


def has_begun() -> bool:
    """True where ranks of this launch have had the run's folder before, and were started again since."""
    if path := os.environ.get(VERDICT):
        return any("begun" in word for word in _words(Path(path)))
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def record_verdict(code: int, *, spoke: bool = True, error: str | None = None, by_watch: bool = False) -> None:
    """Called by a rank that ends: tells the launch, if there is one, how, and whether it could say why.

    `by_watch`: called by the process beside it, about the rank that failed first; the launch is to say it.
    """
    word: dict[str, Any] = {"rank": _rank(), "code": int(code), "spoke": spoke}
    _record(word | ({"error": error} if error else {}) | ({"by_watch": True} if by_watch else {}))


def record_halt() -> None:
    """Called by a rank that stops because the whole run is to: no launcher is to start it again."""
    _record({"rank": _rank(), "halt": True})


def record_death(rank: int, signal: int) -> None:
    """Called by the launcher that has seen it."""
    _record({"rank": rank, "signal": signal})


def _rank() -> int:
    return int(os.environ.get("RANK", "0"))


def _record(word: Mapping[str, Any]) -> None:
    if path := os.environ.get(VERDICT):
        with open(path, "a") as file:
            file.write(json.dumps(word) + "\n")


def _words(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


class Words:
    """All that was said so far in a launch of `nproc` ranks on this machine."""

    def __init__(self, path: Path, nproc: int) -> None:
        self._all = _words(path)
        starts = [number for number, word in enumerate(self._all) if "pid" in word]
        # Ranks that are restarted say everything again; only the last attempt counts.
        self._last = self._all[starts[-nproc] :] if len(starts) >= nproc else self._all
        self._nproc = nproc

    @property
    def pids(self) -> list[int]:
        """The processes of all ranks that began."""
        return [word["pid"] for word in self._all if "pid" in word]

    @property
    def watches(self) -> list[int]:
        """The processes beside ranks."""
        return [word["watch"] for word in self._all if "watch" in word]

    @property
    def codes(self) -> list[int]:
        """The exit codes of the last attempt's ranks, in the order in which they ended."""
        return [word["code"] for word in self._last if "code" in word]

    @property
    def all_done(self) -> bool:
        """True when every rank ended well."""
        return self.codes[-self._nproc :] == [0] * self._nproc

    @property
    def begun(self) -> bool:
        """True when ranks have had the run's folder: what they do is not to be cut short."""
        return any("begun" in word for word in self._last)

    @property
    def halted(self) -> bool:
        """True when ranks were to stop for good."""
        return any("halt" in word for word in self._last)

    def conclude(self, code: int, asked: int | None) -> Ended:
        """The end of the launch, whose launcher ended with `code`, negative for a signal.

        `asked` is the first signal that asked it to stop: before any rank began, nothing is lost, and the next start is
        as good as this one.
        """
        if code == 0 or self.all_done:
            return Ended(0)  # whatever an earlier attempt or the launcher itself came to
        failed = [word for word in self._last if word.get("code")]
        return Ended(
            failed[0]["code"] if failed else self._unsaid(code, asked),
            next((Death(word["rank"], word["signal"]) for word in reversed(self._last) if "signal" in word), None),
            frozenset(word["rank"] for word in self._last if word.get("spoke")),
            told=bool(failed),
            error=next((word["error"] for word in failed if "error" in word), None),
            watched=next((word["error"] for word in failed if "by_watch" in word), None),
        )

    def _unsaid(self, code: int, asked: int | None) -> int:
        if asked and asked != signal.SIGINT and not self.pids:
            return ExitCode.PREEMPTED
        signalled = asked or -code
        return 128 + signalled if signalled > 0 else code


def is_final(codes: Sequence[int]) -> bool:
    """True where to start ranks again cannot help: the recipe is wrong, or training diverges, as it will again."""
    return any(code in (ExitCode.USAGE, ExitCode.DIVERGED) for code in codes)
