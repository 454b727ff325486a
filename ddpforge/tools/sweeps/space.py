"""Values of a sweep (`KEY=A,B`, `KEY=0..4`, `KEY=1e-4..1e-1:log`), and the runs that have them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

from ddpforge.errors import UsageError

__all__ = ["SearchSpace", "ValueRange", "Variant"]

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_INTEGER = re.compile(r"[-+]?\d+")
_MOST = 10_000  # runs of a grid; more are probably a typing error
_LONGEST = 80  # characters of a run's name


@dataclass(frozen=True)
class ValueRange:
    """Numbers from `low` to `high`, both included; integers if both are written as integers."""

    low: float
    high: float
    integers: bool
    log: bool = False

    @classmethod
    def parse(cls, text: str) -> ValueRange | None:
        """Reads "0..4" or "1e-4..1e-1:log"; returns None for other texts. Raises UsageError for an empty range."""
        match = _RANGE.fullmatch(text)
        if not match:
            return None
        low, high, log = float(match[1]), float(match[2]), bool(match[3])
        if low >= high or (log and low <= 0):
            wanted = "begin above zero and below its end" if log else "begin below its end"
            raise UsageError(f"the range {text} must {wanted}")
        return cls(low, high, bool(_INTEGER.fullmatch(match[1]) and _INTEGER.fullmatch(match[2])), log)

    def draw(self, rng: random.Random) -> str:
        """Draws a number as TOML, uniformly distributed, or with a uniformly distributed logarithm."""
        if self.integers and not self.log:
            return str(rng.randint(int(self.low), int(self.high)))
        value = rng.uniform(self.low, self.high)
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return str(round(value)) if self.integers else shown(value)

    def ends(self) -> list[str]:
        """Returns both ends as TOML."""
        return [str(int(end)) if self.integers else shown(end) for end in (self.low, self.high)]


def shown(value: float) -> str:
    """Rounds a number to four digits: enough for a search, and short enough for a name."""
    return repr(float(f"{value:.4g}"))


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its name and its settings."""

    name: str
    sets: tuple[str, ...]


@dataclass(frozen=True)
class SearchSpace:
    """Values that a sweep varies, by key: a range, or values as written. `fixed` is set in every run."""

    axes: Mapping[str, ValueRange | tuple[str, ...]]
    fixed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> SearchSpace:
        """Reads KEY=VALUES; a key with one value is fixed. Raises UsageError if nothing varies."""
        axes: dict[str, ValueRange | tuple[str, ...]] = {}
        fixed: list[str] = []
        for word in words:
            key, _, value = (part.strip() for part in word.partition("="))
            values = tuple(_split(value))
            if found := ValueRange.parse(value):
                axes[key] = found
            elif len(values) > 1:
                axes[key] = values
            else:
                fixed.append(word)
        if not axes:
            raise UsageError(
                f"no key has several values in {' '.join(words) or 'this sweep'}",
                hints=[
                    "e.g. optimizer.lr=1e-4,1e-3 train.seed=0..4",
                    *([f"write a range with two points: {dotted}"] if (dotted := _with_points(words)) else []),
                    *_brackets(words),
                ],
            )
        return cls(axes, tuple(fixed))

    def grid(self) -> list[Variant]:
        """Returns every combination, the last key varying fastest.

        Raises UsageError for a range of fractions or logarithms, and for more than 10,000 runs.
        """
        for key, axis in self.axes.items():
            if isinstance(axis, ValueRange) and (not axis.integers or axis.log):
                raise UsageError(
                    f"{key} has too many values between {axis.low:g} and {axis.high:g} to try all",
                    hints=["draw some: --random N, or --optuna N", f"or list values: {key}={','.join(axis.ends())}"],
                )
        count = math.prod(_size(axis) for axis in self.axes.values())
        if count > _MOST:
            raise UsageError(f"the grid has {count:,} runs, more than {_MOST:,}", hints=["draw some: --random N"])
        return self._named(
            dict(zip(self.axes, values, strict=True)) for values in product(*map(_each, self.axes.values()))
        )

    def drawn(self, count: int, seed: int) -> list[Variant]:
        """Draws `count` runs at random; a larger count begins with the same runs."""
        rng = random.Random(seed)
        tables = [{key: _draw(axis, rng) for key, axis in self.axes.items()} for _ in range(count)]
        return self._named(tables)

    def corners(self) -> Iterator[tuple[str, ...]]:
        """Yields settings to check before training: each value or end of a range, with the first of the other keys."""
        first = {key: _some(axis)[0] for key, axis in self.axes.items()}
        for key, axis in self.axes.items():
            for value in _some(axis):
                yield self.sets({**first, key: value})

    def sets(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """Returns all settings of a run with these values."""
        return (*self.fixed, *(f"{key}={value}" for key, value in values.items()))

    def _named(self, tables: Any) -> list[Variant]:
        """Returns the runs, named by their values alone: a sweep with more values finds its existing runs."""
        short = _short_keys(list(self.axes))
        found: dict[str, Variant] = {}
        for values in tables:
            name = _name({short[key]: value for key, value in values.items()})
            found.setdefault(name, Variant(name, self.sets(values)))
        return list(found.values())


def _split(text: str) -> Iterator[str]:
    """Splits a text at the commas outside of brackets and quotes."""
    depth, quote, start = 0, "", 0
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "\"'":
            quote = letter
        elif letter in "[{(":
            depth += 1
        elif letter in "]})":
            depth -= 1
        elif letter == "," and not depth:
            yield text[start:place].strip()
            start = place + 1
    yield text[start:].strip()


def _with_points(words: Sequence[str]) -> str:
    """Returns a setting that has a range with a colon, `lr=1e-3:1e-1`, with two points; "" if there is none."""
    number = r"[-+]?[\d.]+(?:e[-+]?\d+)?"
    matches = (re.fullmatch(rf"(.+)=({number}):({number})", word) for word in words)
    return next((f"{found[1]}={found[2]}..{found[3]}" for found in matches if found), "")


def _brackets(words: Sequence[str]) -> list[str]:
    lists = [word for word in words if re.search(r"=\s*\[.*,.*\]$", word)]
    return [f"{word} is one value, a list; write several as KEY=[…],[…]" for word in lists[:1]]


def _size(axis: ValueRange | tuple[str, ...]) -> int:
    return int(axis.high - axis.low) + 1 if isinstance(axis, ValueRange) else len(axis)


def _each(axis: ValueRange | tuple[str, ...]) -> Sequence[str]:
    return [str(one) for one in range(int(axis.low), int(axis.high) + 1)] if isinstance(axis, ValueRange) else axis


def _some(axis: ValueRange | tuple[str, ...]) -> Sequence[str]:
    return axis.ends() if isinstance(axis, ValueRange) else axis


def _draw(axis: ValueRange | tuple[str, ...], rng: random.Random) -> str:
    return axis.draw(rng) if isinstance(axis, ValueRange) else rng.choice(axis)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """Returns the last word of each key, or more words if keys would be equal."""
    for count in range(1, 1 + max(key.count(".") + 1 for key in keys)):
        short = {key: ".".join(key.split(".")[-count:]) for key in keys}
        if len(set(short.values())) == len(keys):
            return short
    return {key: key for key in keys}


def _name(values: Mapping[str, str]) -> str:
    """Returns a folder name made of the values; if it cannot contain them exactly, a digest is added."""
    exact = "_".join(f"{key}-{value}" for key, value in values.items())
    plain = re.sub(r"[^\w.-]+", "-", exact, flags=re.ASCII).strip("-.")
    if plain == exact and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST].rstrip('-.')}_{sha256(exact.encode()).hexdigest()[:6]}"
