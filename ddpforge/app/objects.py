"""Components given as objects of Python: their part of the recipe, and a registry that returns them."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypedDict, Unpack
from weakref import WeakKeyDictionary

from ddpforge.app.object_mistakes import (
    check_list_of_callbacks,
    check_named_data,
    check_object,
    is_function,
    of_parameters,
)
from ddpforge.app.run import Outcome, RunOptions, run_loaded
from ddpforge.app.run import run as _run
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import is_installed
from ddpforge.components.registry import OBJECT, Registry
from ddpforge.errors import SetupError, UsageError
from ddpforge.recipe import LoadedRecipe, load_recipe
from ddpforge.recipe.call_mistakes import public, unknown_argument
from ddpforge.recipe.toml import Table
from ddpforge.runs.folder import RunFolder

__all__ = ["GivenObjects", "Objects", "name_of", "run", "train"]

run = public(_run)

_WORDS = re.compile(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])")
_RECORDED = (bool, int, float, str)


class Objects(TypedDict, total=False):
    """Objects that replace components of a recipe: instances, or functions that return them (classes, too).

    A dict as `train_data` has several sources by name, a dict as `eval_data` several evaluation sets. `optimizer` is a
    function of the parameters, `schedule` a function of the step.
    """

    model: Any
    task: Any
    train_data: Any
    eval_data: Any
    sampler: Any
    optimizer: Any
    schedule: Any
    strategy: Any
    callbacks: Sequence[Any]


_TABLES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "model": ("model", ("model",)),
    "task": ("task", ("task",)),
    "train_data": ("data", ("data", "train")),
    "eval_data": ("data", ("data", "eval")),
    "sampler": ("sampler", ("data", "sampler")),
    "optimizer": ("optimizer", ("optimizer",)),
    "schedule": ("schedule", ("schedule",)),
    "strategy": ("strategy", ("strategy",)),
}


@dataclass(frozen=True)
class GivenObjects:
    """Objects with their names in the recipe: `tables` is the part of the recipe, `components` what to load by name."""

    tables: Table
    components: Mapping[tuple[str, str], Callable[..., Any]]
    given: dict[tuple[str, ...], tuple[str, Any]]  # argument and object, by the table of the recipe

    @classmethod
    def of(cls, objects: Objects) -> GivenObjects:
        """Checks the objects and names them; raises UsageError for an object that cannot be used."""
        given = {name: value for name, value in objects.items() if value is not None}
        if unknown := sorted(given.keys() - Objects.__annotations__.keys()):
            raise unknown_argument(unknown[0], given[unknown[0]], [*_TABLES, "callbacks"])
        found = cls({}, {}, {})
        for name, (kind, path) in _TABLES.items():
            value = given.get(name)
            if isinstance(value, dict) and value and kind == "data":
                check_named_data(name, value)
                for key, one in value.items():
                    found._add(f"{name}[{key!r}]", kind, (*path, str(key)), one)
            elif value is not None:
                found._add(name, kind, path, value)
        callbacks: Any = given.get("callbacks", ())
        check_list_of_callbacks(callbacks)
        for one in callbacks:
            words = _WORDS.sub("_", _class_of(one).__name__).lower()
            number = sum(
                re.fullmatch(rf"{words}(_\d+)?", name) is not None for name in found.tables.get("callbacks", ())
            )
            found._add("callbacks", "callback", ("callbacks", f"{words}_{number + 1}" if number else words), one)
        return found

    def registry(self) -> Registry:
        """Returns the installed components, and these objects."""
        return Registry.installed().with_objects(self.components)

    def references(self) -> list[str]:
        """Returns changes to a recipe that name the objects by their modules, for processes that import them.

        Raises UsageError for an object that another process cannot import.
        """
        return [f"{'.'.join((*path, 'use'))}={_reference(path, *given)}" for path, given in self.given.items()]

    def import_folders(self) -> list[str]:
        """Returns the folders of the objects' modules, without those of installed packages."""
        found: dict[str, None] = {}
        for _, value in self.given.values():
            root = sys.modules.get(value.__module__.partition(".")[0])
            file = getattr(root, "__file__", None)
            if file and not is_installed(file):
                folder = Path(file).absolute().parent
                found[str(folder.parent if hasattr(root, "__path__") else folder)] = None
        return list(found)

    def sources(self) -> dict[str, bytes]:
        """Returns the code and the settings of the objects by the name of a file, to compare them at a resume.

        Code of installed packages is not included.
        """
        return {
            f"code/objects/{'.'.join(path)}.txt": _source(value).encode() for path, (_, value) in self.given.items()
        }

    @contextmanager
    def training(self, folder: RunFolder, *, fresh: bool) -> Iterator[None]:
        """Refuses a model that an attempt without a checkpoint has changed: the run would begin with other weights."""
        from torch import nn

        _, model = self.given.get(("model",), ("", None))
        if not isinstance(model, nn.Module):
            yield
            return
        status = None
        with suppress(SetupError):  # a damaged file
            status = folder.status()
        begun = bool(status and status["step"]) and not any(folder.checkpoints.glob("step-*"))
        if _TRAINED.get(model) == folder.path and begun and not fresh:
            raise UsageError(
                f"the model was trained by an earlier call, which ended without a checkpoint in {folder.path}: the run "
                "would begin with changed weights",
                hints=["build the model again", "or begin with its current weights: --fresh"],
            )
        _TRAINED[model] = folder.path
        yield

    def _add(self, argument: str, kind: str, path: tuple[str, ...], value: Any) -> None:
        check_object(argument, kind, value, path)
        table: Any = self.tables
        for key in path[:-1]:
            table = table.setdefault(key, {})
        use = name_of(value)
        # A name never depends on the other objects: an evaluation may get fewer of them than the run.
        if path[:2] == ("data", "eval") or len(path) == 3 or (kind, use) in self.components:
            use = f"{use} ({'.'.join(path[1:])})"
        table[path[-1]] = {"use": use}
        self.given[path] = argument, value
        components: Any = self.components
        if kind == "optimizer":
            value = _of_params(value)
        if kind == "task":
            value = _as_loss(value)
        components[kind, use] = value if _is_factory(kind, value) else _returning(value)


def name_of(value: Any) -> str:
    """Returns the name of an object in a recipe: "<object> mymodule.Net"."""
    owner = value if isinstance(value, type) or inspect.isfunction(value) else _class_of(value)
    return f"{OBJECT}{owner.__module__}.{owner.__qualname__}"


def _reference(path: tuple[str, ...], argument: str, value: Any) -> str:
    if not (isinstance(value, type) or inspect.isfunction(value)):
        raise UsageError(
            f"{argument} is an object of this process, which launch cannot send to the processes that it starts",
            hints=[
                f"give a class or a function in a module: {argument}=Name; the recipe sets its options",
                "or train in this process: ddpforge.train(…), or start this script by torchrun",
            ],
        )
    name = f"{value.__module__}:{value.__qualname__}"
    if value.__module__ == "__main__" or "<" in value.__qualname__:
        raise UsageError(
            f"{argument} is `{name}`, which other processes cannot import",
            hints=["move it to a file, e.g. parts.py, and import it: from parts import …"],
        )
    return json.dumps(name)


def _class_of(value: Any) -> Any:
    """Returns the class or function behind an object, a class, or a `functools.partial`."""
    value = getattr(value, "func", value)
    return value if isinstance(value, type) or inspect.isfunction(value) else type(value)


def _is_factory(kind: str, value: Any) -> bool:
    """True for a class, or a function that returns the component; False for the component itself."""
    if kind == "schedule":
        return isinstance(value, type) or next(iter(inspect.signature(value).parameters), "") in ("step", "horizon")
    return isinstance(value, type) or (is_function(value) and KINDS[kind].mismatch(value) is not None)


def _of_params(value: Any) -> Any:
    """Returns an optimizer's function whose first parameter is called `params`, as that of torch's classes is."""
    first, *others = of_parameters(value)
    if first.name == "params":
        return value

    def component(params: Any, **options: Any) -> Any:
        return value(params, **options)

    named = inspect.Parameter("params", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    own = [one.replace(kind=inspect.Parameter.KEYWORD_ONLY) for one in others]
    component.__signature__ = inspect.Signature([named, *own])  # type: ignore[attr-defined]
    component.__name__ = name_of(value)
    return component


def _as_loss(value: Any) -> Any:
    """Turns a loss of torch (an object such as `nn.HuberLoss()`), or a partial function, into a function of two.

    Other objects are returned unchanged.
    """
    from torch import nn

    if isinstance(value, nn.Module) and getattr(value, "reduction", None) in ("mean", "sum", "none"):
        from ddpforge.builtin.tasks.loss_function import LossFunction

        return LossFunction(value, reduction="sum" if value.reduction == "sum" else "mean", metrics=())
    if isinstance(value, partial) and inspect.isfunction(value.func):

        def loss(outputs: Any, targets: Any) -> Any:
            return value(outputs, targets)

        loss.__name__, loss.__module__ = value.func.__name__, value.func.__module__
        return loss
    return value


def _returning(value: Any) -> Callable[..., Any]:
    """Returns a component that has the arguments of the object's constructor as options, as far as they are known."""
    try:
        names = list(inspect.signature(type(value)).parameters)
    except ValueError:  # a class written in C
        names = []
    known = {name: getattr(value, name) for name in names if type(getattr(value, name, None)) in _RECORDED}

    def component(**options: Any) -> Any:
        for name, option in options.items():
            if option != known[name]:
                raise ValueError(f"{name} = {option!r}, but the object was made with {name} = {known[name]!r}")
        return value

    parameters = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=own, annotation=type(own))
        for name, own in known.items()
    ]
    component.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    component.__name__ = type(value).__name__
    return component


# ---------------------------------------------------------------------------------------------- code
_TRAINED: WeakKeyDictionary[Any, Path] = WeakKeyDictionary()
"""Models that this process has begun to train, with the folder of the run."""


def _source(value: Any) -> str:
    """Returns the code of an object's class or function, and its settings as far as they have a text."""
    from torch import nn

    owner, lines, own = _class_of(value), [], False
    with suppress(OSError, TypeError):
        if own := not is_installed(inspect.getfile(owner)):
            lines.append(inspect.getsource(owner))
    if inspect.isfunction(owner):
        cells = inspect.getclosurevars(owner).nonlocals
        lines += [f"{name} = {one!r}" for name, one in cells.items() if isinstance(one, _PLAIN)]
    if isinstance(value, partial):
        lines.append(f"{value.args!r} {value.keywords!r}")
    elif isinstance(value, nn.Module):
        lines.append(repr(value))
        settings = {} if own else vars(value)  # of a library's loss
        lines += [f"{name} = {one!r}" for name, one in settings.items() if isinstance(one, int | float | str)]
        lines += [f"{name} = {one.tolist()!r}" for name, one in value.named_buffers() if not own and one.numel() < 1000]
    return re.sub(r" at 0x[0-9a-f]+", "", "\n".join(lines))


_PLAIN = (bool, int, float, str, tuple, list, dict)


@public
def train(
    recipe: str | Path | Mapping[str, Any] | LoadedRecipe,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
    max_time: str | None = None,
    profile: str | None = None,
    **objects: Unpack[Objects],
) -> Outcome:
    """Trains a recipe whose components may be objects of Python. Call it on every rank, with equal objects.

        ddpforge.train("recipe.toml", model=Net(), train_data=data, callbacks=[Mine()])

    An object replaces the component of the recipe: `model`, `task`, `train_data`, `eval_data` (a dataset, or a dict of
    several by name), `sampler`, `optimizer` (a function of the parameters), `schedule` (a function of the step),
    `strategy`, and a list of `callbacks`. Each may be an instance, or a class or function that returns one; then the
    recipe may set its options. The recipe in the run's folder has the names of the objects. To resume, evaluate or load
    the run, give objects of the same classes.

    For the other arguments and errors see `run`. Raises UsageError for an object that cannot be used.
    """
    given = GivenObjects.of(objects)
    registry = given.registry()
    loaded = load_recipe(recipe, sets=sets, registry=registry, objects=given.tables)
    with loaded.locating(), given.training(RunFolder.of(loaded.recipe, out), fresh=fresh):
        return run_loaded(loaded, registry, RunOptions(out, fresh, allow_change, max_time, profile, given.sources()))
