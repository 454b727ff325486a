"""`ddpforge show`: the resolved recipe, where each value came from, and what it amounts to."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import json_option, ranks_option, recipe_argument, sets_option

if TYPE_CHECKING:
    from ddpforge.interfaces import Contract
    from ddpforge.recipe import LoadedRecipe

_WIDEST = 48  # columns before the comments; longer values push theirs to the right


@click.command()
@recipe_argument
@sets_option
@ranks_option
@json_option
def show(recipe: str, sets: Sequence[str], ranks: int, as_json: bool) -> None:
    """Print RECIPE resolved, with all defaults, and where each value came from. The output is a recipe too."""
    from ddpforge.recipe import check_world, load_recipe
    from ddpforge.registry import Registry

    registry = Registry.installed()
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    plan = check_world(loaded, ranks)
    strategy = loaded.recipe.strategy
    contract = getattr(registry.load("strategy", strategy.use, strategy.base), "contract", None)

    if as_json:
        click.echo(json.dumps(_as_dict(loaded, asdict(plan), contract), indent=2))
        return
    click.echo(_annotated(loaded))
    click.echo(f"\n# batch: {plan}")
    for name, promise in asdict(contract).items() if contract else ():
        click.echo(f"# {strategy.use} {name.replace('_', ' ')}: {promise}")


def _annotated(loaded: "LoadedRecipe") -> str:
    """The resolved recipe with the origin of every value as a comment behind it."""
    from ddpforge.recipe.origins import Source

    text = loaded.dumps().rstrip()
    lines = text.split("\n")
    column = min(_WIDEST, max(map(len, lines)))
    written = Source("", text)
    for path, origin in loaded.origins.items():
        line = written.place(path, key=True).line - 1
        if not lines[line].startswith("["):
            lines[line] = f"{lines[line]:{column}}  {click.style(f'# {origin}', dim=True)}"
    return "\n".join(lines)


def _as_dict(loaded: "LoadedRecipe", batch: dict[str, int], contract: "Contract | None") -> dict[str, object]:
    from ddpforge.recipe.report import dotted

    return {
        "recipe": loaded.tables,
        "origins": {dotted(path): str(origin) for path, origin in loaded.origins.items()},
        "batch": batch,
        "contract": asdict(contract) if contract else None,
    }
