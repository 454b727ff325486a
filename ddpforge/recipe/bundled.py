"""Finds a recipe file: by its path, or by the bare name of a recipe that ships with ddpforge."""

from __future__ import annotations

import os
from pathlib import Path

from ddpforge.errors import Diagnostic, RecipeError, not_there, unexpanded
from ddpforge.recipe.report import did_you_mean
from ddpforge.recipe.toml import Origin

_OTHER_FORMATS = ("yaml", "yml", "json", "py", "cfg", "ini")
_PACKAGE = Path(__file__).resolve().parent.parent


def bundled() -> dict[str, Path]:
    """Returns the recipes that ship with ddpforge, by name."""
    in_wheel, in_checkout = _PACKAGE / "_recipes", _PACKAGE.parent / "recipes"
    folder = in_wheel if in_wheel.is_dir() else in_checkout
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def titles() -> dict[str, str]:
    """Returns the titles of these recipes, by name: the first line of each file."""
    first = {name: path.read_text(encoding="utf-8").partition("\n")[0] for name, path in bundled().items()}
    return {name: line.removeprefix("#").strip() for name, line in first.items()}


def find_recipe(name_or_path: str | Path) -> Path:
    """Returns the file of a recipe: a path if the text has a separator or ends in .toml, else a bundled recipe.

    Raises RecipeError if there is no such file.
    """
    if not isinstance(name_or_path, str | Path):
        raise TypeError(f"a recipe must be a path or a name, not a {type(name_or_path).__name__}")
    text = str(name_or_path)
    is_path = isinstance(name_or_path, Path) or "/" in text or os.sep in text or text.endswith(".toml")
    if not is_path and text in bundled():
        return bundled()[text]

    if is_path:
        require_file(Path(text), text)
        return Path(text)

    if "=" in text or text.lstrip()[:1] == "{":
        ways = ("in Python, read it: ddpforge.train(tomllib.loads(text), …)", "or write it to a file")
        raise RecipeError([Diagnostic("this is the text of a recipe, not its path", hints=ways)])
    exists = os.path.exists(text)
    own = [name for name in os.listdir() if name.endswith(".toml")]
    hints = did_you_mean(text, bundled()) or did_you_mean(text, own)
    if exists:
        hints = [f"write a file in this folder as `./{text}`"]
    if os.path.isdir(text):
        hints = [f"it is a folder; its recipe is a file, e.g. {text}/recipe.toml"]
    if text.endswith(".py"):
        hints = ['a script is started by Python or torchrun; a recipe names its model: use = "./FILE.py:Name"']
        raise RecipeError([Diagnostic(f"{text} is Python, not a recipe", hints=tuple(hints))])
    if (name := text.rpartition(".")[0]) and text.rpartition(".")[2].lower() in _OTHER_FORMATS:
        hints = [f"recipes are TOML files: `{name}.toml`"]
        if name in bundled():
            hints.append(f"or did you mean the recipe `{name}`, which ships with ddpforge?")
    if os.path.isfile(os.path.join("runs", text, "run.json")):
        hints = [f"to resume the run of this name: ddpforge runs resume {text}"]
    hints.append(f"recipes that ship with ddpforge: {', '.join(bundled())}")
    hints.append("write the path of your own recipe, e.g. `./my.toml`")
    raise RecipeError([Diagnostic(f"no recipe named `{text}`", hints=tuple(hints))])


def require_file(path: Path, label: str, origin: Origin | None = None) -> None:
    """Raises RecipeError if `path` is not a file. `label`: the path as the user wrote it; `origin`: its place."""
    if os.path.isfile(path):  # unlike Path.is_file, False for names that are invalid on any file system
        return
    beside = [one.name for one in path.parent.glob("*.toml")] if os.path.isdir(path.parent) else []
    if os.path.isdir(path):
        inside = ", ".join(sorted(one.name for one in path.glob("*.toml")))
        message, hints = f"`{label}` is a folder, not a recipe", [f"recipes in it: {inside}"] if inside else []
        if (path / "run.json").is_file():
            hints = [f"it is a run; to resume it: ddpforge runs resume {label}"]
    elif not os.path.isdir(path.parent):
        hints = unexpanded(label) or [f"there is no folder `{Path(label).parent}`"]
        message = f"no such recipe: `{label}`"
    else:
        message = f"no such recipe: `{label}`"
        hints = did_you_mean(path.stem, [name.removesuffix(".toml") for name in beside])
        hints = [hint.replace("`?", ".toml`?") for hint in hints] or not_there(path)
    if origin is None and path.stem in bundled():
        hints.append(f"`{path.stem}` without a path is a recipe that ships with ddpforge")

    key, place = ("extends", origin.place()) if origin else ("", None)
    raise RecipeError([Diagnostic(message, key, place, tuple(hints))])
