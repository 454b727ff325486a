"""Reads registered components and versions of installed distributions from their metadata, without importing them."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from ddpforge.components.kinds import KINDS

__all__ = ["RENAMED_GROUPS", "Entry", "digest", "entries", "normalised", "summary", "version"]


RENAMED_GROUPS = {"order": "sampler"}
"""The kinds that plugin API 3 has renamed: a component in an old group is listed, and refused when it is loaded."""


@dataclass(frozen=True, order=True)
class Entry:
    """Component as an installed distribution registers it, not imported."""

    kind: str
    name: str
    distribution: str
    version: str
    target: str  # "pkg.mod:attr"
    group: str = ""  # of entry points, if it is one that plugin API 3 has renamed

    @property
    def is_own(self) -> bool:
        """True if the code is ddpforge's own."""
        return self.target.startswith("ddpforge.")

    @property
    def source(self) -> str:
        """Returns the distribution and its version, for messages."""
        return f"{self.distribution} {self.version}"


def entries(path: Iterable[str]) -> Iterator[Entry]:
    """Yields the components that distributions on an import path register."""
    # Parsing the metadata of a hundred distributions takes longer than all the other work on a recipe. So only
    # distributions are parsed whose raw text mentions a group of ddpforge.
    path = list(path)
    names = {
        normalised(name)
        for found in metadata.distributions(path=path)
        if "ddpforge." in (found.read_text("entry_points.txt") or "")
        and (name := _about(found).get("Name"))  # absent in the remains of an interrupted uninstall
    }
    for name in names:
        # Python imports the first distribution of a name on the path: later ones are ignored.
        distribution = next(iter(metadata.distributions(name=name, path=path)))
        about = _about(distribution)
        for point in distribution.entry_points:
            old = point.group.removeprefix("ddpforge.")
            kind = RENAMED_GROUPS.get(old, old)
            if point.group.startswith("ddpforge.") and kind in KINDS:
                target, group = f"{point.module}:{point.attr or ''}", "" if old == kind else point.group
                yield Entry(kind, point.name, about["Name"], about["Version"], target, group)


def summary(target: str) -> str:
    """Returns the first line of the docstring of "pkg.mod:attr", read from its file; "" if there is none.

    No code is imported.
    """
    module, _, attribute = target.partition(":")
    return _docstrings(module).get(attribute, "")


def digest(components: Iterable[Entry]) -> str:
    """Returns a text that changes when a component, its file, or a file of ddpforge changes."""
    from hashlib import sha256

    files = {file for entry in components if (file := _file(entry.target.partition(":")[0]))}
    files |= {*Path(__file__).parents[1].rglob("*.py")}
    known = [(str(file), file.stat().st_mtime_ns) for file in sorted(files)]
    return sha256(repr((sys.version, sorted(components), known)).encode()).hexdigest()[:16]


@cache
def _file(module: str) -> Path | None:
    """Returns the file of a module; None if it is not found. Nothing is imported."""
    from importlib.machinery import PathFinder

    path, found = None, None
    for end in range(1, module.count(".") + 2):
        try:
            found = PathFinder.find_spec(".".join(module.split(".")[:end]), path)
        except (ImportError, ValueError):
            return None
        path = found.submodule_search_locations if found else None
    return Path(found.origin) if found and found.origin and found.has_location else None


@cache
def _docstrings(module: str) -> dict[str, str]:
    """Returns the first line of the docstring of each class and function of a module, without importing it."""
    import ast

    try:
        file = _file(module)
        nodes = ast.parse(file.read_text(encoding="utf-8")).body if file else []
    except (OSError, SyntaxError, ValueError):
        return {}
    kinds = (ast.FunctionDef, ast.ClassDef)
    return {node.name: (ast.get_docstring(node) or "").partition("\n")[0] for node in nodes if isinstance(node, kinds)}


@cache
def version(distribution: str) -> str | None:
    """Returns the version of an installed distribution; None if it is not installed."""
    try:
        return _about(metadata.distribution(distribution)).get("Version")
    except metadata.PackageNotFoundError:
        return None


def normalised(distribution: str) -> str:
    """Returns the name of a distribution, normalized by the packaging standard (PEP 503)."""
    return re.sub(r"[-_.]+", "-", distribution.strip()).lower()


def _about(distribution: metadata.Distribution) -> dict[str, str]:
    """Reads the header lines of a distribution's metadata; faster than the e-mail parser that `metadata` uses."""
    text = distribution.read_text("METADATA") or distribution.read_text("PKG-INFO") or ""
    lines = (line.partition(": ") for line in text.partition("\n\n")[0].splitlines())
    return {key: value for key, colon, value in lines if colon}
