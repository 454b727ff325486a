"""Compares a trainer's result with the right one: right, refused, wrong, crashes or not applicable."""

from __future__ import annotations

import math
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from museum.training import NotApplicableError

__all__ = ["Failure", "Verdict", "compare", "of_failure"]

# Errors that a library raises on purpose, but not by a `raise` in Python.
_ON_PURPOSE = (
    "Expected to have finished reduction in the prior iteration",
    "Expected to mark a variable ready only once",
    "PytorchStreamReader failed",
    "Error while deserializing header",
    "got an unexpected keyword argument",
)


@dataclass(frozen=True)
class Verdict:
    """Verdict on a trainer.

    Attributes:
        verdict: "right", "refused", "wrong", "crashes" or "not applicable".
        text: the first different number, the error, or the reason.
    """

    verdict: str
    text: str = ""

    def as_dict(self) -> dict[str, str]:
        """Returns the verdict as JSON has it."""
        return asdict(self)


@dataclass(frozen=True)
class Failure:
    """An exception in a rank.

    Attributes:
        kind: name of its class, with its module.
        text: first line of its message.
        on_purpose: its last Python line is a `raise`, or it is known as an error that a library raises on purpose.
    """

    kind: str
    text: str
    on_purpose: bool
    not_applicable: bool = False

    @staticmethod
    def of(error: BaseException, trainer: str) -> Failure:
        """Returns a description that other processes can read."""
        message = str(error).strip() or type(error).__name__
        frames = traceback.extract_tb(error.__traceback__)
        on_purpose = bool(frames) and (frames[-1].line or "").lstrip().startswith(("raise", "assert"))
        on_purpose = on_purpose or any(text in message for text in _ON_PURPOSE)
        if trainer == "forge":  # has its own errors for all that it refuses
            from ddpforge.errors import ForgeError

            on_purpose = isinstance(error, ForgeError)
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        first = " ".join(message.split())[:300]
        return Failure(kind, first, on_purpose, isinstance(error, NotApplicableError))


def of_failure(failure: Failure) -> Verdict:
    """Returns the verdict on an error."""
    if failure.not_applicable:
        return Verdict("not applicable", failure.text)
    return Verdict("refused" if failure.on_purpose else "crashes", f"{failure.kind}: {failure.text}")


def compare(found: Any, right: Any, tolerance: float) -> Verdict:
    """Returns "right" if all numbers are equal within the tolerance, else "wrong" with the largest difference."""
    numbers, expected = dict(_numbers(found, "")), dict(_numbers(right, ""))
    missing = expected.keys() - numbers.keys()
    if missing or numbers.keys() - expected.keys():
        place = min(missing or (numbers.keys() - expected.keys()))
        return Verdict("wrong", f"{place}: {numbers.get(place, 'absent')} in place of {expected.get(place, 'nothing')}")
    worst, place = 0.0, ""
    for name, value in numbers.items():
        difference = _difference(value, expected[name])
        if difference > worst:
            worst, place = difference, name
    if worst > tolerance:
        return Verdict("wrong", f"{place}: {_text(numbers[place])} in place of {_text(expected[place])}")
    return Verdict("right", f"{worst:.0e}" if worst else "0")


def _difference(one: Any, other: Any) -> float:
    if isinstance(one, str) or isinstance(other, str):
        return 0.0 if one == other else math.inf
    if math.isnan(one) or math.isnan(other):
        return math.inf
    return abs(one - other) / max(1.0, abs(other)) if one != other else 0.0


def _text(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:.6g}"


def _numbers(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping):
        for key, one in value.items():
            yield from _numbers(one, f"{name}.{key}" if name else str(key))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        for index, one in enumerate(value):
            yield from _numbers(one, f"{name}[{index}]")
    else:
        yield name, value if isinstance(value, str) else float(value)
