"""Loads what installed distributions add to ddpforge itself: objects of entry-point groups that no recipe names."""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from typing import Any

from ddpforge.components.errors import innermost
from ddpforge.components.installed import normalised
from ddpforge.components.local_code import installed_path
from ddpforge.errors import PluginError, SetupError
from ddpforge.secret_redaction import redact

__all__ = ["Hook", "found", "hooks"]

_DISABLED = "DDPFORGE_DISABLE_PLUGINS"
_WITH_OWN = {"check", "environment", "feature", "format", "observer"}  # groups in which ddpforge has entry points


@dataclass(frozen=True)
class Hook:
    """Entry point of a distribution; its code is imported by `load`."""

    name: str
    distribution: str
    point: metadata.EntryPoint

    @property
    def is_own(self) -> bool:
        """True if the code is ddpforge's own."""
        return self.point.value.startswith("ddpforge.")

    def load(self) -> Any:
        """Imports and returns the object. Raises PluginError with the name of the distribution if that fails."""
        try:
            return self.point.load()
        except (Exception, SystemExit) as error:
            where = innermost(error, self.point.module.partition(".")[0])
            why = redact(f"{type(error).__name__}: {error}") + (f" ({where})" if where else "")
            raise self.error(f"cannot be loaded: {why}") from error

    def error(self, problem: str) -> PluginError:
        """Returns an error about this entry point, with ways to do without it."""
        return PluginError(
            f"`{self.name}` of {self.distribution} ({self.point.group}) {problem}",
            hints=[
                f"update or uninstall {self.distribution}",
                f"or leave it out: {_DISABLED}={self.distribution}",
            ],
        )


def hooks(group: str) -> tuple[Any, ...]:
    """Returns the objects in the entry-point group `ddpforge.GROUP`: ddpforge's own, then those of plugins, by name.

    Leaves out the distributions in DDPFORGE_DISABLE_PLUGINS. Raises PluginError if one cannot be imported.
    """
    return tuple(one.load() for one in found(group))


def found(group: str) -> tuple[Hook, ...]:
    """Returns the entry points of a group as `hooks` does, without importing their code.

    Raises SetupError if ddpforge's own are not installed: without them a run would have no checks and no watchdog.
    """
    points = _found(f"ddpforge.{group}", installed_path(), os.environ.get(_DISABLED, ""))
    if group in _WITH_OWN and not any(point.is_own for point in points):
        raise SetupError(
            f"this installation of ddpforge has no entry points in the group ddpforge.{group}",
            hints=["install ddpforge again; a clone: pip install -e ."],
        )
    return points


@cache
def _found(group: str, path: tuple[str, ...], disabled: str) -> tuple[Hook, ...]:
    left_out = {normalised(name) for name in disabled.split(",")}
    points: dict[tuple[bool, str, str], Hook] = {}
    for distribution, text in _that_add(path):
        if f"[{group}]" not in text:
            continue
        name = normalised(distribution.metadata["Name"])
        if name not in left_out:
            for point in distribution.entry_points.select(group=group):
                hook = Hook(point.name, name, point)
                # Python imports the first distribution of a name on the path: later ones are ignored.
                points.setdefault((not hook.is_own, name, point.name), hook)
    return tuple(points[key] for key in sorted(points))


@cache
def _that_add(path: tuple[str, ...]) -> tuple[tuple[metadata.Distribution, str], ...]:
    """Returns the distributions that add to ddpforge, with their entry points; reads those of hundreds only once."""
    found = ((one, one.read_text("entry_points.txt") or "") for one in metadata.distributions(path=list(path)))
    return tuple((one, text) for one, text in found if "[ddpforge." in text)
