"""Code beside a recipe: turns a file into a module, and finds the neighbours that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib.util
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from weakref import WeakKeyDictionary

__all__ = ["PREFIX", "import_file", "module_name", "neighbours"]

PREFIX = "ddpforge_local_"
"""The names of modules that are files beside a recipe begin with it."""

_sources: WeakKeyDictionary[ModuleType, bytes | None] = WeakKeyDictionary()


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

    Once, unless it or a file of its folder that was imported has changed since: a later run of this process is to train
    what its folder keeps a copy of.
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
        _forget_changed(package)  # nothing has: takes note of what was imported
    return module


def _forget_changed(package: str) -> None:
    """Lets all modules of a package be imported again if the source of one is another than when it was noted first."""
    inside = f"{package}."
    loaded = [sys.modules[name] for name in list(sys.modules) if name.startswith(inside)]
    now = {one: _source(one) for one in loaded}
    if any(_sources.setdefault(one, source) != source for one, source in now.items()):
        for one in loaded:
            del sys.modules[one.__name__]


def _source(module: ModuleType) -> bytes | None:
    try:
        return Path(module.__file__ or "").read_bytes()
    except OSError:
        return None  # gone, or a folder without __init__.py


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
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level and len(file.relative_to(top).parts) >= node.level:
            start = file.parents[node.level - 1]
            for name in ("", *(f".{alias.name}" for alias in node.names)):
                yield from _files(start, f"{node.module or ''}{name}".strip(".").split("."), top)


def _files(start: Path, parts: list[str], top: Path) -> Iterator[Path]:
    place = start
    for part in filter(None, parts):
        place = place / part
        candidates = (place / "__init__.py", place.with_name(f"{part}.py"))
        yield from (path for path in candidates if path.is_file() and path.is_relative_to(top))
