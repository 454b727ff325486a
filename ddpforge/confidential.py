"""Secrets: recipes refer to them as `${secret:NAME}`, and what is written or shown has the reference, not the value."""

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["SECRET", "redact", "redacted", "reveal"]

SECRET = re.compile(r"\$\{secret:(\w+)\}")
"""A reference to the environment variable that holds a secret."""

# Of a long scheme its end is enough; without a limit, a text of a hundred thousand letters would take minutes.
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/?#\s\"'<>]*@")
_SHORTEST = 4  # characters of a value that is looked for in texts: shorter ones are parts of any text

_revealed: dict[str, str] = {}  # value → reference


def reveal(text: str) -> str:
    """`text` with the values of the secrets that it refers to; raises KeyError for one that is not set."""

    def value(match: re.Match[str]) -> str:
        found = os.environ[match[1]]
        _revealed[found] = match[0]
        return found

    return SECRET.sub(value, text)


def redact(text: str) -> str:
    """`text` with references for the secrets that were revealed, and without the credentials in URLs."""
    for value in sorted(_revealed, key=len, reverse=True):  # one may be a part of another
        if len(value) >= _SHORTEST:
            text = text.replace(value, _revealed[value])
    return _IN_URL.sub(r"\1***@", text)


def redacted(value: Any) -> Any:
    """A copy of nested tables and arrays with every text in them redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value
