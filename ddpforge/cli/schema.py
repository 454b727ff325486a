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
    from ddpforge.components.registry import Registry
    from ddpforge.recipe.json_schema import recipe_schema

    text = json.dumps(recipe_schema(Registry.installed()), indent=2, allow_nan=False)
    if out is None:
        click.echo(text)
        return
    try:
        out.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {out}: {error.strerror}") from None
