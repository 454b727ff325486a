"""Reads the ids that trackers store."""

import json
from pathlib import Path

from ddpforge.errors import SetupError

__all__ = ["stored_id"]

_MOST = 1 << 20  # bytes


def stored_id(file: Path, key: str) -> str | None:
    """Returns the id that a tracker stored in a file of the run folder; None if there is no file.

    Raises SetupError if the file has no such id.
    """
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MOST))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise SetupError(
            f"{file} cannot be read: {error}", hints=["remove the file; the tracker then starts a new run"]
        ) from error
    if not isinstance(found, str):
        raise SetupError(
            f"{file} cannot be read: `{key}` is not a string",
            hints=["remove the file; the tracker then starts a new run"],
        )
    return found
