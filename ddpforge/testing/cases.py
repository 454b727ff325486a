"""Finds the components to test, with what it takes to try each; see `settings` for what authors say of that."""

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
from ddpforge.components.local_code import PREFIX
from ddpforge.components.registry import Registry
from ddpforge.errors import PluginError, UsageError
from ddpforge.recipe.schema import VERSION, Component
from ddpforge.testing import companions
from ddpforge.testing.report import Breach, source_of
from ddpforge.testing.settings import SECTIONS, SETTINGS, find_settings, tables_of

__all__ = ["Case", "find_cases"]


@dataclass
class Case:
    """One component with what it takes to try it; `settings` is its table, and `said` the file that it is in."""

    kind: str
    use: str
    registry: Registry
    base: Path = Path()
    settings: dict[str, Any] = field(default_factory=dict)
    said: Path | None = None
    number: int = 0  # of several tables for one component

    @property
    def name(self) -> str:
        """The component as its author calls it."""
        return self.use.rpartition(":")[2]

    @property
    def label(self) -> str:
        """The component, and which of its tables, for people."""
        return f"{self.name}[{self.number}]" if self.number else self.name

    @cached_property
    def component(self) -> Callable[..., Any]:
        """The class or function; raises PluginError."""
        return self.registry.load(self.kind, self.use, self.base)

    @property
    def where(self) -> str:
        """ "file:line" of the component, or what it is called where it cannot be imported."""
        try:
            return source_of(self.component)
        except PluginError as error:
            entry = getattr(error, "entry", None)
            return getattr(error, "where", None) or (entry.target if entry else self.use)

    def skipped(self, check: str) -> str | None:
        """The author's reason for leaving a check out; None if it is made."""
        said = self.settings.get("skip", {})
        reason: str | None = said if isinstance(said, str) else said.get(check)
        return reason

    # -- building
    def build(self, **given: Any) -> Any:
        """The component with its options, as a recipe would build it."""
        try:
            return self._build(self.kind, {"use": self.use, **self.options()}, self.base, given)
        except ValidationError as error:
            raise self.lacking(error) from error

    def options(self) -> dict[str, Any]:
        """The component's own options."""
        found = dict(self.settings.get("options", {}))
        fields = self.registry.options_model(self.kind, self.use, self.base).model_fields
        if self.kind == "optimizer" and "lr" in fields and fields["lr"].is_required():
            found.setdefault("lr", 0.01)
        return found

    def given(self) -> dict[str, Any]:
        """The arguments that ddpforge hands over to components of this kind, to try it with."""
        return {name: example(self.settings) for name, example in KINDS[self.kind].given.items()}

    def companion(self, kind: str, **given: Any) -> Any:
        """The component of another kind that goes with this one."""
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
        """The folder that `./file.py:Name` in the settings is relative to."""
        return self.said.parent if self.said else self.base

    @cached_property
    def sections(self) -> dict[str, Any]:
        """The recipe's sections that the author named, and defaults for the others."""
        return companions.DEFAULTS | {key: self.settings[key] for key in SECTIONS if key in self.settings}

    def lacking(self, error: Exception, kind: str | None = None) -> Breach:
        """Tells what to write, and where, when the component could not be built for want of options."""
        what = f"the {kind} to try it with" if kind else "its options"
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
                f" {self.said or f'a new file {SETTINGS} beside the component'}"
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
        """The tables of a recipe that uses the component, with `changes` to its sections."""
        sections = dict(self.sections)
        component = {"use": self.use, **self.options()}
        tables: dict[str, Any] = {"recipe": VERSION, "name": "case", "callbacks": {}, "track": {"every": "1st"}}
        spec = KINDS[self.kind]
        if spec.named_in:
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
    """True if a table names code in a file beside it."""
    if isinstance(value, str):
        return ".py:" in value
    values = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return any(map(_is_local, values))


# ---------------------------------------------------------------------------------------------- finding them
def find_cases(target: str, *, kind: str | None = None, names: tuple[str, ...] = ()) -> list[Case]:
    """The components of an installed distribution, of a file, or the one that `file.py:Name` is.

    Raises UsageError where there is nothing to test.
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


def _groups(distribution: str) -> set[str] | None:
    """The groups of its entry points; None where it is not installed."""
    try:
        return {point.group for point in metadata.distribution(distribution).entry_points}
    except (metadata.PackageNotFoundError, ValueError):
        return None


def _check_groups(distribution: str) -> None:
    """Raises UsageError for entry points that look like ddpforge's and that nobody reads."""
    known = [f"ddpforge.{kind}" for kind in KINDS]
    for group in sorted(_groups(distribution) or ()):
        if group.startswith("ddpforge") and group not in known:
            near = get_close_matches(group, known, n=1)
            raise UsageError(
                f"`{distribution}` has entry points in the group `{group}`, which is that of no kind of component",
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
                hints=["install it, and give its name, that in its pyproject.toml", "or give a file: `./parts.py`"],
            )
        owners = sorted({entry.distribution for entry in registry.entries() if entry.name == distribution})
        near = get_close_matches(distribution, {entry.distribution for entry in registry.entries()}, n=1)
        return UsageError(
            f"no distribution `{distribution}` is installed",
            hints=[
                *(f"for the component: ddpforge plugins test {owner} --name {distribution}" for owner in owners),
                *(f"did you mean `{name}`?" for name in near if not owners),
                "install it first, e.g. `pip install -e .`; a file is given by its path, `./parts.py`",
            ],
        )
    if any(group.startswith("ddpforge.") for group in groups):
        return UsageError(f"`{distribution}` is hidden by DDPFORGE_DISABLE_PLUGINS", hints=["unset it, to test"])
    return UsageError(
        f"`{distribution}` is installed, and has no entry points for ddpforge",
        hints=[
            'declare components in its pyproject.toml: [project.entry-points."ddpforge.KIND"], NAME = "module:Name"',
            "entry points are read when a package is installed: install it again after a change",
        ],
    )


def _normal(name: str) -> str:
    return name.replace("_", "-").replace(".", "-").lower()


def _of_entry(entry: Entry, registry: Registry) -> Iterator[Case]:
    single = Registry([entry])  # another distribution may provide the name too
    everything = registry if len([e for e in registry.entries(entry.kind) if e.name == entry.name]) == 1 else None
    use = entry.name if everything else f"{entry.distribution}:{entry.name}"
    file = None
    with suppress(PluginError):  # which the first check will tell
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
        probe = registry.load("model", f"{use}:__class__", base)  # any attribute will do: this imports the file
        del probe
        module = next(
            found
            for found in list(sys.modules.values())
            if getattr(found, "__file__", None) == str(path.resolve()) and found.__name__.startswith(PREFIX)
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
            f"nothing in {path} says of which kind it is",
            hints=[f"ddpforge plugins test {path}:Name --kind KIND", f"or name it in {SETTINGS}: [KIND.Name]"],
        )


def _kind_of(registry: Registry, use: str, base: Path) -> str | None:
    """The kind of a class or function, by what it derives from, offers, asks for or returns."""
    component: Any = registry.load("model", use, base)
    if isinstance(component, type):
        tells = [spec for spec in KINDS.values() if spec.derives(component)]
        tells += [spec for spec in KINDS.values() if spec.resembles(component)]
    else:
        parameters = inspect.signature(component).parameters
        tells = [spec for spec in KINDS.values() if spec.parameter in parameters]
    return tells[0].name if tells else None


def _with_settings(case: Case, file: Path | None, name: str) -> Iterator[Case]:
    """The case once for every table that its author wrote, or once."""
    for table, said, number in tables_of(case.kind, name, file):
        yield Case(case.kind, case.use, case.registry, case.base, table, said, number)
