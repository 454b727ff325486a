"""`ddpforge completion`: prints a script with which a shell completes commands, options, recipes, runs and keys."""

import tomllib
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import click
from click.shell_completion import get_completion_class


@click.command()
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print a completion script. To enable it: `eval "$(ddpforge completion bash)"`."""
    root = click.get_current_context().find_root().command
    complete = get_completion_class(shell)
    assert complete is not None
    click.echo(complete(root, {}, "ddpforge", "_DDPFORGE_COMPLETE").source())


def keys(recipe: str, begun: str) -> list[str]:
    """Returns the keys that begin with `begun`: of sections, of `recipe`, and of its components by ddpforge."""
    from ddpforge.recipe.vocabulary import Vocabulary

    words = Vocabulary()
    found = {".".join((*map(str, table), key)) for table in words.models for key in words.keys(table) if table}
    found |= {"name", "output_dir"}
    with suppress(Exception):  # a recipe that cannot be read has no keys to propose
        tables = _tables(recipe)
        found |= {*_dotted(tables), *_options(tables, begun.rpartition(".")[0])}
    return sorted(key for key in found if key.startswith(begun))


def _tables(recipe: str) -> dict[str, Any]:
    from ddpforge.recipe.bundled import find_recipe

    return tomllib.loads(find_recipe(recipe).read_text(encoding="utf-8"))


def _dotted(table: dict[str, Any], above: str = "") -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _dotted(value, f"{above}{key}.")
        else:
            yield f"{above}{key}"


def _options(tables: dict[str, Any], table: str) -> Iterator[str]:
    """Yields the options of the component in [table], if it is ddpforge's own."""
    from ddpforge.components.registry import Registry
    from ddpforge.recipe.layers import framework_keys, inside, kind_at, used_name

    path = tuple(table.split("."))
    kind = kind_at(path, tables)
    if kind is None:
        return
    yield from (f"{table}.{key}" for key in ("use", *framework_keys(path)))
    component = inside(tables, path) if path[0] in tables else {}
    if use := used_name(path, component):
        model = Registry.installed().only_own().options_model(kind, use)
        yield from (f"{table}.{key}" for key in model.model_fields)
