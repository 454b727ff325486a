"""Finds the components to test, and the settings of their authors; see `settings`."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from ddpforge.components.installed import Entry
from ddpforge.components.kinds import KINDS
from ddpforge.components.local_code import is_local
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError, UsageError
from ddpforge.recipe.schema import VERSION, Component
from ddpforge.testing import fixtures
from ddpforge.testing.report import Breach, source_of
from ddpforge.testing.settings import SECTIONS, SETTINGS, find_settings, tables_of

__all__ = ["Case", "find_cases"]


@dataclass
class Case:
    """Component with its settings for tests; `settings` is its table, and `said` the path of the settings file."""

    kind: str
    use: str
    registry: Registry
    base: Path = Path()
    settings: dict[str, Any] = field(default_factory=dict)
    said: Path | None = None
    number: int = 0  # from 1, if there are several tables for one component

    @property
    def name(self) -> str:
        """Returns the component's name without its location."""
        return self.use.rpartition(":")[2]

    @property
    def label(self) -> str:
        """Returns the name, and the number of the table if there are several, for messages."""
        return f"{self.name}[{self.number}]" if self.number else self.name

    @cached_property
    def component(self) -> Callable[..., Any]:
        """Imports and returns the class or function; raises PluginError."""
        return self.registry.load(self.kind, self.use, self.base)

    @property
    def where(self) -> str:
        """Returns "file:line" of the component; its location or name if it cannot be imported."""
        try:
            return source_of(self.component)
        except PluginError as error:
            entry = getattr(error, "entry", None)
            return getattr(error, "where", None) or (entry.target if entry else self.use)

    def skipped(self, check: str) -> str | None:
        """Returns the author's reason to skip a check; None if the check is not skipped."""
        said = self.settings.get("skip", {})
        reason: str | None = said if isinstance(said, str) else said.get(check)
        return reason

    # -- building
    def build(self, **given: Any) -> Any:
        """Builds the component with its options, as from a recipe; raises Breach if options are missing or wrong."""
        try:
            return self._build(self.kind, {"use": self.use, **self.options()}, self.base, given)
        except ValidationError as error:
            raise self.lacking(error) from error

    def options(self) -> dict[str, Any]:
        """Returns the component's options from its settings; adds `lr` for an optimizer that requires it."""
        found = dict(self.settings.get("options", {}))
        fields = self.registry.options_model(self.kind, self.use, self.base).model_fields
        if self.kind == "optimizer" and "lr" in fields and fields["lr"].is_required():
            found.setdefault("lr", 0.01)
        return found

    def given(self) -> dict[str, Any]:
        """Returns values for the arguments that ddpforge passes to components of this kind."""
        return {name: example(self.settings) for name, example in KINDS[self.kind].given.items()}

    def companion(self, kind: str, **given: Any) -> Any:
        """Builds the component of another kind for tests of this one; raises Breach if that fails."""
        table = self.sections[kind]
        try:
            return self._build(kind, table, self.folder, given)
        except (PluginError, ValidationError, ValueError, TypeError) as error:
            raise self.lacking(error, kind) from error

    def _build(self, kind: str, table: Mapping[str, Any], base: Path, given: Mapping[str, Any]) -> Any:
        options = {key: value for key, value in table.items() if key not in ("use", *KINDS[kind].framework_keys)}
        base = base if _is_local(table) else Path()
        model = self.registry.options_model(kind, table["use"], base)
        valid = dict(model.model_validate_json(json.dumps(options)))
        return self.registry.build(kind, Component(use=table["use"], options=valid, base=base), **given)

    @property
    def folder(self) -> Path:
        """Returns the base folder of `./file.py:Name` in the settings."""
        return self.said.parent if self.said else self.base

    @cached_property
    def sections(self) -> dict[str, Any]:
        """Returns the sections of a recipe: those in the author's settings, and defaults for the others."""
        return fixtures.DEFAULTS | {key: self.settings[key] for key in SECTIONS if key in self.settings}

    def lacking(self, error: Exception, kind: str | None = None) -> Breach:
        """Returns a Breach for a component that could not be built, with the settings to write and their file."""
        what = f"a {kind} for its tests" if kind else "its options"
        if isinstance(error, ValidationError):
            facts = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        else:
            facts = str(error)
        example = self._example(kind) if isinstance(error, ValidationError) else ""
        return Breach(
            f"{what} in [{self.kind}.{self.name}] of {self.said or SETTINGS}",
            facts,
            where=str(self.said) if self.said else None,
            hints=[
                f"write {example or 'them'} below [{self.kind}.{self.name}] in"
                f" {self.said or f'a new file {SETTINGS} next to the component'}"
            ],
        )

    def _example(self, kind: str | None) -> str:
        from ddpforge.components.options_table import options_table

        if kind:
            return f'`{kind} = {{ use = "…", … }}`'
        rows = options_table(self.registry.options_model(self.kind, self.use, self.base))
        inner = ", ".join(f"{row.name} = {row.example}" for row in rows if row.default is None)
        return f"`options = {{ {inner} }}`" if inner else ""

    # -- a recipe of it
    def recipe(self, **changes: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the tables of a recipe that uses the component, with `changes` to its sections."""
        sections = dict(self.sections)
        component = {"use": self.use, **self.options()}
        tables: dict[str, Any] = {"recipe": VERSION, "name": "case", "callbacks": {}, "track": {"every": "1st"}}
        spec = KINDS[self.kind]
        if spec.key:
            pass  # a kind of devices: its name is in [train]
        elif spec.named_in:
            tables.setdefault(spec.named_in, {})[self.name.lower()] = component
        elif spec.listed_in:
            outer, key = spec.listed_in
            sections[outer] = {**sections[outer], key: [component]}
        else:
            sections[self.kind] = component
        data = {"train": sections["data"], "eval": sections["data"]}
        if "sampler" in sections:
            data["sampler"] = sections.pop("sampler")
        tables |= sections | {"data": data}
        tables["train"] = {"global_batch": 8, "length": "6st", "collective_timeout": "60s"} | dict(
            sections.get("train", {})
        )
        for section, values in changes.items():
            tables[section] = {**tables.get(section, {}), **values}
        return tables


def _is_local(value: Any) -> bool:
    """True if a table names code in a local file."""
    if isinstance(value, str):
        return ".py:" in value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(_is_local, values))


# ---------------------------------------------------------------------------------------------- finding them
def find_cases(target: str, *, kind: str | None = None, names: tuple[str, ...] = ()) -> list[Case]:
    """Returns the components of an installed distribution, of a file, or the single component `file.py:Name`.

    Raises UsageError if there is nothing to test.
    """
    registry = Registry.installed()
    path, _, attribute = target.partition(":")
    if path.endswith(".py"):
        cases = list(_of_file(Path(path), attribute, kind, registry))
    else:
        _check_groups(target)
        entries = [entry for entry in registry.entries() if _normal(entry.distribution) == _normal(target)]
        if not entries:
            raise _nothing_of(target, registry)
        cases = [case for entry in entries for case in _of_entry(entry, registry)]

    chosen = [case for case in cases if kind in (None, case.kind) and (not names or case.name in names)]
    if not chosen:
        known = ", ".join(sorted({f"{case.kind} {case.name}" for case in cases})) or "none"
        raise UsageError(f"`{target}` has no such component", hints=[f"it has: {known}"])
    return chosen


_HOOKS = tuple(  # not components
    f"ddpforge.{name}" for name in ("check", "command", "environment", "feature", "format", "observer")
)


def _groups(distribution: str) -> set[str] | None:
    """Returns the groups of a distribution's entry points; None if it is not installed."""
    try:
        return {point.group for point in metadata.distribution(distribution).entry_points}
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _check_groups(distribution: str) -> None:
    """Raises UsageError for entry points in an unknown group with a name that begins with ddpforge."""
    known = [f"ddpforge.{kind}" for kind in KINDS]
    for group in sorted(_groups(distribution) or ()):
        if group.startswith("ddpforge") and group not in (*known, *_HOOKS):
            near = get_close_matches(group, known, n=1)
            raise UsageError(
                f"`{distribution}` has entry points in the group `{group}`, which belongs to no kind of component",
                hints=[
                    *(f"did you mean `{name}`?" for name in near),
                    f"the groups are {', '.join(known)}",
                    "entry points are read when a package is installed: install it again after a change",
                ],
            )


def _nothing_of(distribution: str, registry: Registry) -> UsageError:
    if (groups := _groups(distribution)) is None:
        if Path(distribution).is_dir():
            return UsageError(
                f"{distribution} is a folder, not a distribution or a file",
                hints=["install it, and give the name in its pyproject.toml", "or give a file: `./parts.py`"],
            )
        owners = sorted({entry.distribution for entry in registry.entries() if entry.name == distribution})
        near = get_close_matches(distribution, {entry.distribution for entry in registry.entries()}, n=1)
        return UsageError(
            f"no distribution `{distribution}` is installed",
            hints=[
                *(f"for the component: ddpforge plugins test {owner} --name {distribution}" for owner in owners),
                *(f"did you mean `{name}`?" for name in near if not owners),
                "install it first, e.g. `pip install -e .`; to test a file, give its path, `./parts.py`",
            ],
        )
    ours = sorted(group for group in groups if group.startswith("ddpforge."))
    if ours and {*ours} <= {*_HOOKS}:
        return UsageError(
            f"`{distribution}` has no components to test, only {', '.join(ours)}",
            hints=["the kit tests components; docs/extend has an example of each other group"],
        )
    if ours:
        return UsageError(f"`{distribution}` is disabled by DDPFORGE_DISABLE_PLUGINS", hints=["unset this variable"])
    return UsageError(
        f"`{distribution}` is installed, but has no entry points for ddpforge",
        hints=[
            'declare components in its pyproject.toml: [project.entry-points."ddpforge.KIND"], NAME = "module:Name"',
            "entry points are read when a package is installed: install it again after a change",
        ],
    )


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def _of_entry(entry: Entry, registry: Registry) -> Iterator[Case]:
    single = Registry([entry])  # another distribution may register the same name
    everything = registry if len([e for e in registry.entries(entry.kind) if e.name == entry.name]) == 1 else None
    use = entry.name if everything else f"{entry.distribution}:{entry.name}"
    file = None
    with suppress(PluginError):  # the first check reports it
        single.load(entry.kind, entry.name)
        file = Path(str(sys.modules[entry.target.partition(":")[0]].__file__))
    yield from _with_settings(Case(entry.kind, use, registry), file, entry.name)


def _of_file(path: Path, attribute: str, kind: str | None, registry: Registry) -> Iterator[Case]:
    if not path.is_file():
        raise UsageError(f"there is no file {path}")
    base = path.resolve().parent
    use = f"./{path.name}"
    if attribute:
        names = [attribute]
    else:
        probe = registry.load("model", f"{use}:__class__", base)  # only to import the file; any attribute works
        del probe
        module = next(
            found
            for found in list(sys.modules.values())
            if getattr(found, "__file__", None) == str(path.resolve()) and is_local(found.__name__)
        )
        names = [
            name for name, value in vars(module).items()
            if callable(value) and not name.startswith("_") and getattr(value, "__module__", "") == module.__name__
        ]  # fmt: skip
    settings, _ = find_settings(path.resolve())
    found = False
    for name in names:
        declared = next((one for one in KINDS if name in settings.get(one, {})), None)
        its = declared or (kind if attribute and kind else _kind_of(registry, f"{use}:{name}", base)) or None
        if its:
            found = True
            yield from _with_settings(Case(its, f"{use}:{name}", registry, base), path.resolve(), name)
    if not found:
        raise UsageError(
            f"the kind of the components in {path} is not known",
            hints=[f"ddpforge plugins test {path}:Name --kind KIND", f"or name it in {SETTINGS}: [KIND.Name]"],
        )


def _kind_of(registry: Registry, use: str, base: Path) -> str | None:
    """Returns the kind of a class (by its base class or methods) or a function (by its parameters); None if unknown."""
    component: Any = registry.load("model", use, base)
    if isinstance(component, type):
        tells = [spec for spec in KINDS.values() if spec.derives(component)]
        tells += [spec for spec in KINDS.values() if spec.resembles(component)]
    else:
        parameters = inspect.signature(component).parameters
        tells = [spec for spec in KINDS.values() if spec.parameter in parameters]
    return tells[0].name if tells else None


def _with_settings(case: Case, file: Path | None, name: str) -> Iterator[Case]:
    """Yields a case for each table of the component's settings, or one without settings."""
    for table, said, number in tables_of(case.kind, name, file):
        yield Case(case.kind, case.use, case.registry, case.base, table, said, number)
