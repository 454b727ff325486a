"""Errors that ddpforge raises on purpose, with the exit code of the process for each.

    ForgeError                 1   training failed
    ├── UsageError             2   the command line, or a path it names, is wrong
    │   └── RecipeError        2   the recipe is wrong; carries every problem that was found
    ├── OutOfMemory            1   of a GPU, or of the host
    ├── StoppedBeforeStart     75  a stop was requested before training began
    ├── PeerFailed             …   another rank failed and has reported it
    ├── SetupError     3   launcher, devices, disk or an installed package
    │   ├── PluginError        3   a component cannot be loaded, or breaks its contract
    │   ├── StrategyError      3   the training does not match the recipe's strategy
    │   └── CheckpointError    3   a checkpoint cannot be written, read or trusted
    └── Diverged               4   a non-finite loss or gradient, with on_nonfinite = "stop"

Exceptions have a message and `hints`, each a way to mend the problem. The command line formats them.
"""

import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from difflib import get_close_matches
from enum import IntEnum
from pathlib import Path
from types import ModuleType
from typing import Any


class ExitCode(IntEnum):
    """Exit code of a `ddpforge` process; `status.json` has the same number."""

    DONE = 0
    FAILED = 1
    USAGE = 2
    ENVIRONMENT = 3
    DIVERGED = 4
    PREEMPTED = 75  # EX_TEMPFAIL: a checkpoint was saved; the same command resumes
    INTERRUPTED = 130  # interrupted before anything was saved


def pip_install(extra: str) -> str:
    """Returns the command that installs the packages of an extra of ddpforge, however ddpforge was installed."""
    from importlib.metadata import requires

    lines = [line.partition(";") for line in requires("ddpforge") or ()]
    packages = [name.strip() for name, _, marker in lines if re.search(rf"extra == ['\"]{extra}['\"]", marker)]
    return " ".join(["pip install", *map(repr, packages)])


class ForgeError(Exception):
    """Expected failure: shown as a message with hints, never as a traceback.

    `key` is the key of the recipe that caused it, e.g. "train.freeze". A component uses the bare name of its own option
    as `key`, or begins the message with it: "width: …". `trace` is the text of a traceback from code outside ddpforge,
    if the error cannot be understood without it. `place` is the place of `key` in the recipe, once it is known.
    """

    exit_code = ExitCode.FAILED
    trace = ""
    place: "SourceSpan | None" = None

    def __init__(self, message: str, *, hints: Sequence[str] = (), key: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hints = tuple(hints)
        self.key = key
        self._added: list[str] = []

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # hints may still change
        """Returns the place and the hints, which Python and notebooks print below the message of an exception."""
        return [*_notes(self.place, self.hints), *self._added]

    def add_note(self, note: str) -> None:
        """Adds a line below the hints."""
        self._added.append(note)


_ARGUMENTS = (
    (re.compile(r"--(allow-change|set) (\S+?)([,;:.]?)(?=\s|$)"), r'\1=["\2"]\3'),
    (re.compile(r"--(step) (\w+)"), r"\1=\2"),
    (re.compile(r"--(out|weights|profile) (\w[\w./]*)"), r'\1="\2"'),
    (re.compile(r"--(fresh|best|force)\b"), r"\1=True"),
)
"""Options of the command line, and the arguments of the Python API in their place."""


def _notes(place: "SourceSpan | None", hints: Sequence[str]) -> Iterator[str]:
    if place:
        yield f" --> {place}"
    for hint in hints:
        for option, argument in _ARGUMENTS:
            hint = option.sub(argument, hint)
        yield f" help: {hint}".replace("allow-change=", "allow_change=").replace("set=[", "sets=[")


class UsageError(ForgeError):
    """Error in the command line, or in a path that it names."""

    exit_code = ExitCode.USAGE


_KEY = re.compile(r"(\w+(?:\.\w+)+)\b|(\w+)(?:: | = )")


def leading_key(message: str) -> str:
    """Returns the key with which a message begins, as in "train.fp8 …", "width: …" and "width = 3 …"; else ""."""
    found = _KEY.match(message)
    return (found[1] or found[2]) if found else ""


@contextmanager
def recipe_faults(key: str = "") -> Iterator[None]:
    """Turns a ValueError from inside into a UsageError, for parts of a recipe that do not fit together; with `key`."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error), key=key) from error


@dataclass(frozen=True)
class SourceSpan:
    """Range of characters in one line; `line` and `column` count from 1; `line` 0 is the whole file."""

    file: str
    line: int = 0
    column: int = 0
    width: int = 1
    text: str = ""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}" if self.line else self.file


@dataclass(frozen=True)
class Diagnostic:
    """Problem in a recipe, with its key, its place in a file, and hints."""

    message: str
    key: str = ""
    place: SourceSpan | None = None
    hints: tuple[str, ...] = ()
    trace: str = ""  # traceback of code outside ddpforge

    def as_dict(self) -> dict[str, Any]:
        """Returns the problem for JSON: message, key, file, line, column (None if unknown) and hints."""
        place = self.place or SourceSpan("")
        return {
            "message": self.message,
            "key": self.key or None,
            "file": place.file or None,
            "line": place.line or None,
            "column": place.column or None,
            "hints": list(self.hints),
        }


class RecipeError(UsageError):
    """Error for a recipe that cannot be run; `problems` has all its problems in order of appearance."""

    def __init__(self, problems: Sequence[Diagnostic]) -> None:
        super().__init__("; ".join(problem.message for problem in problems))
        self.problems = tuple(problems)

    @property
    def __notes__(self) -> list[str]:  # type: ignore[override]  # hints may still change
        """Returns the place and the hints of each problem, below its message if there are several."""
        lines: list[str] = []
        for problem in self.problems:
            lines += [problem.message] if len(self.problems) > 1 else []
            lines += [*_notes(problem.place, problem.hints), *([problem.trace.rstrip()] if problem.trace else [])]
        return [*lines, *self._added]


class SetupError(ForgeError):
    """Error of the machine, launcher or installation; the recipe may be right."""

    exit_code = ExitCode.ENVIRONMENT


class PluginError(SetupError):
    """Error for a component that cannot be loaded, or breaks the contract of its kind."""


class StrategyError(SetupError):
    """Error for a training that does not match the recipe's strategy."""


class CheckpointError(SetupError):
    """Error for a checkpoint that cannot be written, read or trusted."""


class Diverged(ForgeError):
    """Error for a non-finite loss or gradient if the recipe sets `on_nonfinite = "stop"`."""

    exit_code = ExitCode.DIVERGED


class OutOfMemory(ForgeError):
    """Error for a training that needs more memory than a GPU or the host has."""


_FULL = re.compile(r"out of memory|can't allocate memory|CUBLAS_STATUS_ALLOC_FAILED", re.IGNORECASE)


def says_memory_is_full(error: BaseException) -> bool:
    """True if an error of Python or torch means that memory is full."""
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and bool(_FULL.search(str(error))))


class StoppedBeforeStart(ForgeError):
    """Raised for a request to stop before training began; the same command starts it again."""

    exit_code = ExitCode.PREEMPTED


class PeerFailed(ForgeError):
    """Raised on a rank if another rank failed: this rank ends with the same exit code, without a message.

    The failed rank reports its error. If it cannot, rank 0 or (with `launcher_prints`) the launcher does.
    """

    def __init__(
        self,
        exit_code: ExitCode,
        message: str = "rank 0 failed",
        *,
        hints: Sequence[str] = (),
        launcher_prints: bool = False,
    ) -> None:
        super().__init__(message, hints=hints)
        self.exit_code, self.launcher_prints = exit_code, launcher_prints


# ---------------------------------------------------------------------------------------------- paths
_VARIABLE = re.compile(r"\$(?:\{(\w+)\}|(\w+))")


def unexpanded(path: str | Path) -> list[str]:
    """Returns a hint for a path with `~` or a variable of the shell, which ddpforge does not expand; else nothing."""
    text = str(path)
    home = re.sub(r"^~(?=/|$)", "$HOME", text)
    written = _VARIABLE.sub(lambda found: f"${{env:{found[1] or found[2]}}}", home)
    if written == text:
        return []
    return [f'`~` and variables of the shell are not expanded: write "{written}", or in Python os.path.expanduser(…)']


def not_there(path: str | Path) -> list[str]:
    """Returns hints for a missing file: the entry that is there, a similar name, or the current folder."""
    text = str(path)
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+:/", text):
        return [f"{text} is an address, but only files can be read: copy or mount it first"]
    if re.match(r"[A-Za-z]:[/\\]", text):
        return [f"{text} is a path of Windows: write it as this machine has it"]
    if hints := unexpanded(path):
        return hints
    path, near = Path(path), []
    with suppress(OSError):  # e.g. a name that is too long
        if path.exists():
            return [f"it is a {'folder' if path.is_dir() else 'file' if path.is_file() else 'device or a pipe'}"]
        if path.is_symlink():
            return [f"it is a link to {os.readlink(path)}, which does not exist"]
        near = get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1)
    return [*(f"did you mean {path.with_name(one)}?" for one in near), f"looked in {Path.cwd()}"]


# ---------------------------------------------------------------------------------------------- optional libraries
def library(name: str, extra: str) -> ModuleType:
    """Imports an optional library; raises SetupError with the extra of ddpforge that installs it."""
    from importlib import import_module

    try:
        return import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0]:
            raise
        raise SetupError(f"{error.name} is not installed", hints=[pip_install(extra)]) from error


def require(module: str, extra: str) -> None:
    """Raises PluginError if a library is not installed; does not import it."""
    from importlib.util import find_spec

    if find_spec(module) is None:
        raise PluginError(f"{module} is not installed", hints=[pip_install(extra)])
