"""Shared by several components: libraries that come as an extra of ddpforge, and ids that trackers store."""

import json
from importlib.util import find_spec
from pathlib import Path

from ddpforge.errors import EnvironmentProblem, PluginError

__all__ = ["require", "stored_id"]

_MOST = 1 << 20  # bytes


def require(module: str, extra: str) -> None:
    """Raises PluginError where a library is not installed; does not import it."""
    if find_spec(module) is None:
        raise PluginError(f"{module} is not installed", hints=[f"pip install 'ddpforge[{extra}]'"])


def stored_id(file: Path, key: str) -> str | None:
    """The id that a tracker has stored in a file of the run; None where there is no file.

    Raises EnvironmentProblem for a file that holds none.
    """
    if not file.exists():
        return None
    try:
        with file.open("rb") as opened:
            found = json.loads(opened.read(_MOST))[key]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise EnvironmentProblem(f"{file} cannot be read: {error}", hints=["remove it for a new run there"]) from error
    if not isinstance(found, str):
        raise EnvironmentProblem(f"{file} cannot be read: `{key}` is no text", hints=["remove it for a new run there"])
    return found
