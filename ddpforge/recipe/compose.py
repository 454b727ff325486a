"""Composes a recipe from its file, the files that it extends, and `--set`."""

from __future__ import annotations

import copy
import json
import os
import re
import shlex
import tomllib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from ddpforge.errors import Diagnostic, RecipeError, SourceSpan
from ddpforge.recipe.bundled import bundled, require_file
from ddpforge.recipe.layers import Layers, inside, paths
from ddpforge.recipe.report import KeyPath, did_you_mean, dotted, kind_of, printable
from ddpforge.recipe.schema import VERSION
from ddpforge.recipe.toml import Origin, Source, Table, parse, read, toml_value
from ddpforge.recipe.upgrade import RESOLVED, is_old, upgraded_or_same

_TOML_FOR_SURE = re.compile(r"[\"'\[{]|[-+]?\d+$")  # a --set value that cannot be a bare word
_MOST_FILES = 256  # maximum files with repetitions: 16 levels that extend the next one twice would read 65,536 files
_Chain = tuple[tuple[Path, str], ...]  # files that are being read, outermost first, and their labels


class _Files:
    """Reader of the files of one recipe; limits their number."""

    def __init__(self) -> None:
        self._read = 0

    def read(self, path: Path, label: str) -> Source:
        """Reads one more file; raises _TooManyFiles at the limit."""
        self._read += 1
        if self._read > _MOST_FILES:
            message = f"this recipe extends more than {_MOST_FILES} files, counting each as often as it is extended"
            raise _TooManyFiles([Diagnostic(message, "extends", SourceSpan(label), ("extend each file once",))])
        return read(path, label)


class _TooManyFiles(RecipeError):
    """Error for too many files; reported once only."""


def compose(recipe: Path | Source, sets: Sequence[str], objects: Table | None = None) -> tuple[Layers, Source]:
    """Merges a recipe's file or text, all files that it extends, `objects`, and `--set`; also returns the text.

    `objects` are tables for the objects of Python that replace components. Raises RecipeError with all errors of
    reading and parsing.
    """
    if isinstance(recipe, Source):
        layers, source = _composed(recipe, (), _Files())
    else:
        here = Path.cwd()
        label = str(recipe.relative_to(here) if recipe.is_relative_to(here) else recipe)
        layers, source = _file(recipe, label, (), _Files())
    if objects:
        layers.merge(Layers.of(copy.deepcopy(objects), Source("objects", "")))

    own = Layers()
    problems: list[Diagnostic] = []
    for text in sets:
        try:
            if text.startswith("~"):
                problems += _unset(layers, _removal(text))
            else:
                own.merge(_assignment(text), change_use=False)  # the order of --set options does not matter
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)
    layers.merge(own)
    return layers, source


def _file(path: Path, label: str, chain: _Chain, files: _Files) -> tuple[Layers, Source]:
    source = files.read(path, label)
    if path.name == RESOLVED:
        source = replace(source, text=upgraded_or_same(source))
    return _composed(source, (*chain, (path.resolve(), label)), files)


def _composed(source: Source, chain: _Chain, files: _Files) -> tuple[Layers, Source]:
    """Merges a recipe's text and the files that it extends; `chain` ends with its own file."""
    table = parse(source)
    extends = table.pop("extends", [])
    names = extends if isinstance(extends, list) else [extends]

    layers = Layers()
    problems: list[Diagnostic] = []
    for index, name in enumerate(names):
        try:
            layers.merge(_base(name, Origin(source, ("extends", index)), source, chain, files))
        except _TooManyFiles:
            raise
        except RecipeError as error:
            problems += error.problems
    if is_old(table):  # report each file of version 1, and nothing else
        raise RecipeError([_old(source), *(problem for problem in problems if problem.key == "recipe")])
    if problems:
        raise RecipeError(problems)

    own = Layers.of(table, source)
    problems += [*_unset(layers, own), *_idle(layers, own)]
    if problems:
        raise RecipeError(problems)
    layers.merge(own)
    return layers, source


def _old(source: Source) -> Diagnostic:
    message = f"this recipe is of version 1, and this ddpforge reads version {VERSION}"
    hints = (f"ddpforge recipes upgrade {shlex.quote(source.label)}", "it renames keys, and keeps comments")
    return Diagnostic(message, "recipe", source.place(("recipe",)), hints)


def _unset(layers: Layers, own: Layers) -> list[Diagnostic]:
    """Removes the keys in `unset` of the next layer from `layers`, and the key `unset` itself."""
    names = own.tables.get("unset", [])
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        message = f'`unset` must be an array of keys, such as ["callbacks.ema"], not {kind_of(names)}'
        return [Diagnostic(message, "unset", own.origin(("unset",)).place())]
    problems = []
    origins = [own.origin(("unset", index)) for index in range(len(names))]
    own.unset(("unset",))
    for name, origin in zip(names, origins, strict=True):
        path = _path(name)
        if path is None or not layers.unset(path):
            known = [dotted(one) for one in paths(layers.tables)]
            message = f"`unset`: there is no `{printable(name)}` to remove"
            hints = (*did_you_mean(name, known), "it removes keys of the extended recipes; --set ~KEY, of all files")
            problems.append(Diagnostic(message, "unset", origin.place(), hints))
    return problems


def _path(name: str) -> KeyPath | None:
    """Parses `name` as a TOML key; returns None if it is not one."""
    try:
        *_, path = paths(tomllib.loads(f"{name} = 0"))
    except (ValueError, RecursionError):
        return None
    return path


def _idle(layers: Layers, own: Layers) -> list[Diagnostic]:
    """Reports empty inline tables (`{}`) over tables with keys: the user probably meant to remove these keys."""
    return [
        Diagnostic(
            f"`{dotted(path)}` is empty, and removes nothing from the table that this recipe extends",
            dotted(path),
            own.origin(path).place(key=True),
            (f'to remove it, write unset = ["{dotted(path)}"] at the top of the recipe',),
        )
        for path in paths(own.tables)
        if inside(own.tables, path) == {} and _is_inline(own.origin(path)) and _has(layers.tables, path)
    ]


def _is_inline(origin: Origin) -> bool:
    """True if an empty table is written `{}`; False for a header without keys."""
    place = origin.place()
    return place is not None and place.text[place.column - 1 :].startswith("{")


def _has(table: Table, path: KeyPath) -> bool:
    try:
        return bool(inside(table, path))
    except (KeyError, TypeError):
        return False


def _removal(text: str) -> Layers:
    """Builds the layer of `--set ~KEY`."""
    source = Source("--set", text, Path.cwd())
    if not text[1:] or "=" in text:
        hint = "write --set ~section.key, e.g. --set ~callbacks.ema"
        raise RecipeError([Diagnostic(f"`{printable(text)}` names no key", "--set", source.at(0, len(text)), (hint,))])
    table: Table = {"unset": [text[1:]]}
    return Layers.of(table, Source("--set", f"unset = [{json.dumps(text[1:], ensure_ascii=False)}]", source.folder))


def _base(name: object, origin: Origin, source: Source, chain: _Chain, files: _Files) -> Layers:
    if not isinstance(name, str):
        message = f"`extends` must be a file name or an array of file names, not {kind_of(name)}"
        raise RecipeError([Diagnostic(message, "extends", origin.place())])
    path = source.folder / name
    label = os.path.normpath(os.path.join(os.path.dirname(source.label), name))
    if not os.path.isfile(path) and name in bundled():
        path = bundled()[name]
        label = str(path)
    require_file(path, name, origin)

    seen = [one for one, _ in chain]
    if path.resolve() in seen:
        circle = [one for _, one in chain[seen.index(path.resolve()) :]]
        hint = " extends ".join([*circle, circle[0]])
        raise RecipeError([Diagnostic("`extends` is circular", "extends", origin.place(), (hint,))])
    return _file(path, label, chain, files)[0]


def assigned(text: str) -> Table:
    """Parses KEY=VALUE of the command line to a table; raises RecipeError for any other text."""
    return _assignment(text).tables


def _assignment(text: str) -> Layers:
    """Builds the layer of one `--set`: its value is TOML, or a bare word (a string without quotes)."""
    source = Source("--set", text, Path.cwd())
    key, _, value = (part.strip() for part in text.partition("="))
    if not key or not value or not text.isprintable() or key[:1] in ("#", "+"):
        hint = "write --set section.key=value, e.g. --set train.length=5ep"
        if key[:1] == "+" and value:
            hint = f"a key needs no + to be added: {text.lstrip('+')}"
        problem = Diagnostic(f"`{printable(text)}` is not KEY=VALUE", "--set", source.at(0, len(text)), (hint,))
        raise RecipeError([problem])

    table: Table | None
    try:
        table = parse(source)
    except RecipeError:
        table = _bare_word(key, value)
        if table is None:
            raise
    for name in ("extends", "unset"):
        if name in table:
            hints = ("write --set ~section.key",) if name == "unset" else ()
            raise RecipeError([Diagnostic(f"`{name}` can be set only in a file", name, source.at(0, len(key)), hints)])
    return Layers.of(table, source)


def _bare_word(key: str, value: str) -> Table | None:
    if _TOML_FOR_SURE.match(value):
        return None
    try:
        return tomllib.loads(f"{key} = {toml_value(value)}")
    except ValueError:  # the key is wrong
        return None
