"""Results of checks: the expected and the found behaviour, and the place in the component's code."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ddpforge.errors import ExitCode, ForgeError

__all__ = ["Breach", "KitInterrupted", "NotApplicable", "Result", "blame", "place_of", "source_of"]


class KitInterrupted(ForgeError):
    """Raised if the user or the system stopped the kit's ranks: the kit ends, too."""

    exit_code = ExitCode.INTERRUPTED


class Breach(Exception):
    """Raised if a component breaks its contract; `where` is "file:line", by default that of the component."""

    def __init__(self, expected: str, found: str, *, where: str | None = None, hints: Sequence[str] = ()) -> None:
        super().__init__(f"expected {expected}; found {found}")
        self.expected, self.found, self.where, self.hints = expected, found, where, tuple(hints)


class NotApplicable(Exception):
    """Raised if a check does not apply to a component; the message is the reason."""


@dataclass(frozen=True)
class Result:
    """Result of one check of one component."""

    kind: str
    name: str
    check: str
    status: Literal["passed", "failed", "skipped"]
    seconds: float = 0.0
    expected: str = ""
    found: str = ""
    where: str = ""
    hints: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Returns the fields for JSON."""
        return asdict(self)

    def text(self) -> str:
        """Returns a description of the failure, or the reason why the check was skipped."""
        if self.status == "skipped":
            return self.found
        lines = [f"expected  {self.expected}", f"found     {self.found}", f"look at   {self.where}"]
        lines += [f"hint      {hint}" for hint in self.hints]
        return "\n".join(line.replace("\n", "\n          ") for line in lines)


def source_of(component: Callable[..., Any]) -> str:
    """Returns "file:line" of a component's definition; the name of its module if there is no source."""
    while isinstance(component, functools.partial):
        component = component.func
    component = inspect.unwrap(component)  # torch wraps the step of every optimizer
    try:
        return f"{inspect.getsourcefile(component)}:{inspect.getsourcelines(component)[1]}"
    except (OSError, TypeError):
        return str(getattr(component, "__module__", component))


def place_of(error: BaseException, component: Callable[..., Any]) -> str:
    """Returns "file:line" of the component's innermost line in the traceback, or of its definition."""
    home = source_of(component)
    file = home.rpartition(":")[0]
    own = [
        f"{file}:{line}" for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == file
    ]
    return own[-1] if own else home


def blame(error: BaseException, expected: str, component: Callable[..., Any]) -> Breach:
    """Returns a Breach for an exception that a component raised."""
    hints = getattr(error, "hints", ())
    return Breach(expected, f"{type(error).__name__}: {error}", where=place_of(error, component), hints=hints)
