"""`ddpforge recipes` and `ddpforge schema`: the bundled recipes, and the JSON Schema of recipes."""

from __future__ import annotations

import json
import os
import sys
from contextlib import suppress
from pathlib import Path

import click

from ddpforge.cli.options import json_option
from ddpforge.errors import ExitCode, RecipeError, UsageError

_SCHEMA = "recipe.schema.json"


@click.group()
def recipes() -> None:
    """List or copy the recipes that come with ddpforge; upgrade your own."""


@recipes.command("ls")
@json_option
def list_recipes(as_json: bool) -> None:
    """List the bundled recipes. Commands accept their names instead of a file."""
    from ddpforge.recipe.bundled import titles as titles_of

    titles = titles_of()
    if as_json:
        click.echo(json.dumps({"recipes": [{"name": name, "title": title} for name, title in titles.items()]}))
        return
    width = max(map(len, titles), default=0)
    for name, title in titles.items():
        click.echo(f"{name:{width}}  {title}")


@recipes.command("cp")
@click.argument("name")
@click.argument("target", required=False, type=click.Path(path_type=Path))
def copy_recipe(name: str, target: Path | None) -> None:
    """Copy the bundled recipe NAME, to edit it.

    TARGET is a file or a folder; default: the current folder. The copy's first line names recipe.schema.json in the
    same folder, with which TOML editors check and complete a recipe. That file is written too if it does not exist; for
    the options of plugins, write it with `ddpforge schema --out recipe.schema.json`.
    """
    from ddpforge.recipe.bundled import bundled, find_recipe

    source = bundled().get(name) or find_recipe(name)
    target = target or Path()
    target = target / source.name if target.is_dir() else target
    if target.exists():
        raise UsageError(f"{target} exists already", hints=["name another file, or move this one away"])
    try:
        target.write_bytes(f"#:schema {_SCHEMA}\n\n".encode() + source.read_bytes())
    except OSError as error:
        raise UsageError(f"cannot write {target}: {error.strerror}") from None
    click.echo(target)
    if not (beside := target.with_name(_SCHEMA)).exists():
        write_schema(beside, own=True)
        click.echo(beside)


@recipes.command("upgrade")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing; the exit code is 1 if a file would change.")
def upgrade_recipes(files: tuple[Path, ...], check: bool) -> None:
    """Upgrade recipes of version 1, `recipe = 1`, to the names of version 2, in place.

    Only renamed words change: comments, order and quotes stay. A recipe that a file extends is a file of its own, to be
    named here, too. A file that is not a recipe, or with something without counterpart, is reported and left as it is;
    the exit code is then 2.
    """
    from ddpforge.recipe.report import render
    from ddpforge.recipe.upgrade import upgrade_file
    from ddpforge.secret_redaction import redact

    failed = changes = False
    for file in files:
        try:
            done = upgrade_file(file, check=check)
        except RecipeError as error:
            failed = True
            click.echo("\n\n".join(redact(render(problem)) for problem in error.problems), err=True)
            continue
        changes |= bool(done.changes)
        click.echo(
            f"{file}: {('would be upgraded' if check else 'upgraded') if done.changes else 'nothing to upgrade'}"
        )
        for change in done.changes:
            click.echo(f"  {change}")
    sys.exit(ExitCode.USAGE if failed else ExitCode.FAILED if check and changes else ExitCode.DONE)


@recipes.command("from-hf")
@click.argument("arguments", metavar="ARGS.JSON", type=click.Path(path_type=Path))
@click.option(
    "--devices", type=click.IntRange(min=1), default=1, show_default=True, help="Devices that the script trains on."
)
@click.option("-o", "--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file, not to stdout.")
def from_hf(arguments: Path, devices: int, out: Path | None) -> None:
    """Turn TrainingArguments of transformers into a recipe; its model, data and task are left to complete.

    ARGS.JSON is what `args.to_json_string()` returns. The global batch is that of the script on --devices devices.
    Arguments that have no key are listed in comments, with the way in ddpforge.
    """
    from ddpforge.recipe.training_arguments import read_arguments, recipe_of

    text = recipe_of(read_arguments(arguments), devices=devices)
    if out is None:
        click.echo(text, nl=False)
        return
    try:
        with out.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise UsageError(f"{out} exists already", hints=["name another file, or move this one away"]) from None
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
    click.echo(out)


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file, not to stdout.")
def schema(out: Path | None) -> None:
    """Print the JSON Schema of recipes, with the installed components.

    TOML editors check and complete a recipe with the first line `#:schema recipe.schema.json`.
    """
    if out is None:
        click.echo(_text())
    else:
        write_schema(out)


def write_schema(path: Path, *, own: bool = False) -> None:
    """Writes the schema to a file. `own`: without the options of plugins, which are not imported then."""
    try:
        path.write_text(_text(own=own) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _text(*, own: bool = False) -> str:
    """Returns the schema, from a file in the user's cache if nothing that is installed has changed since."""
    from ddpforge import disk
    from ddpforge.components.installed import digest
    from ddpforge.components.registry import Registry

    registry = Registry.installed()
    place = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "ddpforge"
    kept = place / f"schema-{'own' if own else 'all'}-{digest(registry.entries())}.json"
    with suppress(OSError, ValueError):
        return json.dumps(json.loads(kept.read_text(encoding="utf-8")), indent=2)

    from ddpforge.recipe.json_schema import recipe_schema

    text = json.dumps(recipe_schema(registry.only_own() if own else registry), indent=2, allow_nan=False)
    with suppress(OSError):  # a cache is optional
        place.mkdir(parents=True, exist_ok=True)
        disk.replace(kept, text.encode())
    return text
