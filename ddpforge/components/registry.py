"""Lists installed components, and loads and builds a component by its name in a recipe. Imports happen on demand."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Never, Protocol, cast

from ddpforge.components.errors import (
    AmbiguousComponent,
    BrokenComponent,
    BuildFailed,
    MissingObject,
    NotImported,
    RefusedOptions,
    UnknownComponent,
    innermost,
    on_purpose,
    where_raised,
)
from ddpforge.components.installed import Entry, entries, normalised
from ddpforge.components.kinds import FUNCTION, KINDS, spec_of
from ddpforge.components.local_code import import_file, installed_path, is_beside_a_recipe, module_name
from ddpforge.errors import ExitCode, ForgeError, PluginError, leading_key, not_there, pip_install, says_memory_is_full
from ddpforge.secret_redaction import SECRET, redact, reveal

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["OBJECT", "PLUGIN_API", "NamedComponent", "Registry", "WrongKind", "build"]

PLUGIN_API = 3
"""Newest version of the component contracts that this ddpforge supports."""

OBJECT = "<object> "
"""Start of `use` for a component that was given as an object of Python, instead of by name."""

_ABSENT = object()


class NamedComponent(Protocol):
    """Component that a recipe names, with validated options; paths in them are relative to `base`."""

    @property
    def use(self) -> str:
        """Returns the registered name, or the location of the code."""

    @property
    def options(self) -> Mapping[str, Any]:
        """Returns the options that the recipe sets."""

    @property
    def base(self) -> Path:
        """Returns the folder of the recipe."""


class Registry:
    """Components that a recipe can name.

    `use` is, in this order: a registered name; `distribution:name`, which chooses one of several providers;
    `package.module:Name`; or `./file.py:Name`, relative to `base`, the folder of the recipe.
    """

    def __init__(
        self,
        entries: Iterable[Entry] = (),
        *,
        imports: Literal["all", "registered", "own"] = "all",
        objects: Mapping[tuple[str, str], Callable[..., Any]] = {},
    ) -> None:
        """Sets the code that may be imported; components outside `imports` accept any options.

        `objects` are components that exist already, by kind and `use`; each `use` begins with `OBJECT`.
        """
        self._entries = sorted(entries)
        self._imports = imports
        self._objects = objects

    def only_registered(self) -> Registry:
        """Returns a Registry that imports only registered components; others accept any options."""
        return Registry(self._entries, imports="registered")

    def only_own(self) -> Registry:
        """Returns a Registry that imports only ddpforge's own components; others accept any options."""
        return Registry(self._entries, imports="own")

    def with_objects(self, objects: Mapping[tuple[str, str], Callable[..., Any]]) -> Registry:
        """Returns a Registry with these components in addition, by kind and `use`."""
        return Registry(self._entries, imports=self._imports, objects=objects)

    @classmethod
    def installed(cls) -> Registry:
        """Returns the components of all installed distributions, except for those in DDPFORGE_DISABLE_PLUGINS."""
        return _installed(installed_path(), os.environ.get("DDPFORGE_DISABLE_PLUGINS", ""))

    def entries(self, kind: str | None = None) -> list[Entry]:
        """Returns all entries, or those of one kind, sorted; a name with several providers has several entries."""
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def names(self, kind: str) -> list[str]:
        """Returns the registered names of a kind, sorted."""
        return sorted({entry.name for entry in self.entries(kind)})

    def find(self, kind: str, use: str) -> Entry | None:
        """Returns the entry for `use`; None if `use` locates unregistered code.

        Raises UnknownComponent or AmbiguousComponent.
        """
        if use.startswith(OBJECT):
            return None
        owner, colon, name = use.rpartition(":")
        providers = [entry for entry in self.entries(kind) if entry.name == name]
        if colon:
            providers = [entry for entry in providers if normalised(entry.distribution) == normalised(owner)]

        if len(providers) > 1:
            raise AmbiguousComponent(kind, use, providers)
        if providers:
            return providers[0]
        if _is_file(use) or (colon and all(part.isidentifier() for part in owner.split("."))):
            return None
        raise UnknownComponent(kind, use, self.names(kind))

    def imports(self, kind: str, use: str) -> bool:
        """True if `load` may import the component `use`."""
        if self._imports == "all" or use.startswith(OBJECT):
            return True
        entry = self.find(kind, use)
        return entry is not None and (entry.is_own or self._imports == "registered")

    def load(self, kind: str, use: str, base: Path = Path()) -> Callable[..., Any]:
        """Imports the component; raises UnknownComponent, AmbiguousComponent, BrokenComponent or MissingObject."""
        entry = self.find(kind, use)
        if not self.imports(kind, use):
            raise NotImported(kind, use)
        if use.startswith(OBJECT):
            if (kind, use) not in self._objects:
                raise MissingObject(kind, use, [name for owner, name in self._objects if owner == kind])
            return cast(Callable[..., Any], KINDS[kind].adopt(self._objects[kind, use]))
        broken = partial(BrokenComponent, kind, use, entry=entry)
        if entry and entry.group:
            raise broken(
                f"is registered in the entry-point group `{entry.group}`, which is now `ddpforge.{kind}`",
                hints=["update the plugin; its author finds what to change in docs/extend/upgrade.md"],
            )
        location, _, attribute = (entry.target if entry else use).partition(":")
        if not attribute:
            raise broken("names a module without a class or function", hints=[f"write `{location}:Name`"])

        file = _local_file(location, base, broken) if _is_file(location) else None
        with _importing(location, file, None if entry else base, broken):
            if not file and is_beside_a_recipe(location):
                raise ModuleNotFoundError(f"No module named {location!r}", name=location.partition(".")[0])
            with without_warnings() if entry else nullcontext():  # those of the user's own code are shown
                module = import_file(file, base.resolve()) if file else importlib.import_module(location)
            component: object = module
            for name in attribute.split("."):
                component = getattr(component, name, _ABSENT)

        api = getattr(module, "ddpforge_plugin_api", PLUGIN_API)
        if not (isinstance(api, int) and api <= PLUGIN_API):
            raise broken(
                f"is written for plugin API {api}; this ddpforge supports version {PLUGIN_API}",
                hints=["update ddpforge, or install an older version of the plugin"],
            )
        if api < (needed := spec_of(kind).api):
            raise broken(
                f"is written for plugin API {api}; version {needed} changed the contract of this kind",
                hints=["update the plugin; for its author, docs/extend/upgrade.md lists the changes"],
            )
        if not hasattr(module, "ddpforge_plugin_api") and (old := _old_name(kind, component)):
            name, new = old
            raise broken(
                f"has `{name}`, which is `{new}` since plugin API 3",
                hints=[
                    f"rename it to `{new}`: docs/extend/upgrade.md lists all changes",
                    "if it is something else: write ddpforge_plugin_api = 3 in its module",
                ],
            )
        if component is _ABSENT:
            near = get_close_matches(attribute, dir(module), n=1)
            raise broken(
                f"cannot be found: {location} has no `{attribute}`",
                hints=[f"did you mean `{name}`?" for name in near],
            )
        if _is_built(component):
            raise broken(
                f"is an object of the class {type(component).__name__}, not a class",
                hints=_to_name(kind, location, attribute, component, module),
            )
        if not callable(component):
            raise broken(
                f"is a value of type `{type(component).__name__}`, which cannot be called",
                hints=_to_name(kind, location, attribute, component, module),
            )
        return cast(Callable[..., Any], spec_of(kind).adopt(component))

    def function(self, use: str, base: Path = Path()) -> Callable[..., Any]:
        """Imports the function of an option; one that may not be imported is refused where it is called."""
        try:
            return self.load(FUNCTION, use, base)
        except NotImported as error:
            return partial(_refuse, error)

    def options_model(self, kind: str, use: str, base: Path = Path()) -> type[BaseModel]:
        """Returns a pydantic model of the component's options, from its signature; raises as `load` does.

        Validate with `model_validate_json(json.dumps(table))`; then `dict(model)` is `Component.options`. A parameter
        that is another component takes a name, or a table with `use`. Errors inside it have their location there. If
        the inner component cannot be loaded, the error's type is "component", and `ctx["error"]` is the PluginError.
        """
        from ddpforge.components.options import any_options, options_model

        try:
            component = self.load(kind, use, base)
        except (NotImported, MissingObject):  # an object that is missing is an error where it is used
            return any_options()
        try:
            return options_model(component, frozenset(KINDS[kind].given), self, base)
        except PluginError as breach:
            hints = ["every option of a component is a keyword parameter with a type that TOML can write"]
            if kind == "schedule" and "optimizer" in inspect.signature(component).parameters:
                hints = [
                    f"schedulers of torch change an optimizer; ddpforge has schedules: {', '.join(self.names(kind))}",
                    "or name a function of the step that returns the factor of the learning rate",
                ]
            raise BrokenComponent(
                kind,
                use,
                breach.message,
                entry=self.find(kind, use),
                cause=breach.__cause__,
                hints=hints,
            ) from breach

    def takes(self, kind: str, component: NamedComponent, parameter: str) -> bool:
        """True if the component requires `parameter`; False if it may not be imported. Raises as `load` does."""
        if not self.imports(kind, component.use):
            return False
        found = inspect.signature(self.load(kind, component.use, component.base)).parameters.get(parameter)
        return found is not None and found.default is found.empty and found.kind is not found.VAR_KEYWORD

    def build(self, kind: str, component: NamedComponent, **given: Any) -> Any:
        """Calls the component with its validated options, and the values of `given` for its required parameters.

        A parameter with a default is an option of the component, and gets no value from `given`.

        Raises:
            RefusedOptions: The component itself raised a TypeError or ValueError.
            BuildFailed: Any other exception of the component, also sys.exit; it has the traceback.

        ForgeErrors and errors of full memory are raised unchanged.
        """
        function = self.load(kind, component.use, component.base)
        parameters = inspect.signature(function).parameters
        own = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}
        if taken := sorted((component.options.keys() & KINDS[kind].given.keys()) - own):
            raise PluginError(
                f"`{taken[0]}` is not an option of {kind} `{component.use}`: ddpforge passes it",
                hints=[f"remove `{taken[0]}` from the recipe"],
            )

        options = {name: self._build_nested(value, given) for name, value in component.options.items()}
        handed = {name: value for name, value in given.items() if name in parameters and name not in own}
        try:
            return function(**options, **handed)
        except SystemExit as error:  # would end the process with another exit code
            raise BuildFailed(kind, component.use, error) from error
        except (TypeError, ValueError) as error:
            if not on_purpose(error, function):
                raise BuildFailed(kind, component.use, error) from error
            message = f"{kind} `{component.use}` cannot be built: {redact(str(error))}"
            key = leading_key(str(error))
            at = key if key in component.options else ""
            hints = [*getattr(error, "__notes__", ()), *where_raised(error)]
            raise RefusedOptions(message, hints=hints, key=at) from error
        except ForgeError:
            raise
        except Exception as error:
            if says_memory_is_full(error):
                raise
            if isinstance(error, OSError) and error.filename and not where_raised(error):  # e.g. no permission
                message = f"{kind} `{component.use}`: {str(error.filename)[:200]}: {error.strerror}"
                raise PluginError(message, hints=not_there(os.fsdecode(error.filename))) from error
            raise BuildFailed(kind, component.use, error) from error

    def _build_nested(self, value: object, given: Mapping[str, Any]) -> object:
        from ddpforge.components.options import Nested

        match value:
            case str() if type(value) is str:
                return reveal(value)
            case Path():
                return Path(reveal(str(value))) if SECRET.search(str(value)) else value
            case Nested(kind="function"):
                return self.function(value.use, value.base)
            case Nested():
                handed = given.keys() & KINDS[value.kind].given.keys()
                return self.build(value.kind, value, **{name: given[name] for name in handed})
            case list():
                return [self._build_nested(item, given) for item in value]
            case tuple() if type(value) is tuple:  # not a NamedTuple
                return tuple(self._build_nested(item, given) for item in value)
            case dict():
                return {key: self._build_nested(item, given) for key, item in value.items()}
            case _:
                return value


def _refuse(error: NotImported, *_: Any, **__: Any) -> Never:
    raise error


def _to_name(kind: str, location: str, attribute: str, built: object, module: object) -> list[str]:
    """Returns hints for an object that a recipe names instead of a class or a function."""
    of = type(built)
    if of.__name__ == "DataLoader":
        return [f'name its dataset: write def dataset(): return {attribute}.dataset, and use = "{location}:dataset"']
    if kind == "optimizer":
        return ["name a function of the parameters, e.g. `torch.optim:SGD`, with its options in [optimizer]"]
    if kind == "task" and of.__module__.startswith("torch."):
        return ['name a task, or the function: use = "classification", use = "torch.nn.functional:cross_entropy"']
    if isinstance(built, str | int | float | type(None)):
        return []
    hints = [f'write a function that returns it, def build(): return {attribute}, and use = "{location}:build"']
    if getattr(module, of.__name__, None) is of and of.__module__ == getattr(module, "__name__", ""):
        hints.insert(0, f'write use = "{location}:{of.__name__}", if its constructor needs only options of the recipe')
    return hints


def _is_built(component: object) -> bool:
    """True for a module of torch, which can be called, but not to build it."""
    torch_nn = sys.modules.get("torch.nn")
    return torch_nn is not None and isinstance(component, torch_nn.Module)


def _old_name(kind: str, component: object) -> tuple[str, str] | None:
    """Returns an attribute of a class that plugin API 3 has renamed, and its name now; None if there is none."""
    # Without this check ddpforge would not call a method with an old name, and would train something else.
    renamed = spec_of(kind).renamed
    if not renamed or not isinstance(component, type) or component.__module__.startswith("ddpforge."):
        return None
    if kind == "data":
        from ddpforge.interfaces import ShardedDataset

        if not issubclass(component, ShardedDataset):
            return None
    if kind == "optimizer" and not hasattr(component, "passes"):
        return None
    own = [base for base in component.__mro__ if not base.__module__.startswith(("ddpforge.", "torch."))]
    return next(((old, new) for old, new in renamed.items() if any(old in vars(base) for base in own)), None)


@cache
def _installed(path: tuple[str, ...], disabled: str) -> Registry:
    left_out = {normalised(name) for name in disabled.split(",")}
    return Registry(entry for entry in entries(path) if normalised(entry.distribution) not in left_out)


# ---------------------------------------------------------------------------------------------- importing
@contextmanager
def without_warnings() -> Iterator[None]:
    """Suppresses warnings of libraries inside, logged or otherwise, e.g. while they are imported."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)


@contextmanager
def _importing(
    location: str, file: Path | None, base: Path | None, broken: Callable[..., BrokenComponent]
) -> Iterator[None]:
    """Converts any exception of a plugin's code during import into a BrokenComponent with its file and line.

    `base` is the folder of the recipe if the recipe names the location itself.
    """
    try:
        yield
    except (Exception, SystemExit) as cause:  # a script without a main guard exits
        where = innermost(cause, (module_name(file) if file else location).partition(".")[0])
        missing = cause.name if isinstance(cause, ModuleNotFoundError) else None
        if missing and "." in missing:
            missing = None  # the package is installed, in a version without this module
        raise broken(
            f"cannot be imported: {type(cause).__name__}: {cause}" + (f" ({where})" if where else ""),
            cause=cause,
            where=where,
            missing=missing,
            hints=_ways_to_provide(missing, location, file, base) if missing else (),
        ) from cause


_EXTRAS = {"torchmetrics": "metrics"}  # module to the extra of ddpforge that installs it


def _ways_to_provide(missing: str, location: str, file: Path | None, base: Path | None) -> list[str]:
    path = location.replace(".", "/") + ".py"
    if base and missing == location.partition(".")[0] and (base / path).is_file():
        return [f'name a file next to the recipe by its path: use = "./{path}:…"']
    if extra := _EXTRAS.get(missing):
        return [pip_install(extra)]
    return [f"install the package that provides the module `{missing}`"]


# ------------------------------------------------------------------------------------------------ local files
def _is_file(location: str) -> bool:
    """True if the location is a file, not a module."""
    return "/" in location or location.partition(":")[0].endswith(".py")


def _local_file(location: str, base: Path, broken: Callable[..., BrokenComponent]) -> Path:
    """Returns the path of a recipe's local file; it must be below `base`, also after links are resolved."""
    try:
        folder = base.resolve()
        file = (folder / location).resolve()
        there, is_file = file.exists(), file.is_file()
    except (OSError, RuntimeError, ValueError) as cause:  # a name too long, a loop of links, a null character
        raise broken(f"cannot be loaded: {cause}", cause=cause) from cause

    if not file.is_relative_to(folder):
        raise broken(
            f"is not in the recipe's folder {folder}",
            hints=["move the file next to the recipe, or install it as a package: `package.module:Name`"],
        )
    if not is_file or file.suffix != ".py":
        near = [f"did you mean `./{file.relative_to(folder)}.py:Name`?"] if file.with_suffix(".py").is_file() else []
        if not near and not there and file.parent.is_dir():
            beside = get_close_matches(file.name, [one.name for one in file.parent.glob("*.py")], n=1)
            near = [*(f"did you mean `./{(file.parent / one).relative_to(folder)}`?" for one in beside)]
        what = f"is not {'a Python file' if there else 'there'}"
        raise broken(f"cannot be loaded: {file} {what}", hints=near or ["write `./file.py:Name`"])
    return file


# ---------------------------------------------------------------------------------------------- building
class WrongKind(PluginError):
    """Error of a recipe: it names a component of another kind, or an object that is not a component."""

    exit_code = ExitCode.USAGE


def build(registry: Registry, kind: str, component: NamedComponent, **given: Any) -> Any:
    """Builds a component; raises WrongKind if the result is not of this kind, else as `Registry.build` does."""
    built = registry.build(kind, component, **given)
    if expected := KINDS[kind].mismatch(built):
        name = type(built).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        hints = ["see `ddpforge.interfaces` for the requirements of each kind"]
        if kind == "task" and getattr(built, "reduction", "") in ("mean", "sum", "none"):
            hints = ['for losses of torch, name the function, e.g. use = "torch.nn.functional:cross_entropy"']
        raise WrongKind(f"{kind} `{component.use}` is {article} {name}, and must be {expected}", hints=hints)
    return built
