"""Lists the components there are, and turns a recipe's name into one; nothing is imported until asked for."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from ddpforge.components.errors import (
    AmbiguousComponent,
    BrokenComponent,
    BuildFailed,
    NotImported,
    RefusedOptions,
    UnknownComponent,
    on_purpose,
    where_raised,
)
from ddpforge.components.installed import Entry, entries, normalised
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import import_file, module_name
from ddpforge.confidential import SECRET, redact, reveal
from ddpforge.errors import ExitCode, PluginError, leading_key

if TYPE_CHECKING:
    from pydantic import BaseModel

__all__ = ["PLUGIN_API", "NamedComponent", "Registry", "WrongKind", "build"]

PLUGIN_API = 3
"""The newest version of the component contracts that this ddpforge keeps."""

_ABSENT = object()


class NamedComponent(Protocol):
    """A component that a recipe names, with its options, validated; paths in them are relative to `base`."""

    @property
    def use(self) -> str:
        """Its name, or where it is."""

    @property
    def options(self) -> Mapping[str, Any]:
        """The options that the recipe sets."""

    @property
    def base(self) -> Path:
        """The folder of the recipe."""


class Registry:
    """The components that can be named in a recipe.

    `use` is, in this order: a registered name; `distribution:name`, which decides between several providers;
    `package.module:Name`; or `./file.py:Name`, relative to `base`, the folder of the recipe that says it.
    """

    def __init__(self, entries: Iterable[Entry] = (), *, imports: Literal["all", "registered", "own"] = "all") -> None:
        """`imports` is the code that is ever imported; any other takes any options."""
        self._entries = sorted(entries)
        self._imports = imports

    def only_registered(self) -> Registry:
        """The same, which imports no code that a recipe locates by a file or a module: it takes any options."""
        return Registry(self._entries, imports="registered")

    def only_own(self) -> Registry:
        """The same, which imports ddpforge's own components alone: those of plugins take any options, too."""
        return Registry(self._entries, imports="own")

    @classmethod
    def installed(cls) -> Registry:
        """All that installed distributions register, except for those named in DDPFORGE_DISABLE_PLUGINS."""
        return _installed(tuple(sys.path), os.environ.get("DDPFORGE_DISABLE_PLUGINS", ""))

    def entries(self, kind: str | None = None) -> list[Entry]:
        """All entries, or those of one kind, sorted; a name with several providers appears once for each."""
        return [entry for entry in self._entries if kind in (None, entry.kind)]

    def names(self, kind: str) -> list[str]:
        """The registered names of a kind, sorted."""
        return sorted({entry.name for entry in self.entries(kind)})

    def find(self, kind: str, use: str) -> Entry | None:
        """The entry that `use` names; None when it locates unregistered code.

        Raises UnknownComponent or AmbiguousComponent.
        """
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
        """True if `load` imports what `use` names."""
        if self._imports == "all":
            return True
        entry = self.find(kind, use)
        return entry is not None and (entry.is_own or self._imports == "registered")

    def load(self, kind: str, use: str, base: Path = Path()) -> Callable[..., Any]:
        """Imports the component; raises UnknownComponent, AmbiguousComponent or BrokenComponent."""
        entry = self.find(kind, use)
        if not self.imports(kind, use):
            raise NotImported(kind, use)
        broken = partial(BrokenComponent, kind, use, entry=entry)
        if entry and entry.group:
            raise broken(
                f"is registered in the entry-point group `{entry.group}`, which is now `ddpforge.{kind}`",
                hints=["update the plugin; its author finds what to change in docs/how-to/upgrade.md"],
            )
        location, _, attribute = (entry.target if entry else use).partition(":")
        if not attribute:
            raise broken("names a module, not what to use of it", hints=[f"write `{location}:Name`"])

        file = _local_file(location, base, broken) if _is_file(location) else None
        with _importing(location, file, None if entry else base, broken):
            module = import_file(file) if file else importlib.import_module(location)
            component: object = module
            for name in attribute.split("."):
                component = getattr(component, name, _ABSENT)

        api = getattr(module, "ddpforge_plugin_api", PLUGIN_API)
        if not (isinstance(api, int) and api <= PLUGIN_API):
            raise broken(
                f"is written for plugin API {api}; this ddpforge keeps version {PLUGIN_API}",
                hints=["update ddpforge, or install an older version of the plugin"],
            )
        if api < (needed := KINDS[kind].api):
            raise broken(
                f"is written for plugin API {api}; since version {needed} there is another contract for this kind",
                hints=["update the plugin; its author finds what to change in docs/how-to/upgrade.md"],
            )
        if component is _ABSENT:
            near = get_close_matches(attribute, dir(module), n=1)
            raise broken(
                f"cannot be found: {location} has no `{attribute}`",
                hints=[f"did you mean `{name}`?" for name in near],
            )
        if not callable(component):
            raise broken(f"is a value of type `{type(component).__name__}`, which cannot be called")
        return cast(Callable[..., Any], KINDS[kind].adopt(component))

    def options_model(self, kind: str, use: str, base: Path = Path()) -> type[BaseModel]:
        """The schema of a component's options, made from its signature; raises what `load` raises.

        Validate with `model_validate_json(json.dumps(table))`; `dict(model)` is then what `Component.options`
        holds. A parameter that asks for another component takes a name or a table with `use`. What is wrong
        inside is located there; where the inner component cannot be loaded, the error's type is "component"
        and its `ctx["error"]` the PluginError.
        """
        from ddpforge.components.options import any_options, options_model

        try:
            component = self.load(kind, use, base)
        except NotImported:
            return any_options()
        try:
            return options_model(component, frozenset(KINDS[kind].given), self, base)
        except PluginError as breach:
            raise BrokenComponent(
                kind,
                use,
                breach.message,
                entry=self.find(kind, use),
                cause=breach.__cause__,
                hints=["every option of a component is a keyword parameter with a type that TOML can write"],
            ) from breach

    def build(self, kind: str, component: NamedComponent, **given: Any) -> Any:
        """Calls the component with its validated options, and with those of `given` that it has a parameter for.

        A parameter of that name which has a default is the component's own option, and gets no value of `given`.

        Raises RefusedOptions when the component refuses its options, with a TypeError or ValueError that it raises
        itself, and BuildFailed for such an error from elsewhere and for a sys.exit; any other exception of its own
        passes.
        """
        function = self.load(kind, component.use, component.base)
        parameters = inspect.signature(function).parameters
        own = {name for name, parameter in parameters.items() if parameter.default is not parameter.empty}
        if taken := sorted((component.options.keys() & KINDS[kind].given.keys()) - own):
            raise PluginError(
                f"`{taken[0]}` is not an option of {kind} `{component.use}`: ddpforge hands it over",
                hints=[f"remove `{taken[0]}` from the recipe"],
            )

        options = {name: self._build_nested(value, given) for name, value in component.options.items()}
        handed = {name: value for name, value in given.items() if name in parameters and name not in own}
        try:
            return function(**options, **handed)
        except SystemExit as error:  # would end the process with an exit code of its own
            raise BuildFailed(kind, component.use, error) from error
        except (TypeError, ValueError) as error:
            if not on_purpose(error, function):
                raise BuildFailed(kind, component.use, error) from error
            message = f"{kind} `{component.use}` cannot be built: {redact(str(error))}"
            key = leading_key(str(error))
            at = key if key in component.options else ""
            raise RefusedOptions(message, hints=where_raised(error), key=at) from error

    def _build_nested(self, value: object, given: Mapping[str, Any]) -> object:
        from ddpforge.components.options import Nested

        match value:
            case str() if type(value) is str:
                return reveal(value)
            case Path():
                return Path(reveal(str(value))) if SECRET.search(str(value)) else value
            case Nested():
                handed = given.keys() & KINDS[value.kind].given.keys()
                return self.build(value.kind, value, **{name: given[name] for name in handed})
            case list():
                return [self._build_nested(item, given) for item in value]
            case tuple() if type(value) is tuple:  # not a NamedTuple, which is a value of its own
                return tuple(self._build_nested(item, given) for item in value)
            case dict():
                return {key: self._build_nested(item, given) for key, item in value.items()}
            case _:
                return value


@cache
def _installed(path: tuple[str, ...], disabled: str) -> Registry:
    left_out = {normalised(name) for name in disabled.split(",")}
    return Registry(entry for entry in entries(path) if normalised(entry.distribution) not in left_out)


# ---------------------------------------------------------------------------------------------- importing
@contextmanager
def _importing(
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
def _is_file(location: str) -> bool:
    """True if a recipe locates a file, not a module."""
    return "/" in location or location.partition(":")[0].endswith(".py")


def _local_file(location: str, base: Path, broken: Callable[..., BrokenComponent]) -> Path:
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


# ---------------------------------------------------------------------------------------------- building
class WrongKind(PluginError):
    """A recipe names something that is no component of the kind that belongs there: the recipe's fault."""

    exit_code = ExitCode.USAGE


def build(registry: Registry, kind: str, component: NamedComponent, **given: Any) -> Any:
    """The component, built; raises PluginError also when it is not of its kind."""
    built = registry.build(kind, component, **given)
    if expected := KINDS[kind].mismatch(built):
        name = type(built).__name__
        article = "an" if name[:1].lower() in "aeiou" else "a"
        raise WrongKind(
            f"{kind} `{component.use}` is {article} {name}, and must be {expected}",
            hints=["`ddpforge.interfaces` says what a component of each kind must be"],
        )
    return built
