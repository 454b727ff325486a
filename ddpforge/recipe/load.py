"""Loads a recipe: builds a typed, validated Recipe from TOML files, `--set` and variables."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, is_dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, NoReturn

from ddpforge.components.registry import Registry
from ddpforge.errors import Diagnostic, ForgeError, RecipeError, SourceSpan, UsageError
from ddpforge.recipe.bundled import find_recipe
from ddpforge.recipe.compose import compose
from ddpforge.recipe.interpolate import escape, interpolate
from ddpforge.recipe.layers import Layers, map_strings, paths, strings
from ddpforge.recipe.report import KeyPath, dotted
from ddpforge.recipe.run_plan import BatchPlan, plan_batch
from ddpforge.recipe.schema import VERSION, Component, Recipe
from ddpforge.recipe.toml import Origin, Source, Table
from ddpforge.recipe.validate import local_file, validate


@dataclass(frozen=True)
class LoadedRecipe:
    """Valid recipe, the same as plain tables with all defaults, and the origin of each value."""

    recipe: Recipe
    tables: dict[str, Any]
    origins: Mapping[KeyPath, Origin]  # for every key in `tables`; an array has one origin
    source: Path
    text: str  # contents of `source`

    def dumps(self, files: Mapping[Path, str] | None = None) -> str:
        """Returns the recipe as one TOML text without `extends`, which loads to an equal Recipe.

        `files` maps each of `local_files` to its relative path in the text; by default the path from the folder of
        `source`.
        """
        import tomlkit  # here, because only this method needs it

        names = files or {file: os.path.relpath(file, self.source.absolute().parent) for file in self.local_files()}
        components = self.recipe.components()

        def written(path: KeyPath, text: str) -> str:
            file = _local_file(text, _owner(path, components))
            if file:
                text = f"./{names[file]}:{text.rpartition(':')[2]}"
            return escape(text)

        return tomlkit.dumps(map_strings(self.tables, written))

    def local_files(self) -> dict[Path, Path]:
        """Returns the absolute paths of code files that the recipe names as `./file.py:Name`, sorted.

        The value is the folder of the recipe that names the file.
        """
        components = self.recipe.components()
        owners = ((text, _owner(path, components)) for path, text in strings(self.tables))
        found = {file: owner.base.resolve() for text, owner in owners if owner and (file := _local_file(text, owner))}
        return dict(sorted(found.items()))

    def problem(self, key: KeyPath, message: str, *hints: str, trace: str = "") -> Diagnostic:
        """Returns a problem with the value of `key`, at its place: for checks that only a run can make."""
        written = (self.origins[key[:end]] for end in range(len(key), 0, -1) if key[:end] in self.origins)
        origin = next((origin for origin in written if origin.source), Origin())
        return Diagnostic(message, dotted(key), origin.place(), hints, trace)

    @contextmanager
    def locating(self) -> Iterator[None]:
        """Adds the place of its key in the recipe to an error that is raised inside and has none."""
        try:
            yield
        except ForgeError as error:
            if error.key and not error.place and not isinstance(error, RecipeError):
                error.place = self.problem(tuple(error.key.split(".")), error.message).place
            raise


def reject_text(name: str, value: Sequence[str]) -> None:
    """Raises UsageError if `value` is a string or a dict instead of a list: its letters or keys would be the items."""
    if isinstance(value, Mapping):
        pairs = [f"{key}={one}" for key, one in value.items()]
        raise UsageError(f"{name} is a dict, but must be a list", hints=[f"{name} = {pairs!r}"])
    if isinstance(value, str):
        raise UsageError(f"{name} is the string {value!r}, but must be a list", hints=[f"{name} = [{value!r}]"])
    if not isinstance(value, list | tuple) or any(not isinstance(one, str) for one in value):
        odd = (
            next((one for one in value if not isinstance(one, str)), value)
            if isinstance(value, list | tuple)
            else value
        )
        raise UsageError(f"{name} holds {_a(odd)}, but is a list of texts", hints=[f'{name} = ["…", "…"]'])


def load_recipe(
    source: str | Path | Mapping[str, Any] | LoadedRecipe,
    *,
    sets: Sequence[str] = (),
    registry: Registry | None = None,
    objects: Table | None = None,
) -> LoadedRecipe:
    """Loads a recipe under `sets` such as "train.length=5ep".

    `source` is a file, the bare name of a bundled recipe, a dict (its keys may be dotted), or a loaded recipe.
    `objects` are tables for the objects of Python that replace components. Imports the components of the recipe, for
    their options. Raises RecipeError with all problems.
    """
    reject_text("sets", sets)
    path, text = _found(source)
    layers, file = compose(path if text is None else text, sets, objects)
    problems, spoilt = interpolate(layers)
    recipe, tables, found = validate(layers, file.label, registry or Registry.installed())

    problems += [problem for problem in found if not problem.key.startswith(tuple(spoilt))]
    if problems or recipe is None:
        raise RecipeError(sorted(problems, key=lambda problem: _position(problem, file.label)))
    return LoadedRecipe(recipe, tables, _origins(tables, layers), path, file.text)


def _found(source: object) -> tuple[Path, Source | None]:
    """Returns the file of a recipe; for a dict or a loaded recipe also the text, and where the file would be."""
    if isinstance(source, LoadedRecipe):
        return source.source, Source(str(source.source), source.dumps(), source.source.absolute().parent)
    if isinstance(source, Mapping):
        return Path("recipe.toml"), Source("dict", as_toml(source), Path.cwd())
    if not isinstance(source, str | Path):
        raise_no_recipe(source)
    return find_recipe(source), None


def raise_no_recipe(source: object) -> NoReturn:
    """Raises UsageError for an object that is not a recipe."""
    message = f"a recipe is a path, a name, a dict or a loaded recipe, not {_a(source)}"
    raise UsageError(message, hints=[_as_recipe(source)])


def _as_recipe(source: object) -> str:
    """Returns a hint for an object that is not a recipe: how to make one of it."""
    if is_dataclass(source) and not isinstance(source, type):
        if type(source).__module__.startswith("transformers."):
            return "ddpforge recipes from-hf writes the recipe of TrainingArguments"
        return "make a dict of it: dataclasses.asdict(…), with the keys of a recipe"
    if type(source).__module__.startswith("omegaconf."):
        return "make a dict of it: OmegaConf.to_container(…), with the keys of a recipe"
    if type(source).__name__ in ("Namespace", "SimpleNamespace"):
        return "make a dict of it: vars(…), with the keys of a recipe"
    return "the recipe comes first, and objects by name: ddpforge.train(recipe, model=…)"


_ARGUMENTS = {
    "model": "model",
    "task": "task",
    "optimizer": "optimizer",
    "schedule": "schedule",
    "strategy": "strategy",
}


def _instead(value: Any, path: KeyPath) -> str:
    """Returns what to write in a recipe instead of an object of Python."""
    kind = type(value).__module__.partition(".")[0]
    if path[:2] == ("task", "metrics"):
        if callable(value) and not hasattr(type(value), "update"):  # a function, or a class
            return 'name its class: ["./file.py:Name"], derived from ddpforge.interfaces.Metric; or e.g. ["accuracy"]'
        use = f"{type(value).__module__}:{type(value).__name__}"
        return f'name each metric, e.g. ["accuracy"], or by its class: [{{"use": "{use}", …}}]'
    if isinstance(value, set | frozenset):
        return f"write a list: {sorted(map(str, value))}"
    if path[0] in _ARGUMENTS and len(path) == 1:
        return f"give objects by name: ddpforge.train(recipe, {path[0]}=…)"
    if path[:1] == ("data",) and len(path) == 2:
        return f"give objects by name: ddpforge.train(recipe, {path[1]}_data=…)"
    if path[:1] == ("callbacks",):
        return "give objects by name: ddpforge.train(recipe, callbacks=[…])"
    if isinstance(value, timedelta):
        return f'write a duration: "{value.total_seconds():g}s"'
    if kind == "torch" and type(value).__name__ in ("dtype", "device"):
        name = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}.get(
            str(value)[6:], str(value).partition(":")[0]
        )
        return f'write its name: "{name}"'
    if (hasattr(value, "item") and getattr(value, "size", None) in (1, ())) or getattr(value, "ndim", None) == 0:
        return f"write it as a number of Python: {value.item()!r}"
    return "a recipe holds numbers, texts, lists and tables"


def _a(value: object) -> str:
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"


def as_toml(recipe: Mapping[str, Any]) -> str:
    """Returns a recipe in a dict as TOML text; dotted keys are those of tables. Raises RecipeError for other values."""
    import tomlkit

    problems: list[Diagnostic] = []
    tables = _plain(recipe, (), problems)
    if problems:
        raise RecipeError(problems)
    return tomlkit.dumps({"recipe": VERSION} | tables)


def _plain(table: Mapping[Any, Any], path: KeyPath, problems: list[Diagnostic]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in table.items():
        *outer, last = key.split(".") if isinstance(key, str) else [str(key)]
        here = found
        for part in outer:
            here = here.setdefault(part, {})
        at = (*path, *outer, last)
        if isinstance(value, Mapping):
            here.setdefault(last, {}).update(_plain(value, at, problems))
        elif value is not None:
            here[last] = _item(value, at, problems)
    return found


def _item(value: Any, path: KeyPath, problems: list[Diagnostic]) -> Any:
    if isinstance(value, list | tuple):
        return [_item(one, (*path, index), problems) for index, one in enumerate(value)]
    if isinstance(value, Mapping):
        return _plain(value, path, problems)
    if isinstance(value, Path):
        return str(value)
    if type(value) not in (bool, int, float, str):
        hints = (_instead(value, path),)
        message = f"`{dotted(path)}` is {_a(value)}, which a recipe cannot hold"
        problems.append(Diagnostic(message, dotted(path), hints=hints))
        return ""
    return value


def check_world(loaded: LoadedRecipe, data_ranks: int) -> BatchPlan:
    """Plans the batches of a loaded recipe, as `plan_batch` does; its RecipeError points at `train.global_batch`."""
    return plan_batch(loaded.recipe.train, data_ranks, origin=loaded.origins[("train", "global_batch")])


def _position(problem: Diagnostic, file: str) -> tuple[bool, bool, str, int, int]:
    """Returns a sort key by place: first the recipe's file, then other files, then problems without a place."""
    place = problem.place or SourceSpan("")
    line, column = (0, 0) if place.file == "--set" else (place.line, place.column)
    return not place.line, place.file != file, place.file, line, column


def _origins(tables: dict[str, Any], layers: Layers) -> dict[KeyPath, Origin]:
    origins = {path: layers.origins.get(path, Origin()) for path in paths(tables)}
    for path in [path for path in origins if path[-1] == "use" and path not in layers.origins]:
        origins[path] = layers.origins.get(path[:-1], Origin())  # implied by the name of the table, e.g. [track.wandb]
    return origins


def _owner(path: KeyPath, components: Mapping[tuple[str, ...], Component]) -> Component | None:
    """Returns the component with `path` in its table; None if there is none."""
    return next((component for table, component in components.items() if path[: len(table)] == table), None)


def _local_file(text: str, owner: Component | None) -> Path | None:
    return local_file(text, owner.base) if owner and owner.base != Path() else None
