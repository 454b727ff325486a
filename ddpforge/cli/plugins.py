"""`ddpforge plugins`: lists components, shows their options, writes a new plugin, and tests plugins."""

import inspect
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import json_option
from ddpforge.cli.tables import print_table
from ddpforge.components.errors import UnknownComponent
from ddpforge.components.installed import summary
from ddpforge.components.kinds import KINDS
from ddpforge.components.registry import Registry
from ddpforge.errors import UsageError

if TYPE_CHECKING:
    from ddpforge.components.installed import Entry
    from ddpforge.components.options_table import OptionRow
    from ddpforge.testing.report import Result


@click.group()
def plugins() -> None:
    """List and show components; write and test plugins."""


@plugins.command("list")
@click.argument("kind", required=False, type=click.Choice(list(KINDS)))
@click.option("--wide", is_flag=True, help="Show every column, even if the table is wider than the terminal.")
@json_option
def list_(kind: str | None, wide: bool, as_json: bool) -> None:
    """List the components that a recipe can name, without importing them."""
    entries = Registry.installed().entries(kind)
    providers = Counter((entry.kind, entry.name) for entry in entries)
    clashes = {entry for entry in entries if providers[entry.kind, entry.name] > 1}

    if as_json:
        _print_json(components=[{**_shown(entry), "clash": entry in clashes} for entry in entries])
        return
    rows = [
        (
            entry.name,
            entry.kind,
            entry.source,
            entry.target,
            f'clash: use = "{entry.distribution}:{entry.name}"' if entry in clashes else summary(entry.target),
        )
        for entry in entries
    ]
    print_table(
        ("name", "kind", "from", "target", "description"), rows, droppable=("target", "from", "kind"), wide=wide
    )


def _complete_name(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    names = {entry.name for entry in Registry.installed().entries(ctx.params.get("kind"))}
    return sorted(name for name in names if name.startswith(incomplete))


@plugins.command()
@click.argument("name", shell_complete=_complete_name)
@click.option("--kind", type=click.Choice(list(KINDS)), help="The component's kind, if the name is ambiguous.")
@json_option
def show(name: str, kind: str | None, as_json: bool) -> None:
    """Show the documentation of a component, its options, and an example for a recipe.

    NAME is the value of `use` in a recipe: a registered name, package.module:Name or ./file.py:Name.
    """
    registry = Registry.installed()
    kind = kind or _kind_of(registry, name)
    try:
        entry = registry.find(kind, name)
    except UnknownComponent as unknown:
        raise UsageError(unknown.message, hints=unknown.hints) from unknown
    documentation, options, takes_more = _described(registry, kind, name)
    example = _example(kind, name, options)

    if as_json:
        _print_json(
            kind=kind,
            use=name,
            entry=_shown(entry) if entry else None,
            documentation=documentation,
            options=[asdict(option) for option in options],
            takes_more=takes_more,
            example=example,
        )
        return
    click.echo(f"{kind} {name}" + (f"  ({entry.source}, {entry.target})" if entry else ""))
    if documentation:
        click.echo(f"\n{documentation}")
    if options:
        click.echo()
        print_table(
            ("option", "type", "default", "limits", "description"),
            [
                (option.name, option.type, option.default or "required", option.limits, option.description)
                for option in options
            ],
        )
    if takes_more:
        click.echo("\nOther options are passed to the component unchecked.")
    click.echo(f"\n{example}")


def _described(registry: Registry, kind: str, name: str) -> "tuple[str, list[OptionRow], bool]":
    """Returns a component's docstring, its options, and if it takes other options too."""
    from ddpforge.components.options_table import options_table  # imports pydantic, which `plugins list` does not need

    component = registry.load(kind, name)
    documentation = inspect.getdoc(component.func if isinstance(component, partial) else component) or ""
    model = registry.options_model(kind, name)
    return documentation, options_table(model), model.model_config.get("extra") == "allow"


# ---------------------------------------------------------------------------------------------- authors
_NEW = f"""Write a complete plugin, with tests that pass, into the new folder NAME.

KIND is {", ".join(list(KINDS)[:-1])} or {list(KINDS)[-1]}. NAME is the component's name in recipes: lower-case letters,
digits and `_` or `-`.
"""


@plugins.command(help=_NEW)
@click.argument("kind", type=click.Choice(list(KINDS)), metavar="KIND")
@click.argument("name")
@click.option(
    "--in",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    default=".",
    metavar="DIR",
    help="Parent folder for the plugin; default: the current folder.",
)
def new(kind: str, name: str, folder: Path) -> None:
    """Writes a plugin and prints its files."""
    from ddpforge.components.scaffold import write_plugin

    plugin = write_plugin(kind, name, folder)
    for file in plugin.files:
        click.echo(plugin.folder / file)
    click.echo(
        f"\nnext: `pip install -e '{plugin.folder}[test]'`, then `pytest {plugin.folder}` and"
        f" `ddpforge plugins test {plugin.distribution}`",
        err=True,
    )


@plugins.command()
@click.argument("target", metavar="DIST_OR_FILE")
@click.option("--kind", type=click.Choice(list(KINDS)), help="Only components of this kind.")
@click.option("--name", "names", multiple=True, metavar="NAME", help="Only the component of this name; repeatable.")
@click.option("--quick", is_flag=True, help="Skip the checks that start processes.")
@json_option
def test(target: str, kind: str | None, names: tuple[str, ...], quick: bool, as_json: bool) -> None:
    """Check that the components of a plugin keep the contracts of their kinds.

    DIST_OR_FILE is an installed distribution, or a file: ./parts.py, or ./parts.py:Name for one of its components. Exit
    codes: 0 all checks passed, 1 some failed, 2 nothing to test, 3 a file cannot be imported.
    """
    from ddpforge.testing import Kit
    from ddpforge.testing.cases import find_cases

    with Kit(
        find_cases(target, kind=kind, names=names), quick=quick, say=lambda text: click.echo(text, err=True)
    ) as kit:
        results: list[Result] = []
        for result in kit.run():
            results.append(result)
            if not as_json:
                _print_result(result)
    failed = sum(result.status == "failed" for result in results)
    if as_json:
        _print_json(target=target, passed=not failed, results=[result.as_dict() for result in results])
    else:
        passed = sum(result.status == "passed" for result in results)
        click.echo(f"\n{passed} passed, {failed} failed, {len(results) - passed - failed} skipped")
    if failed:
        raise SystemExit(1)


def _print_result(result: "Result") -> None:
    colour = {"passed": "green", "failed": "red", "skipped": "yellow"}[result.status]
    click.echo(f"{click.style(f'{result.status:8}', fg=colour)}{result.kind} {result.name}: {result.check}", nl=False)
    click.echo(f" ({result.text()})" if result.status == "skipped" else "")
    if result.status == "failed":
        for line in result.text().splitlines():
            click.echo(f"        {line}")


def _kind_of(registry: Registry, name: str) -> str:
    """Returns the kind of the component `name`. Raises UsageError unless there is exactly one such kind."""
    entries = registry.entries()
    kinds = {entry.kind for entry in entries if name in (entry.name, f"{entry.distribution}:{entry.name}")}
    if len(kinds) == 1:
        return kinds.pop()
    if kinds:
        hints = [f"ddpforge plugins show {name} --kind {kind}" for kind in sorted(kinds)]
        raise UsageError(f"`{name}` names components of several kinds", hints=hints)
    if ":" in name:
        raise UsageError(f"the kind of `{name}` is unknown", hints=[f"add --kind with one of: {', '.join(KINDS)}"])

    near = get_close_matches(name, {entry.name for entry in entries})
    its = [entry.name for entry in entries if entry.distribution == name]
    raise UsageError(
        f"there is no component named `{name}`",
        hints=[
            *([f"`{name}` is a distribution with {', '.join(f'`{other}`' for other in its)}"] if its else []),
            *(f"did you mean `{other}`?" for other in near),
            "`ddpforge plugins list` shows all installed components",
        ],
    )


def _example(kind: str, use: str, options: "Sequence[OptionRow]") -> str:
    """Returns lines of a recipe that use the component, with its required options."""
    required = [f"{option.name} = {option.example}" for option in options if option.default is None]
    name = f"use = {json.dumps(use)}"
    spec = KINDS[kind]
    table = spec.place

    if spec.key:
        table, _, key = spec.key.rpartition(".")
        return f"[{table}]\n{key} = {json.dumps(use)}"
    if spec.listed_in:
        asked = f"{{ {', '.join([name, *required])} }}" if required else json.dumps(use)
        return f"[{table}]\n{spec.listed_in[1]} = [{asked}]"
    if spec.named_in:  # the key is the name if it is valid as a key
        key = use.rpartition(":")[2].replace(".", "_")
        return "\n".join([f"[{table}.{key}]", *([name] if key != use else []), *required])
    return "\n".join([f"[{table}]", name, *required])


def _shown(entry: "Entry") -> dict[str, str]:
    return {key: value for key, value in asdict(entry).items() if key != "group"}


def _print_json(**facts: object) -> None:
    click.echo(json.dumps({"schema_version": 1, **facts}, indent=2))
