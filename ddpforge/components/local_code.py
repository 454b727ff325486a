"""Local code of a recipe: imports a file as a module, and finds the neighbour files that it imports."""

from __future__ import annotations

import ast
import hashlib
import importlib
import importlib.util
import os
import re
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.machinery import ModuleSpec
from inspect import getsourcefile
from pathlib import Path
from types import ModuleType

__all__ = [
    "component_name",
    "import_file",
    "installed_path",
    "is_beside_a_recipe",
    "is_installed",
    "is_local",
    "module_name",
    "neighbours",
]

_BODIES = ("body", "orelse", "finalbody", "handlers", "cases")

_PREFIX = "ddpforge_local_"  # of the names of modules that are local files of a recipe

_sources: dict[str, dict[Path, bytes | None]] = {}  # package to the contents of its files at their first import
_folders: list[str] = []  # folders at the end of sys.path, put there for local code
_plain: dict[str, Path] = {}  # files that local code imports by plain names, as `from utils import x`


def module_name(file: Path) -> str:
    """Returns the name of a file's module, in a package for the file's folder, so that `from .layers import X` works.

    Each path has its own name, so files of different recipes never collide. The module is in sys.modules, so forked
    loader workers can unpickle the file's classes. A spawned worker cannot: it needs an installed package.
    """
    stem = file.stem
    if not stem.isidentifier():
        stem = re.sub(r"\W", "_", stem) + _digest(file)
    return f"{_PREFIX}{_digest(file.parent)}.{stem}"


def is_local(module: str) -> bool:
    """True for the name of a module that is a local file of a recipe, or that such a file imports from its folder."""
    return module.startswith(_PREFIX) or module in _plain


def is_installed(file: str) -> bool:
    """True for a file of Python or of a package that pip has installed."""
    folders = {"site-packages", "dist-packages"}
    return bool(folders & {*Path(file).parts}) or Path(file).is_relative_to(sysconfig.get_path("stdlib"))


def installed_path() -> tuple[str, ...]:
    """Returns sys.path without the folders that local code has put there."""
    return tuple(folder for folder in sys.path if folder not in _folders)


def component_name(part: object) -> str:
    """Returns a component's name for messages: its class and, for code that is not installed, its file.

    A part of a component, as the task of one update, has the component as its attribute `named_as`.
    """
    kind = type(getattr(part, "named_as", part))
    if not is_local(kind.__module__):
        return kind.__qualname__
    return f"{os.path.basename(getsourcefile(kind) or '')}:{kind.__qualname__}"


def _digest(path: Path) -> str:
    return hashlib.sha256(os.fsencode(path)).hexdigest()[:12]


def import_file(file: Path, base: Path | None = None) -> ModuleType:
    """Imports a file once, and again after it or a neighbour has changed.

    The file imports its neighbours by relative imports, or by plain names as a script does: `from utils import x` finds
    utils.py in the file's folder, then in `base`, the recipe's folder. Installed modules come first. Exceptions of the
    file's code are not caught.
    """
    # A later run in the same process must train the code that its folder has a copy of.
    name = module_name(file)
    package, _, _ = name.partition(".")
    _forget_changed(package)
    if name in sys.modules:
        return sys.modules[name]
    found = _Neighbours(file, base)
    _offer(found)
    module = next((sys.modules[each] for each, path in _plain.items() if path == file and each in sys.modules), None)
    try:
        if module is None:
            module = _execute(name, file, found)
        sys.modules[name] = module
    finally:
        known = _sources.setdefault(package, {})
        known |= {each: _source(each) for each in (file, *found.files.values()) if each not in known}
    return module


def _execute(name: str, file: Path, found: _Neighbours) -> ModuleType:
    package, _, _ = name.partition(".")
    if package not in sys.modules:
        sys.modules[package] = ModuleType(package, "A recipe's folder.")
        sys.modules[package].__path__ = [str(file.parent)]
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None  # neither is None for a file that ends in .py
    module = importlib.util.module_from_spec(spec)
    names = (name, *(each for each, path in found.plain.items() if path == file))
    sys.modules.update(dict.fromkeys(names, module))
    try:
        spec.loader.exec_module(module)
    except BaseException:
        for each in names:
            sys.modules.pop(each, None)
        raise
    return module


def _offer(found: _Neighbours) -> None:
    """Lets Python find the files that local code imports by plain names: each file is one module under both names."""
    if not found.plain:
        return
    for name, file in found.plain.items():
        if _plain.get(name, file) != file:  # of another folder
            sys.modules.pop(name, None)
        if (module := sys.modules.get(module_name(file))) is not None:
            sys.modules[name] = module
    _plain.update(found.plain)
    first = len(sys.path) - sum(folder in _folders for folder in sys.path)
    added = [folder for folder in map(str, found.folders) if folder not in installed_path()]
    sys.path[first:] = [*added, *(folder for folder in sys.path[first:] if folder not in added)]
    _folders.extend(folder for folder in added if folder not in _folders)
    importlib.invalidate_caches()


def _forget_changed(package: str) -> None:
    """Removes all modules of a package from sys.modules if one of its files has changed since its import."""
    if any(_source(file) != source for file, source in _sources.get(package, {}).items()):
        files = _sources.pop(package)
        plain = [name for name, file in _plain.items() if file in files]
        for name in [name for name in sys.modules if name.startswith(f"{package}.") or name in plain]:
            del sys.modules[name]


def _source(file: Path) -> bytes | None:
    try:
        return file.read_bytes()
    except OSError:
        return None


def neighbours(file: Path, base: Path | None = None) -> dict[str, Path]:
    """Returns the files next to `file` that it imports, directly or indirectly, by their paths for a copy next to it.

    See `import_file` for `base`. Parses the source and imports nothing. A file that cannot be parsed has no imports.
    The result excludes `file`.
    """
    return _Neighbours(file, base).files


@dataclass
class _Neighbours:
    """Files that a local file imports, directly or indirectly."""

    file: Path
    base: Path | None
    files: dict[str, Path] = field(default_factory=dict)  # path relative to the folder in which it was found, and file
    plain: dict[str, Path] = field(default_factory=dict)  # module name, and file; may include `file`

    def __post_init__(self) -> None:
        waiting, seen = [(self.file, self.file.parent)], {self.file}
        while waiting:
            file, top = waiting.pop(0)
            found = [*((each, top) for each in _relative(file, top)), *self._by_name(file)]
            for each, folder in found:
                if each != self.file:
                    self.files.setdefault(each.relative_to(folder).as_posix(), each)
                if each not in seen:
                    seen.add(each)
                    waiting.append((each, folder))

    @property
    def folders(self) -> list[Path]:
        """Returns the folders in which plain names are searched."""
        return list(dict.fromkeys([self.file.parent, *([self.base] if self.base else [])]))

    def _by_name(self, file: Path) -> Iterator[tuple[Path, Path]]:
        """Yields the files that one file imports by plain names, each with the folder in which it is found."""
        for level, parts in _imports(_source(file) or b""):
            if level:
                continue
            folder = next((top for top in self.folders if any(_files(top, parts[:1], top))), None)
            folder = folder or next((top for top in self.folders if (top / parts[0]).is_dir()), None)
            if folder is None or _is_installed(parts[0], self.folders):
                continue
            for each in _files(folder, parts, folder):
                place = each.relative_to(folder).with_suffix("").parts
                self.plain.setdefault(".".join(place).removesuffix(".__init__"), each)
                yield each, folder


def _is_installed(name: str, folders: Iterable[Path]) -> bool:
    """True if Python finds the module `name` before the one in `folders`."""
    if name in sys.builtin_module_names or name in sys.stdlib_module_names:
        return True
    spec = _found(name)
    if spec is None:
        return name in sys.modules and name not in _plain
    # A folder without __init__.py comes after all modules.
    return spec.has_location and not _is_in(spec, [*map(str, folders), *_folders])


def is_beside_a_recipe(module: str) -> bool:
    """True if Python finds the module only because local code imports files of its folder by plain names."""
    spec = _found(module.partition(".")[0]) if _folders else None
    return spec is not None and _is_in(spec, _folders)


def _found(name: str) -> ModuleSpec | None:
    """Returns how Python would import a module of the top level, as if it were not imported yet."""
    return next(filter(None, (finder.find_spec(name, None) for finder in sys.meta_path)), None)


def _is_in(spec: ModuleSpec, folders: Iterable[str]) -> bool:
    """True if all places of a module are directly in one of the folders, and not e.g. in an environment below it."""
    places = [str(spec.origin)] if spec.has_location else list(spec.submodule_search_locations or ())
    own = {os.path.join(folder, spec.name, "__init__.py") for folder in folders}
    own |= {os.path.join(folder, end) for folder in folders for end in (f"{spec.name}.py", spec.name)}
    return bool(places) and all(place in own for place in places)


def _relative(file: Path, top: Path) -> Iterator[Path]:
    """Yields the files of one file's relative imports, and the `__init__.py` of packages, which Python runs first."""
    for level, parts in _imports(_source(file) or b""):
        if level and len(file.relative_to(top).parts) >= level:
            yield from _files(file.parents[level - 1], parts, top)


@lru_cache(maxsize=64)
def _imports(source: bytes) -> list[tuple[int, list[str]]]:
    """Returns the level (number of dots) and the parts of the name of each import."""
    # Cached because each rank parses the same file twice.
    try:
        waiting: list[ast.AST] = [ast.parse(source)]
    except (SyntaxError, ValueError):
        return []
    found = []
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            found += [(0, alias.name.split(".")) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
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
