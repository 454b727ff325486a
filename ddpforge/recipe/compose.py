"""Puts a recipe together from its file, the files that it extends, and `--set`."""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Sequence
from pathlib import Path

from ddpforge.errors import RecipeError
from ddpforge.recipe.bundled import require_file
from ddpforge.recipe.layers import Layers, Table
from ddpforge.recipe.origins import Origin, Source
from ddpforge.recipe.report import Problem, kind_of, printable
from ddpforge.recipe.toml import parse, read

_TOML_FOR_SURE = re.compile(r"[\"'\[{]|[-+]?\d+$")  # a --set value that is not meant as a bare word
_Chain = tuple[tuple[Path, str], ...]  # the files being read, outermost first, and their labels


def compose(path: Path, sets: Sequence[str]) -> tuple[Layers, Source]:
    """The tables of the recipe file `path` and all it extends, under `--set a.b=value`; and the file itself.

    Raises RecipeError with everything that cannot be read or parsed.
    """
    here = Path.cwd()
    label = str(path.relative_to(here) if path.is_relative_to(here) else path)
    layers, source = _file(path, label, ())

    assigned = Layers()
    problems: list[Problem] = []
    for text in sets:
        try:
            assigned.merge(_assignment(text), change_use=False)  # whatever their order, none undoes another
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    layers.merge(assigned)
    return layers, source


def _file(path: Path, label: str, chain: _Chain) -> tuple[Layers, Source]:
    source = read(path, label)
    table = parse(source)
    extends = table.pop("extends", [])
    names = extends if isinstance(extends, list) else [extends]
    chain = (*chain, (path.resolve(), label))

    layers = Layers()
    problems: list[Problem] = []
    for index, name in enumerate(names):
        try:
            layers.merge(_base(name, Origin(source, ("extends", index)), source, chain))
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)

    layers.merge(Layers.of(table, source))
    return layers, source


def _base(name: object, origin: Origin, source: Source, chain: _Chain) -> Layers:
    if not isinstance(name, str):
        message = f"`extends` must be a file name or an array of file names, not {kind_of(name)}"
        raise RecipeError([Problem(message, "extends", origin.place())])
    path = source.folder / name
    require_file(path, name, origin)

    label = os.path.normpath(os.path.join(os.path.dirname(source.label), name))
    seen = [one for one, _ in chain]
    if path.resolve() in seen:
        circle = [one for _, one in chain[seen.index(path.resolve()) :]]
        hint = " extends ".join([*circle, circle[0]])
        raise RecipeError([Problem("`extends` goes in a circle", "extends", origin.place(), (hint,))])
    return _file(path, label, chain)[0]


def _assignment(text: str) -> Layers:
    """The layer of one `--set`: its value is TOML, or a bare word that stands for a string."""
    source = Source("--set", text, Path.cwd())
    key, _, value = (part.strip() for part in text.partition("="))
    if not key or not value or not text.isprintable() or key.startswith("#"):
        hint = "write --set section.key=value, e.g. --set train.length=5ep"
        problem = Problem(f"`{printable(text)}` assigns nothing", "--set", source.at(0, len(text)), (hint,))
        raise RecipeError([problem])

    table: Table | None
    try:
        table = parse(source)
    except RecipeError:
        table = _bare_word(key, value)
        if table is None:
            raise
    if "extends" in table:
        problem = Problem("`extends` can be set only in a file", "extends", source.at(0, len(key)))
        raise RecipeError([problem])
    return Layers.of(table, source)


def _bare_word(key: str, value: str) -> Table | None:
    if _TOML_FOR_SURE.match(value):
        return None
    try:
        return tomllib.loads(f"{key} = {json.dumps(value, ensure_ascii=False)}")
    except ValueError:  # the key is what is wrong
        return None
