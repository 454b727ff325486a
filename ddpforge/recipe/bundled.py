"""Finds a recipe: a file by its path, or one that ships with ddpforge by its bare name."""

from __future__ import annotations

import os
from pathlib import Path

from ddpforge.errors import RecipeError
from ddpforge.recipe.origins import Place
from ddpforge.recipe.report import Problem, did_you_mean

_PACKAGE = Path(__file__).resolve().parent.parent


def bundled() -> dict[str, Path]:
    """The recipes that ship with ddpforge, by name."""
    in_wheel, in_checkout = _PACKAGE / "_recipes", _PACKAGE.parent / "recipes"
    folder = in_wheel if in_wheel.is_dir() else in_checkout
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def find_recipe(name_or_path: str | Path) -> Path:
    """The file that `name_or_path` means: a path if it has a separator or ends in .toml, else a bundled recipe.

    Raises RecipeError when there is no such file.
    """
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or os.sep in text or text.endswith(".toml")
    if not is_path and text in bundled():
        return bundled()[text]

    path = Path(text)
    if not is_path:
        here = [f"a file in this folder is written `./{text}`"] if path.exists() else did_you_mean(text, bundled())
        names = f"recipes that ship with ddpforge: {', '.join(bundled())}" if bundled() else ""
        hints = [
            *here,
            *([names] if names else []),
            "a recipe of your own is given by its path, such as `./my.toml`",
        ]
        raise RecipeError([Problem(f"no recipe named `{text}`", hints=tuple(hints))])
    require_file(path, text)
    return path


def require_file(path: Path, label: str, place: Place | None = None, *, key: str = "") -> None:
    """Raises RecipeError, at `place`, when `path` is not a file; `label` is how people wrote it."""
    try:
        if path.is_file():
            return
        beside = [one.name for one in path.parent.glob("*.toml")] if path.parent.is_dir() else []
        inside = sorted(one.name for one in path.glob("*.toml")) if path.is_dir() else []
    except OSError as error:  # a name that no file system takes
        raise RecipeError([Problem(f"`{label}` cannot be a file: {error.strerror}", key, place)]) from error

    if path.is_dir():
        hints = [f"recipes in it: {', '.join(inside)}"] if inside else ["give the path of a .toml file"]
        raise RecipeError([Problem(f"`{label}` is a folder, not a recipe", key, place, tuple(hints))])
    if not path.parent.is_dir():
        hints = [f"there is no folder `{Path(label).parent}`"]
    else:
        hints = did_you_mean(path.name, beside)
    if place is None and path.stem in bundled():
        hints.append(f"`{path.stem}` without a path is a recipe that ships with ddpforge")
    raise RecipeError([Problem(f"no such recipe: `{label}`", key, place, tuple(hints))])
