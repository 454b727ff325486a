"""Reads what installed distributions register, and their versions, from their metadata; imports nothing of them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from ddpforge.components.kinds import KINDS

__all__ = ["RENAMED_GROUPS", "Entry", "entries", "normalised", "version"]


RENAMED_GROUPS = {"order": "sampler"}
"""The kinds that plugin API 3 has renamed: a component in an old group is listed, and refused when it is loaded."""


@dataclass(frozen=True, order=True)
class Entry:
    """A registered component: what an installed distribution declares, nothing of it imported."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str  # "pkg.mod:attr"
    group: str = ""  # of entry points, if it is one that plugin API 3 has renamed

    @property
    def is_own(self) -> bool:
        """True of ddpforge's own code."""
        return self.target.startswith("ddpforge.")

    @property
    def source(self) -> str:
        """The distribution and its version, for people."""
        return f"{self.distribution} {self.version}"


def entries(path: Iterable[str]) -> Iterator[Entry]:
    """Yields what the distributions on an import path register."""
    # Parsing a hundred distributions' metadata takes longer than everything else that a recipe needs, so only
    # those whose raw text mentions a group of ours are looked at.
    path = list(path)
    names = {
        normalised(name)
        for found in metadata.distributions(path=path)
        if "ddpforge." in (found.read_text("entry_points.txt") or "")
        and (name := _about(found).get("Name"))  # absent in the remains of an interrupted uninstall
    }
    for name in names:
        # The first distribution of a name on the path is the one that imports, whatever another one registers.
        distribution = next(iter(metadata.distributions(name=name, path=path)))
        about = _about(distribution)
        for point in distribution.entry_points:
            old = point.group.removeprefix("ddpforge.")
            kind = RENAMED_GROUPS.get(old, old)
            if point.group.startswith("ddpforge.") and kind in KINDS:
                target, group = f"{point.module}:{point.attr or ''}", "" if old == kind else point.group
                yield Entry(kind, point.name, about["Name"], about["Version"], target, group)


@cache
def version(distribution: str) -> str | None:
    """The version of an installed distribution; None where it is not installed."""
    try:
        return _about(metadata.distribution(distribution)).get("Version")
    except metadata.PackageNotFoundError:
        return None


def normalised(distribution: str) -> str:
    """The name of a distribution as the packaging standard compares it."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _about(distribution: metadata.Distribution) -> dict[str, str]:
    """The first lines of a distribution's metadata, read without the parser for mail that `metadata` uses."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    lines = (line.partition(": ") for line in text.partition("\n\n")[0].splitlines())
    return {key: value for key, colon, value in lines if colon}
