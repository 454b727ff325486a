"""Loads what installed distributions add to ddpforge itself: objects of entry-point groups that no recipe names."""

from __future__ import annotations

import os
import sys
from functools import cache
from importlib import metadata
from typing import Any

from ddpforge.components.errors import innermost
from ddpforge.components.installed import normalised
from ddpforge.errors import PluginError
from ddpforge.secret_redaction import redact

__all__ = ["hooks"]

_DISABLED = "DDPFORGE_DISABLE_PLUGINS"


def hooks(group: str) -> tuple[Any, ...]:
    """Returns the objects in the entry-point group `ddpforge.GROUP`: ddpforge's own, then those of plugins, by name.

    Leaves out the distributions in DDPFORGE_DISABLE_PLUGINS. Raises PluginError if one cannot be imported.
    """
    return _loaded(f"ddpforge.{group}", tuple(sys.path), os.environ.get(_DISABLED, ""))


@cache
def _loaded(group: str, path: tuple[str, ...], disabled: str) -> tuple[Any, ...]:
    left_out = {normalised(name) for name in disabled.split(",")}
    found: dict[tuple[bool, str, str], metadata.EntryPoint] = {}
    for distribution in metadata.distributions(path=list(path)):
        if f"[{group}]" not in (distribution.read_text("entry_points.txt") or ""):
            continue  # the metadata of a hundred distributions is not parsed
        name = normalised(distribution.metadata["Name"])
        if name not in left_out:
            for point in distribution.entry_points.select(group=group):
                # Python imports the first distribution of a name on the path: later ones are ignored.
                found.setdefault((not point.value.startswith("ddpforge."), name, point.name), point)
    return tuple(_load(found[key], key[1]) for key in sorted(found))


def _load(point: metadata.EntryPoint, distribution: str) -> Any:
    try:
        return point.load()
    except (Exception, SystemExit) as error:
        where = innermost(error, point.module.partition(".")[0])
        raise PluginError(
            f"`{point.name}` of {distribution} ({point.group}) cannot be loaded: "
            f"{redact(f'{type(error).__name__}: {error}')}{f' ({where})' if where else ''}",
            hints=[f"update or uninstall {distribution}", f"or leave it out: {_DISABLED}={distribution}"],
        ) from error
