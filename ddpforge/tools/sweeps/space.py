"""The values that a sweep tries: `KEY=A,B`, `KEY=0..4`, `KEY=1e-4..1e-1:log`; and the runs that come of them."""

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

__all__ = ["Range", "Space", "Variant"]

_NUMBER = r"[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?"
_RANGE = re.compile(rf"({_NUMBER})\.\.({_NUMBER})(:log)?")
_INTEGER = re.compile(r"[-+]?\d+")
_MOST = 10_000  # runs of a grid; more are a slip of the keyboard
_LONGEST = 80  # letters of a run's name


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, both included; integers if both are written as such."""

    low: float
    high: float
    integers: bool
    log: bool = False

    @classmethod
    def parse(cls, text: str) -> Range | None:
        """Reads "0..4" or "1e-4..1e-1:log"; None for anything else. Raises UsageError for a range that is empty."""
        match = _RANGE.fullmatch(text)
        if not match:
            return None
        low, high, log = float(match[1]), float(match[2]), bool(match[3])
        if low >= high or (log and low <= 0):
            wanted = "begin above zero and end above that" if log else "begin below its end"
            raise UsageError(f"the range {text} must {wanted}")
        return cls(low, high, bool(_INTEGER.fullmatch(match[1]) and _INTEGER.fullmatch(match[2])), log)

    def draw(self, rng: random.Random) -> str:
        """A number out of it, as TOML: each as likely as any other, or its logarithm."""
        if self.integers and not self.log:
            return str(rng.randint(int(self.low), int(self.high)))
        value = rng.uniform(self.low, self.high)
        if self.log:
            value = math.exp(rng.uniform(math.log(self.low), math.log(self.high)))
        return str(round(value)) if self.integers else shown(value)

    def ends(self) -> list[str]:
        """Both ends as TOML."""
        return [str(int(end)) if self.integers else shown(end) for end in (self.low, self.high)]


def shown(value: float) -> str:
    """A number of four digits: enough for a search, and short enough for a name."""
    return repr(float(f"{value:.4g}"))


@dataclass(frozen=True)
class Variant:
    """One run of a sweep: its name, and what it sets."""

    name: str
    sets: tuple[str, ...]


@dataclass(frozen=True)
class Space:
    """The values that a sweep varies: a range, or values as they are written; `fixed` is set in every run."""

    axes: Mapping[str, Range | tuple[str, ...]]
    fixed: tuple[str, ...] = ()

    @classmethod
    def parse(cls, words: Sequence[str]) -> Space:
        """Reads KEY=VALUES; a key with one value is fixed. Raises UsageError where nothing varies."""
        axes: dict[str, Range | tuple[str, ...]] = {}
        fixed: list[str] = []
        for word in words:
            key, _, value = (part.strip() for part in word.partition("="))
            values = tuple(_split(value))
            if found := Range.parse(value):
                axes[key] = found
            elif len(values) > 1:
                axes[key] = values
            else:
                fixed.append(word)
        if not axes:
            raise UsageError(
                "nothing varies in this sweep", hints=["e.g. optimizer.lr=1e-4,1e-3 train.seed=0..4", *_brackets(words)]
            )
        return cls(axes, tuple(fixed))

    def grid(self) -> list[Variant]:
        """Every combination, the last key varying fastest; raises UsageError for a range that has no last number."""
        for key, axis in self.axes.items():
            if isinstance(axis, Range) and (not axis.integers or axis.log):
                raise UsageError(
                    f"{key} has too many values between {axis.low:g} and {axis.high:g} for all to be tried",
                    hints=[
                        "draw some: --random N, or --optuna N",
                        f"or name those to try: {key}={','.join(axis.ends())}",
                    ],
                )
        count = math.prod(_size(axis) for axis in self.axes.values())
        if count > _MOST:
            raise UsageError(f"these are {count:,} runs, more than {_MOST:,}", hints=["draw some: --random N"])
        return self._named(
            dict(zip(self.axes, values, strict=True)) for values in product(*map(_each, self.axes.values()))
        )

    def drawn(self, count: int, seed: int) -> list[Variant]:
        """`count` runs drawn at random; with a larger count the first of them are the same."""
        rng = random.Random(seed)
        tables = [{key: _draw(axis, rng) for key, axis in self.axes.items()} for _ in range(count)]
        return self._named(tables)

    def corners(self) -> Iterator[tuple[str, ...]]:
        """Yields what is checked before anything is trained: each value or end of a range, with the first of others."""
        first = {key: _some(axis)[0] for key, axis in self.axes.items()}
        for key, axis in self.axes.items():
            for value in _some(axis):
                yield self.sets({**first, key: value})

    def sets(self, values: Mapping[str, str]) -> tuple[str, ...]:
        """All that a run with these values sets."""
        return (*self.fixed, *(f"{key}={value}" for key, value in values.items()))

    def _named(self, tables: Any) -> list[Variant]:
        """Runs by name: named by their values alone, so that a sweep that grows finds the runs that it has."""
        short = _short_keys(list(self.axes))
        found: dict[str, Variant] = {}
        for values in tables:
            name = _name({short[key]: value for key, value in values.items()})
            found.setdefault(name, Variant(name, self.sets(values)))
        return list(found.values())


def _split(text: str) -> Iterator[str]:
    """The parts between commas that are in no brackets and no quotes."""
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


def _brackets(words: Sequence[str]) -> list[str]:
    lists = [word for word in words if re.search(r"=\s*\[.*,.*\]$", word)]
    return [f"{word} is one value, a list; several are written KEY=[…],[…]" for word in lists[:1]]


def _size(axis: Range | tuple[str, ...]) -> int:
    return int(axis.high - axis.low) + 1 if isinstance(axis, Range) else len(axis)


def _each(axis: Range | tuple[str, ...]) -> Sequence[str]:
    return [str(one) for one in range(int(axis.low), int(axis.high) + 1)] if isinstance(axis, Range) else axis


def _some(axis: Range | tuple[str, ...]) -> Sequence[str]:
    return axis.ends() if isinstance(axis, Range) else axis


def _draw(axis: Range | tuple[str, ...], rng: random.Random) -> str:
    return axis.draw(rng) if isinstance(axis, Range) else rng.choice(axis)


def _short_keys(keys: Sequence[str]) -> dict[str, str]:
    """The last word of each key, or as many as tell it from the others."""
    for count in range(1, 1 + max(key.count(".") + 1 for key in keys)):
        short = {key: ".".join(key.split(".")[-count:]) for key in keys}
        if len(set(short.values())) == len(keys):
            return short
    return {key: key for key in keys}


def _name(values: Mapping[str, str]) -> str:
    """A folder's name that says the values; where that is not exact, with a digest of them."""
    exact = "_".join(f"{key}-{value}" for key, value in values.items())
    plain = re.sub(r"[^\w.-]+", "-", exact, flags=re.ASCII).strip("-.")
    if plain == exact and len(plain) <= _LONGEST:
        return plain
    return f"{plain[:_LONGEST].rstrip('-.')}_{sha256(exact.encode()).hexdigest()[:6]}"
