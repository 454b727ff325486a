"""The rendering of a recipe's problems: place, line with a caret under it, ways to mend it."""

from __future__ import annotations

import difflib
import json
import re
import textwrap
from collections.abc import Iterable

from ddpforge.errors import ForgeError, Place, Problem, RecipeError

KeyPath = tuple[str | int, ...]
"""A key of a recipe, or an element of an array in it: ("data", "train", "use")."""

_WIDEST = 160  # columns of a source line that are shown
_WRAP = 100  # columns of a hint
_LONGEST = 60  # characters of a value that are quoted
_TYPES = {
    bool: "a boolean",
    int: "an integer",
    float: "a float",
    str: "a string",
    list: "an array",
    dict: "a table",
}


def render(error: ForgeError | Problem) -> str:
    """The text that people read; for a RecipeError all of its problems and how many there are."""
    if isinstance(error, RecipeError):
        count = len(error.problems)
        total = f"{count} error{'s' * (count > 1)} in the recipe; nothing was started."
        return "\n\n".join([*map(render, error.problems), total])

    said = [error.message] if isinstance(error, Problem) else error.message.split("\n")
    lines = ["error: " + "\n".join(map(printable, said))]
    margin = " "
    if isinstance(error, Problem) and error.place:
        margin = " " * len(str(error.place.line))
        lines += _excerpt(error.place, margin)
    for hint in error.hints:
        wrapped = textwrap.wrap(printable(hint), _WRAP, break_long_words=False, break_on_hyphens=False)
        lines.append(f"{margin} = help: " + f"\n{margin}         ".join(wrapped))
    if error.trace:
        lines.append(error.trace.rstrip())
    return "\n".join(lines)


def _excerpt(place: Place, margin: str) -> list[str]:
    head = f"{margin}--> {place}"
    if not place.line:
        return [head]

    from rich.cells import cell_len  # a caret belongs under what it means, also after wide characters

    start = place.column - 1
    shift = max(0, start - _WIDEST // 2)  # of an endless line, show the part that matters
    line = printable(place.text[shift : shift + _WIDEST])
    before, marked = line[: start - shift], line[start - shift :][: place.width]
    caret = " " * cell_len(before) + "^" * max(1, cell_len(marked))
    return [head, f"{margin} |", f"{place.line} | {line}".rstrip(), f"{margin} | {caret}"]


# ---------------------------------------------------------------------------------------------- wording
def printable(text: str) -> str:
    """`text` on one line, with a blank for every tab and a replacement character for what has no glyph."""
    return "".join(c if c.isprintable() else "�" for c in text.replace("\t", " "))


def shown(value: object) -> str:
    """A value as TOML writes it, shortened where it is long."""
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
    """TOML's name for the type of `value`, with its article."""
    return _TYPES.get(type(value), "a date or time")


def dotted(path: KeyPath) -> str:
    """`path` as TOML writes it: data.train."my key"; elements of arrays as hidden[2]."""
    text = ""
    for part in path:
        if isinstance(part, int):
            text += f"[{part}]"
            continue
        bare = re.fullmatch(r"[A-Za-z0-9_-]+", part)
        text += ("." if text else "") + (part if bare else printable(json.dumps(part, ensure_ascii=False)))
    return text


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The one of `known` that `name` was probably meant to be."""
    by_folded = {one.casefold(): one for one in known}
    matches = difflib.get_close_matches(name[:100].casefold(), by_folded, n=1)
    return by_folded[matches[0]] if matches else None


def did_you_mean(name: str, known: Iterable[str]) -> list[str]:
    """A hint with the nearest of `known`, or none."""
    near = nearest(name, known)
    return [f"did you mean `{near}`?"] if near else []
