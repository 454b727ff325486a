"""Renders a recipe's problems as text: place, line with a caret under it, hints."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable

from ddpforge.components.errors import nearest
from ddpforge.errors import Diagnostic, ForgeError, RecipeError, SourceSpan

KeyPath = tuple[str | int, ...]
"""Path of a key of a recipe, or of an element of an array: ("data", "train", "use")."""

_WIDEST = 160  # maximum columns shown of a source line
_WRAP = 100  # columns of a hint
_LONGEST = 60  # maximum characters shown of a value
_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def render(error: ForgeError | Diagnostic) -> str:
    """Returns an error as text for the terminal; for a RecipeError, all of its problems, and their number."""
    if isinstance(error, RecipeError):
        if not any(problem.key or problem.place for problem in error.problems):  # there is no recipe
            return "\n\n".join(map(render, error.problems))
        count = len(error.problems)
        total = f"{count} error{'s' * (count > 1)} in the recipe; nothing was started."
        return "\n\n".join([*map(render, error.problems), total])

    said = [error.message] if isinstance(error, Diagnostic) else error.message.split("\n")
    lines = ["error: " + "\n".join(map(printable, said))]
    margin = " "
    if error.place:
        margin = " " * len(str(error.place.line))
        lines += _excerpt(error.place, margin)
    for hint in error.hints:
        wrapped = textwrap.wrap(
            printable(hint),
            min(_WRAP, _room() - len(f"{margin} = help: ")),
            break_long_words=False,
            break_on_hyphens=False,
        )
        lines.append(f"{margin} = help: " + f"\n{margin}         ".join(wrapped))
    if error.trace:
        lines.append(error.trace.rstrip())
    return "\n".join(lines)


def _room() -> int:
    """Returns the columns of the terminal on stderr, at least 40; more than any hint has if it is not a terminal."""
    return max(40, shutil.get_terminal_size().columns) if sys.stderr.isatty() else 2 * _WRAP


def _excerpt(place: SourceSpan, margin: str) -> list[str]:
    head = f"{margin}--> {place}"
    if not place.line:
        return [head]

    from rich.cells import cell_len  # to align the caret after wide characters

    start = place.column - 1
    shift = max(0, start - _WIDEST // 2)  # of a long line, show the part around the place
    line = printable(place.text[shift : shift + _WIDEST])
    before, marked = line[: start - shift], line[start - shift :][: place.width]
    caret = " " * cell_len(before) + "^" * max(1, cell_len(marked))
    return [head, f"{margin} |", f"{place.line} | {line}".rstrip(), f"{margin} | {caret}"]


# ---------------------------------------------------------------------------------------------- wording
def printable(text: str) -> str:
    """Returns `text` on one line: a space for each tab, a replacement character for each unprintable character."""
    return "".join(c if c.isprintable() else "�" for c in text.replace("\t", " "))


def shown(value: object) -> str:
    """Returns a value as TOML text, shortened if it is long."""
    if isinstance(value, list):
        text = f"[{', '.join(map(shown, value))}]"
    elif isinstance(value, dict):
        text = f"{{ {', '.join(f'{dotted((key,))} = {shown(inner)}' for key, inner in value.items())} }}"
    elif isinstance(value, str | bool):
        text = printable(json.dumps(value, ensure_ascii=False))
    else:
        text = printable(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def kind_of(value: object) -> str:
    """Returns TOML's name for the type of `value`, with an article."""
    return _TYPES.get(type(value), "a date or time")


def dotted(path: KeyPath) -> str:
    """Returns `path` as TOML text: data.train."my key"; elements of arrays as hidden[2]."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        text += ("." if text else "") + (part if bare else printable(json.dumps(part, ensure_ascii=False)))
    return text


def did_you_mean(name: str, known: Iterable[str]) -> list[str]:
    """Returns a hint with the name in `known` that is most similar; [] if none is similar."""
    near = nearest(name, known)
    return [f"did you mean `{near}`?"] if near else []
