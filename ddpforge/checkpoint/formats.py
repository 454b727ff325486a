"""Installed formats of weights and checkpoints of other programs, by the entry-point group `ddpforge.format`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ddpforge.components.hooks import Hook, found
from ddpforge.errors import UsageError
from ddpforge.interfaces.checkpoint_format import CheckpointFormat

__all__ = ["format_of", "named_format", "weights_format"]


def format_of(path: Path) -> CheckpointFormat | None:
    """Returns the format of a file or folder, ddpforge's own first; None if no installed format matches.

    Raises PluginError if the format of a plugin cannot be loaded.
    """
    return next((one for one in _formats() if one.matches(path)), None)


def weights_format(path: Path) -> CheckpointFormat | None:
    """Returns the format of a file or folder that can be opened for initial weights; None if there is none."""
    return next((one for one in _formats() if type(one).open is not CheckpointFormat.open and one.matches(path)), None)


def named_format(name: str) -> CheckpointFormat:
    """Returns the format of this name; raises UsageError if there is none."""
    hooks = found("format")
    if all(hook.name != name for hook in hooks):
        known = ", ".join(hook.name for hook in hooks)
        raise UsageError(f"there is no format `{name}`", hints=[f"known formats: {known}"])
    return _made(next(hook for hook in hooks if hook.name == name))


def _formats() -> Iterator[CheckpointFormat]:
    # One by one: a plugin is imported only if no format of ddpforge matches.
    return map(_made, found("format"))


def _made(hook: Hook) -> CheckpointFormat:
    kind = hook.load()
    if not isinstance(kind, type) or not issubclass(kind, CheckpointFormat):
        raise hook.error("is not a subclass of ddpforge.interfaces.CheckpointFormat")
    return kind()
