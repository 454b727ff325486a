"""Every error that ddpforge raises on purpose, and the exit code each one ends the process with.

    ForgeError                 1   training failed
    ├── UsageError             2   the command line, or a path it names, is wrong
    │   └── RecipeError        2   the recipe is wrong; carries every problem that was found
    ├── OutOfMemory            1   of a GPU, or of the host
    ├── Postponed              75  asked to stop before training began
    ├── PeerFailed             …   another rank failed and has reported it
    ├── EnvironmentProblem     3   launcher, devices, disk or an installed package
    │   ├── PluginError        3   a component cannot be loaded, or breaks its contract
    │   ├── StrategyError      3   what runs is not what the recipe asked for
    │   └── CheckpointError    3   a checkpoint cannot be written, read or trusted
    └── Diverged               4   a non-finite loss or gradient, and the recipe says stop

Exceptions carry facts: what was found, and `hints`, each a way to mend it. The command line phrases them.
"""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import IntEnum
from typing import Any


class ExitCode(IntEnum):
    """The exit code of a finished `ddpforge` process; `status.json` carries the same number."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    DIVERGED = 4
    PREEMPTED = 75  # EX_TEMPFAIL: a checkpoint was saved, start me again
    INTERRUPTED = 130  # interrupted before anything was saved


class ForgeError(Exception):
    """An expected failure: shown as a message with hints, never as a traceback.

    `key` names the recipe's key that is at fault, e.g. "train.freeze"; a component names an option of its own by its
    bare name, also by beginning the message with it: "width: …".
    `trace` is the traceback of code outside ddpforge behind the error, as text, if only that explains it.
    """

    exit_code = ExitCode.FAILED
    trace = ""

    def __init__(self, message: str, *, hints: Sequence[str] = (), key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.key = key


class UsageError(ForgeError):
    """The command line, or a path it names, is wrong."""

    exit_code = ExitCode.USAGE


_KEY = re.compile(r"(\w+(?:\.\w+)+)\b|(\w+)(?:: | = )")


def leading_key(message: str) -> str:
    """Returns the key with which a message begins, as in "train.fp8 …", "width: …" and "width = 3 …"; else ""."""
    found = _KEY.match(message)
    return (found[1] or found[2]) if found else ""


@contextmanager
def recipe_faults(key: str = "") -> Iterator[None]:
    """Raises a ValueError from inside as a UsageError: parts of the recipe do not fit together. `key` is as there."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error), key=key) from error


@dataclass(frozen=True)
class Place:
    """A stretch of one line; `line` and `column` count from 1, and `line` is 0 for a file as a whole."""

    file: str
    line: int = 0
    column: int = 0
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Problem:
    """One thing that is wrong with a recipe: what, at which key, where it is written, and how to mend it."""

    message: str
    key: str = ""
    place: Place | None = None
    hints: tuple[str, ...] = ()
    trace: str = ""  # of somebody else's code

    def as_dict(self) -> dict[str, Any]:
        """The problem for machines: message, key, file, line, column (null where there is none) and hints."""
        place = self.place or Place("")
        return {
            "message": self.message,
            "key": self.key or None,
            "file": place.file or None,
            "line": place.line or None,
            "column": place.column or None,
            "hints": list(self.hints),
        }


class RecipeError(UsageError):
    """A recipe that cannot be run; `problems` holds everything that is wrong with it, in order of appearance."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = tuple(problems)


class EnvironmentProblem(ForgeError):
    """The recipe may be right, but this machine, launcher or installation cannot run it."""

    exit_code = ExitCode.ENVIRONMENT


class PluginError(EnvironmentProblem):
    """A component cannot be loaded, or does not keep the contract of its kind."""


class StrategyError(EnvironmentProblem):
    """The strategy that runs is not the one that the recipe asked for."""


class CheckpointError(EnvironmentProblem):
    """A checkpoint cannot be written, read or trusted."""


class Diverged(ForgeError):
    """A loss or gradient became non-finite and the recipe says `on_nonfinite = "stop"`."""

    exit_code = ExitCode.DIVERGED


class OutOfMemory(ForgeError):
    """Training needs more memory than there is on a GPU, or on the host."""


_FULL = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


def says_memory_is_full(error: BaseException) -> bool:
    """True if an error of Python or torch says that there is no more memory."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_FULL.search(str(error))))


class Postponed(ForgeError):
    """A request to stop came before training began: nothing is lost, and the same command begins again."""

    exit_code = ExitCode.PREEMPTED


class PeerFailed(ForgeError):
    """Another rank failed and has said why; this rank ends with the same exit code and says nothing.

    Where the other one could not say it, rank 0 does, or (`launcher_says`) who started the ranks.
    """

    def __init__(
        self,
        exit_code: ExitCode,
        message: str = "rank 0 failed",
        *,
        hints: Sequence[str] = (),
        launcher_says: bool = False,
    ) -> None:
        super().__init__(message, hints=hints)
        self.exit_code, self.launcher_says = exit_code, launcher_says
