"""Importing the code of a component, and what is wrong with it where that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from ddpforge.components.errors import BrokenComponent
from ddpforge.components.local_code import module_name

__all__ = ["importing", "is_file", "local_file"]


@contextmanager
def importing(
    location: str, file: Path | None, base: Path | None, broken: Callable[..., BrokenComponent]
) -> Iterator[None]:
    """Turns whatever a plugin's code raises while it is imported into a BrokenComponent that says where.

    `base` is the folder of the recipe, if that gives the location itself.
    """
    try:
        yield
    except (Exception, SystemExit) as cause:  # a script without a main guard exits
        where = _innermost(cause, (module_name(file) if file else location).partition(".")[0])
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and "." in missing:
            missing = None  # the requirement is there, in a version without this module
        raise broken(
            f"cannot be imported: {type(cause).__name__}: {cause}" + (f" ({where})" if where else ""),
            cause=cause,
            where=where,
            missing=missing,
            hints=_ways_to_provide(missing, location, file, base) if missing else (),
        ) from cause


def _innermost(cause: BaseException, package: str) -> str | None:
    """The plugin's own line that `cause` came through last, as "file:line"."""
    import traceback  # here and below: lists of plugins are to be quick

    if isinstance(cause, SyntaxError) and cause.filename:
        return f"{cause.filename}:{cause.lineno}"
    lines = [
        f"{frame.f_code.co_filename}:{line}"
        for frame, line in traceback.walk_tb(cause.__traceback__)
        if frame.f_globals.get("__name__", "").partition(".")[0] == package
    ]
    return lines[-1] if lines else None


_EXTRAS = {"torchmetrics": "metrics"}  # modules that recipes locate, and the extra that brings each


def _ways_to_provide(missing: str, location: str, file: Path | None, base: Path | None) -> list[str]:
    path = location.replace(".", "/") + ".py"
    if base and missing == location.partition(".")[0] and (base / path).is_file():
        return [f'a file beside the recipe is named by its path: use = "./{path}:…"']
    if file and (file.parent / f"{missing}.py").exists():
        return [f"a file beside a recipe imports its neighbours by a dot: `from .{missing} import …`"]
    if extra := _EXTRAS.get(missing):
        return [f"pip install 'ddpforge[{extra}]'"]
    return [f"install what provides the module `{missing}`"]


# ------------------------------------------------------------------------------------------------ local files
def is_file(location: str) -> bool:
    """True if a recipe locates a file, not a module."""
    return "/" in location or location.partition(":")[0].endswith(".py")


def local_file(location: str, base: Path, broken: Callable[..., BrokenComponent]) -> Path:
    """The file that a recipe in `base` names; it must lie there, also after following links."""
    try:
        folder = base.resolve()
        file = (folder / location).resolve()
        there, is_file = file.exists(), file.is_file()
    except (OSError, RuntimeError, ValueError) as cause:  # a name too long, a loop of links, a null character
        raise broken(f"cannot be loaded: {cause}", cause=cause) from cause

    if not file.is_relative_to(folder):
        raise broken(
            f"leaves the recipe's folder {folder}",
            hints=["move the file next to the recipe, or install it as a package: `package.module:Name`"],
        )
    if not is_file or file.suffix != ".py":
        raise broken(f"cannot be loaded: {file} is not {'a Python file' if there else 'there'}")
    return file
