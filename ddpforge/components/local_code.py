"""Local code of a recipe: imports a file as a module, and finds the neighbour files that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from inspect import getsourcefile
from pathlib import Path
from types import ModuleType

__all__ = ["PREFIX", "component_name", "import_file", "module_name", "neighbours"]

_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")

PREFIX = "ddpforge_local_"
"""Prefix of the names of modules that are local files of a recipe."""

_sources: dict[str, dict[Path, bytes | None]] = {}  # package to the contents of its files at their first import


def module_name(file: Path) -> str:
    """Returns the name of a file's module, in a package for the file's folder, so that `from .layers import X` works.

    Each path has its own name, so files of different recipes never collide. The module is in sys.modules, so forked
    loader workers can unpickle the file's classes. A spawned worker cannot: it needs an installed package.
    """
    stem = file.stem
    if not stem.isidentifier():
        stem = re.sub(r"\W", "_", stem) + _digest(file)
    return f"{PREFIX}{_digest(file.parent)}.{stem}"


def component_name(part: object) -> str:
    """Returns a component's name for messages: its class and, for code that is not installed, its file.

    A part of a component, as the task of one update, has the component as its attribute `named_as`.
    """
    kind = type(getattr(part, "named_as", part))
    if not kind.__module__.startswith(PREFIX):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def import_file(file: Path) -> ModuleType:
    """Imports a file once, and again after it or a neighbour in its package has changed.

    Exceptions of the file's code are not caught.
    """
    # A later run in the same process must train the code that its folder has a copy of.
    name = module_name(file)
    package, _, _ = name.partition(".")
    _forget_changed(package)
    if name in sys.modules:
        return sys.modules[name]
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package, "A recipe's folder.")
        sys.modules[package].__path__ = [str(file.parent)]

    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # neither is None for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        known = _sources.setdefault(package, {})
        known |= {each: _source(each) for each in (file, *neighbours(file)) if each not in known}
    return module


def _forget_changed(package: str) -> None:
    """Removes all modules of a package from sys.modules if one of its files has changed since its import."""
    if any(_source(file) != source for file, source in _sources.get(package, {}).items()):
        del _sources[package]
        for name in [name for name in sys.modules if name.startswith(f"{package}.")]:
            del sys.modules[name]


def _source(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def neighbours(file: Path) -> list[Path]:
    """Returns the files below the folder of `file` that it imports by relative imports, directly or indirectly.

    Parses the source and imports nothing. A file that cannot be parsed has no imports. The result excludes `file`.
    """
    found: dict[Path, None] = {file: None}
    waiting = [file]
    while waiting:
        for other in _imports(waiting.pop(), file.parent):
            if other not in found:
                found[other] = None
                waiting.append(other)
    return [other for other in found if other != file]


def _imports(file: Path, top: Path) -> Iterator[Path]:
    """Yields the files that one file imports directly, and the `__init__.py` of packages, which Python runs first."""
    for level, parts in _relative_imports(_source(file) or b""):
        if len(file.relative_to(top).parts) >= level:
            yield from _files(file.parents[level - 1], parts, top)


@lru_cache(maxsize=64)
def _relative_imports(source: bytes) -> list[tuple[int, list[str]]]:
    """Returns the level (number of dots) and the dotted name of each relative import."""
    # Cached because each rank parses the same file twice.
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):
        return []
    found = []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.ImportFrom) and node.level:
            for name in ("", *(f".{alias.name}" for alias in node.names)):
                found.append((node.level, f"{node.module or ''}{name}".strip(".").split(".")))
        # Only statements contain imports; most of a tree is expressions.
        waiting += [each for kind in _BODIES for each in getattr(node, kind, ())]
    return found


def _files(start: Path, parts: list[str], top: Path) -> Iterator[Path]:
    place = start
    for part in filter(None, parts):
        place = place / part
        candidates = (place / "__init__.py", place.with_name(f"{part}.py"))
        yield from (path for path in candidates if path.is_file() and path.is_relative_to(top))
