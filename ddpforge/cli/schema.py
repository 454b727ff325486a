"""`ddpforge schema`: the recipe's JSON Schema, for editors."""

import json
from pathlib import Path

import click

from ddpforge.errors import UsageError


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), help="Write to this file, not to stdout.")
def schema(out: Path | None) -> None:
    """Print the recipe's JSON Schema, with the components that are installed.

    With `#:schema recipe.schema.json` as its first line, a recipe is checked and completed by TOML editors.
    """
    if out is None:
        click.echo(_text())
    else:
        write_schema(out)


def write_schema(path: Path) -> None:
    """Writes the schema to a file."""
    try:
        path.write_text(_text() + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None


def _text() -> str:
    from ddpforge.components.registry import Registry
    from ddpforge.recipe.json_schema import recipe_schema

    return json.dumps(recipe_schema(Registry.installed()), indent=2, allow_nan=False)
