"""Writes a new plugin: a package with a component of one kind, a recipe, and passing tests."""

from __future__ import annotations

import importlib.util
import keyword
import re
from dataclasses import dataclass
from pathlib import Path
from string import Template

from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Registry
from ddpforge.errors import SetupError, UsageError

__all__ = ["Plugin", "write_plugin"]

_TEMPLATES = Path(__file__).parent / "templates" / "plugin"
_NAME = re.compile(r"[a-z](?:[a-z0-9]|[-_](?=[a-z0-9])){0,49}")
_PARTS = re.compile(r"^== (\S+) ==\n", re.MULTILINE)


@dataclass(frozen=True)
class Plugin:
    """Plugin that was written: its folder, the name of its distribution, and its files relative to the folder."""

    folder: Path
    distribution: str
    files: tuple[Path, ...]


def write_plugin(kind: str, name: str, into: Path) -> Plugin:
    """Writes the plugin for a component `name` into a new folder of that name.

    Raises UsageError if the name is already used, if it is not valid for a component, a package and a distribution,
    or if the folder exists. Raises SetupError if the folder cannot be written.
    """
    _check(kind, name)
    folder = into / name
    if folder.exists():
        raise UsageError(f"{folder} exists already", hints=["choose another name, or another place with --in DIR"])
    files = _files(kind, name)
    try:
        for path, text in files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error}") from error
    return Plugin(folder, name.replace("_", "-"), tuple(files))


def _check(kind: str, name: str) -> None:
    if kind not in KINDS:
        raise UsageError(f"there is no kind `{kind}`", hints=[f"one of: {', '.join(KINDS)}"])
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"`{name}` cannot be the name of a plugin",
            hints=["at most 50 lower-case letters, digits and single `_` or `-`, beginning with a letter: my_model"],
        )
    module = name.replace("-", "_")
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        raise UsageError(f"`{name}` is a keyword of Python", hints=[f"for example `{name}_{kind}`"])
    taken = [entry for entry in Registry.installed().entries(kind) if entry.name == module]
    if taken:
        raise UsageError(f"there is a {kind} `{module}` already, of {taken[0].source}", hints=["choose another name"])
    if importlib.util.find_spec(module) is not None:
        raise UsageError(
            f"there is already a Python module `{module}`; a package of the same name would hide it or be hidden",
            hints=[f"for example `my_{module}`"],
        )


def _files(kind: str, name: str) -> dict[Path, str]:
    """Returns the contents of the files by their path in the plugin's folder."""
    module = name.replace("-", "_")
    words = {
        "kind": kind,
        "name": module,
        "module": module,
        "distribution": name.replace("_", "-"),
        "Class": "".join(part.capitalize() for part in module.split("_")),
    }
    own = _parts((_TEMPLATES / "kinds" / KINDS[kind].template).read_text(encoding="utf-8"))
    words["target"] = Template(own.pop("target").strip()).substitute(words)
    texts = _parts((_TEMPLATES / "common.txt").read_text(encoding="utf-8")) | own
    return {Path(Template(path).substitute(words)): Template(text).substitute(words) for path, text in texts.items()}


def _parts(text: str) -> dict[str, str]:
    """Splits a template into its files; the path of each is in the line `== PATH ==` before it."""
    _, *pieces = _PARTS.split(text)
    return {path: body.strip("\n") + "\n" for path, body in zip(pieces[::2], pieces[1::2], strict=True)}
