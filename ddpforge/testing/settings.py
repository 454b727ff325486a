"""Reads `ddpforge_testing.toml`, the author's settings for tests of components.

The file (or the table `[tool.ddpforge.testing]` of a pyproject.toml) is in the folder of the component's module or in a
folder above it. It has one table for a component, `[KIND.NAME]`, or several, `[[KIND.NAME]]`. Each table is tested:

    [task.denoising]
    options = { noise = 0.1 }                                # options of the component itself
    model = { use = "mlp", inputs = 64, outputs = 10 }       # other sections, as in a recipe: model, data, task,
    data = { use = "digits", split = "test" }                # optimizer, schedule, strategy, train
    skip = { stable-names = "names depend on the weather" }  # checks to skip, with reasons; a text skips all checks

In texts, `{here}` is replaced by the folder of the file, so that options can name files in the package.

Further keys declare special properties of a component: `unused` and `meta` of a model, `duplicates` of data,
`elementwise` and `matrices` of an optimizer, `horizon` of a schedule, `ranks` of a strategy, `raises` of a tracker.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from ddpforge.components.kinds import KINDS
from ddpforge.errors import UsageError
from ddpforge.testing.registered_checks import checks_of

__all__ = ["SECTIONS", "SETTINGS", "find_settings", "tables_of"]

SETTINGS = "ddpforge_testing.toml"
SECTIONS = (*(kind for kind, spec in KINDS.items() if spec.tables), "train")
_SKIP = str | dict[str, str]
_HIGHEST = 6  # levels of folders, from the module's own upward, that may have its settings


def tables_of(kind: str, name: str, file: Path | None) -> Iterator[tuple[dict[str, Any], Path | None, int]]:
    """Yields each table for a component of `file`, the path of its settings, and its number if there are several.

    Yields an empty table if there are no settings. Raises UsageError for an invalid table.
    """
    settings, said = find_settings(file) if file else ({}, None)
    tables = settings.get(kind, {}).get(name, {})
    several = isinstance(tables, list)
    for number, table in enumerate(tables if several else [tables], start=1):
        _check(kind, name, table, said)
        yield _filled(table, str(said.parent) if said else ""), said, number if several else 0


def find_settings(file: Path) -> tuple[dict[str, Any], Path | None]:
    """Reads the nearest file with settings; returns its table and its path, or ({}, None) if there is no such file."""
    for folder in list(file.parents)[:_HIGHEST]:
        if folder.name in ("site-packages", "dist-packages"):
            break
        for name, path in ((SETTINGS, ()), ("pyproject.toml", ("tool", "ddpforge", "testing"))):
            if (folder / name).is_file():
                table = _read(folder / name)
                for key in path:
                    table = table.get(key, {})
                if table or not path:
                    _check_kinds(table, folder / name)
                    return table, folder / name
    return {}, None


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read: {error}") from error


def _filled(value: Any, here: str) -> Any:
    if isinstance(value, str):
        return value.replace("{here}", here)
    if isinstance(value, dict):
        return {key: _filled(inner, here) for key, inner in value.items()}
    return [_filled(inner, here) for inner in value] if isinstance(value, list) else value


def _check_kinds(settings: Mapping[str, Any], said: Path) -> None:
    for kind, tables in settings.items():
        if kind not in KINDS or not isinstance(tables, dict):
            raise UsageError(
                f"{said}: `{kind}` must be a kind of component, with tables [KIND.NAME] in it",
                hints=_near(kind, list(KINDS), "kinds"),
            )


def _check(kind: str, name: str, table: Any, said: Path | None) -> None:
    """Raises UsageError if a table has an unknown key, or a value of a wrong type."""
    if not isinstance(table, dict):
        raise UsageError(f"{said}: [{kind}.{name}] must be a table")
    types = {"skip": _SKIP, **KINDS[kind].settings()}
    known = ("options", *SECTIONS, *types)
    for key, value in table.items():
        if key not in known:
            raise UsageError(f"{said}: [{kind}.{name}] has no key `{key}`", hints=_near(key, known, "keys"))
        try:
            TypeAdapter(types.get(key, dict[str, Any])).validate_python(value, strict=True)
        except ValidationError as error:
            raise UsageError(f"{said}: `{key}` of [{kind}.{name}]: {error.errors()[0]['msg']}") from error
        if key in SECTIONS and key != "train" and not isinstance(value.get("use"), str):
            raise UsageError(
                f"{said}: `{key}` of [{kind}.{name}] names no component", hints=[f'{key} = {{ use = "…", … }}']
            )
    skipped = table.get("skip", {})
    checks = [one.name for one in checks_of(kind)]
    if isinstance(skipped, dict) and (odd := [one for one in skipped if one not in checks]):
        raise UsageError(
            f"{said}: [{kind}.{name}] skips `{odd[0]}`, but a {kind} has no such check",
            hints=_near(odd[0], checks, "checks"),
        )


def _near(word: str, known: Sequence[str], what: str) -> list[str]:
    near = get_close_matches(word, known, n=1)
    return [*(f"did you mean `{one}`?" for one in near), f"known {what}: {', '.join(known)}"]
