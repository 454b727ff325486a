"""Code beside a recipe: turns a file into a module, and finds the neighbours that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from types import ModuleType

__all__ = ["PREFIX", "import_file", "module_name", "neighbours"]

_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")

PREFIX = "ddpforge_local_"
"""The names of modules that are files beside a recipe begin with it."""

_sources: dict[str, dict[Path, bytes | None]] = {}  # of every file that a package's modules may have been made of


def module_name(file: Path) -> str:
    """The name of a file's module: in a package that is the file's folder, so that `from .layers import X` works.

    One name per path, whatever other recipes call their files, and in sys.modules, so that the file's classes pickle
    into forked loader workers. A spawned worker starts without it and could not unpickle them: it needs an
    installed package.
    """
    stem = file.stem
    if not stem.isidentifier():
        stem = re.sub(r"\W", "_", stem) + _digest(file)
    return f"{PREFIX}{_digest(file.parent)}.{stem}"


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def import_file(file: Path) -> ModuleType:
    """Imports a file; raises what its code raises.

    Once, unless it or a neighbour of a file imported from its folder has changed since: a later run of this process is
    to train what its folder keeps a copy of.
    """
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
    assert spec.loader is not None  # both are there for every file that ends in .py
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
    """Lets all modules of a package be imported again if the source of one is another than when it was noted first."""
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
    """The files below the folder of `file` that it imports relatively, and those that these import; without itself.

    Read from the source: nothing is imported. What cannot be parsed imports nothing.
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
    """The files that one file imports itself; packages' `__init__.py` on the way count, as they are run."""
    for level, parts in _relative_imports(_source(file) or b""):
        if len(file.relative_to(top).parts) >= level:
            yield from _files(file.parents[level - 1], parts, top)


@lru_cache(maxsize=64)
def _relative_imports(source: bytes) -> list[tuple[int, list[str]]]:
    """Reads how many folders up each relative import begins, and the names that it goes down; a rank asks twice."""
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
        # Statements are all that can hold an import: most of a tree is expressions.
        waiting += [each for kind in _BODIES for each in getattr(node, kind, ())]
    return found


def _files(start: Path, parts: list[str], top: Path) -> Iterator[Path]:
    place = start
    for part in filter(None, parts):
        place = place / part
        candidates = (place / "__init__.py", place.with_name(f"{part}.py"))
        yield from (path for path in candidates if path.is_file() and path.is_relative_to(top))
