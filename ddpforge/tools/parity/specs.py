"""Strategies as arguments of commands: `NAME[:OPTION...][@RANKS]`, such as `deepspeed:3` or `ddp@4`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from ddpforge.errors import Diagnostic, PluginError, RecipeError, SourceSpan
from ddpforge.recipe.toml import Source, toml_value

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry

__all__ = ["Spec", "parse", "split"]

_RANKS = re.compile(r"(.*)@(\d+)", re.DOTALL)
_ASSIGNMENT = re.compile(r"\s*([\w.-]+)\s*=")
_ATTRIBUTE = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_MOST_RANKS = 1024


@dataclass(frozen=True)
class Spec:
    """Strategy with options and a number of processes; `text` is the argument as written."""

    text: str
    use: str
    options: tuple[str, ...]  # assignments: "stage=3"
    ranks: int

    @property
    def sets(self) -> list[str]:
        """Returns the `--set` arguments for this strategy. If the recipe already uses it, its other options stay."""
        use = f"strategy.use={toml_value(self.use)}"
        return [use, *(f"strategy.{option}" for option in self.options)]

    def problem(self, message: str, hints: Iterable[str] = ()) -> Diagnostic:
        """Returns a problem with this spec, located in its text."""
        return Diagnostic(message, "strategy", self._place, tuple(hints))

    def own(self, problem: Diagnostic) -> Diagnostic:
        """Returns the same problem, located in this spec's text if one of `sets` causes it."""
        place = problem.place
        mine = place and place.file == "--set" and place.text in self.sets
        return replace(problem, place=self._place) if mine else problem

    @property
    def _place(self) -> SourceSpan:
        return Source("--strategies", self.text).at(0, len(self.text))


def split(texts: Sequence[str]) -> list[str]:
    """Returns the specs in `texts`, separated by commas."""
    return [piece.strip() for text in texts for piece in _split(text, ",")]


def parse(text: str, registry: Registry, *, ranks: int) -> Spec:
    """Parses the spec `text`; without `@RANKS` it has `ranks` processes. Raises RecipeError.

    NAME is a value of `strategy.use` in a recipe. An option is `key=value`, with a value as in TOML. The first one may
    be a value without key: it is for the first option in the strategy's signature.
    """
    bare = text
    if match := _RANKS.fullmatch(text):
        bare, ranks = match[1], int(match[2])
    use, words = _name(_split(bare, ":"), registry)
    spec = Spec(text, use, (), ranks)
    if not use:
        raise RecipeError([spec.problem("the name of a strategy is missing")])
    if not 1 <= ranks <= _MOST_RANKS:
        raise RecipeError([spec.problem(f"the number of processes must be from 1 to {_MOST_RANKS}, not {ranks}")])

    try:
        known = list(registry.options_model("strategy", use).model_fields)
    except PluginError as error:
        raise RecipeError([spec.problem(error.message, error.hints)]) from error
    return replace(spec, options=tuple(_assignments(words, known, spec)))


def _name(parts: list[str], registry: Registry) -> tuple[str, list[str]]:
    """Separates the strategy's name from its options; `parts` are the texts between colons.

    The first two parts are one name if they are registered as `distribution:name`, or if the first is not registered
    and both locate code: `./file.py:Name`, `package.module:Name`.
    """
    two, located = ":".join(parts[:2]), False
    if len(parts) > 1:
        with suppress(PluginError):
            entry = registry.find("strategy", two)
            located = entry is None and _ATTRIBUTE.fullmatch(parts[1]) is not None
            if entry:
                return two, parts[2:]
    if located and parts[0] not in registry.names("strategy"):
        return two, parts[2:]
    return parts[0], parts[1:]


def _assignments(words: list[str], known: list[str], spec: Spec) -> list[str]:
    """Returns the options as assignments; `known` are the option names of the strategy."""
    found: dict[str, str] = {}
    for number, word in enumerate(words):
        match = _ASSIGNMENT.match(word)
        if match:
            key = match[1]
        elif number or not word.strip():
            raise RecipeError([spec.problem(f"`{word}` is a value without an option", ["write `:key=value`"])])
        elif not known:
            raise RecipeError([spec.problem(f"strategy `{spec.use}` has no options")])
        else:
            key, word = known[0], f"{known[0]}={word}"
        if key in found:
            raise RecipeError([spec.problem(f"`{key}` is set twice")])
        found[key] = word
    return [word.strip() for word in found.values()]


def _split(text: str, separator: str) -> list[str]:
    """Splits `text` at the separators outside of quotes and brackets."""
    pieces, depth, quote = [""], 0, ""
    for character in text:
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character == separator and not depth:
            pieces.append("")
            continue
        else:
            depth += (character in "[{") - (character in "]}")
        pieces[-1] += character
    return pieces
