"""Secrets: recipes refer to them as `${secret:NAME}`. Files and output contain this reference, not the value."""

import os
import re
from collections.abc import Mapping
from typing import Any

__all__ = ["SECRET", "redact", "redacted", "reveal"]

SECRET = re.compile(r"\$\{secret:(\w+)\}")
"""Pattern of a reference to the environment variable that holds a secret."""

# The end of a long scheme is enough. Without the limit, a text of a hundred thousand letters would take minutes.
_IN_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]{0,30}://)[^/?#\s\"'<>]*@")
_SHORTEST = 4  # characters of the shortest value that is redacted: shorter ones occur in any text

_revealed: dict[str, str] = {}  # value → reference


def reveal(text: str) -> str:
    """Replaces references in `text` by the secrets' values; raises KeyError if a variable is not set."""

    def value(match: re.Match[str]) -> str:
        found = os.environ[match[1]]
        _revealed[found] = match[0]
        return found

    return SECRET.sub(value, text)


def redact(text: str) -> str:
    """Replaces the values of revealed secrets in `text` by their references, and credentials in URLs by `***`."""
    for value in sorted(_revealed, key=len, reverse=True):  # one value may be a part of another
        if len(value) >= _SHORTEST:
            text = text.replace(value, _revealed[value])
    return _IN_URL.sub(r"\1***@", text)


def redacted(value: Any) -> Any:
    """Returns a copy of nested tables and arrays with all texts redacted."""
    if isinstance(value, str):
        return redact(value)
    if isinstance(value, Mapping):
        return {key: redacted(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [redacted(inner) for inner in value]
    return value
