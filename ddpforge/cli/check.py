"""`ddpforge check`: finds every error in a recipe and starts nothing."""

import json
from collections.abc import Sequence

import click

from ddpforge.cli.options import json_option, ranks_option, recipe_argument, sets_option
from ddpforge.errors import ForgeError, RecipeError


@click.command()
@recipe_argument
@sets_option
@ranks_option
@json_option
def check(recipe: str, sets: Sequence[str], ranks: int, as_json: bool) -> None:
    """Find every error in RECIPE (a file or a bundled recipe's name); starts nothing."""
    if not as_json:
        click.echo(f"{recipe}: ok, {_check(recipe, sets, ranks)}")
        return
    try:
        _check(recipe, sets, ranks)
    except ForgeError as error:
        click.echo(json.dumps({"ok": False, "problems": _problems(error)}))
        raise SystemExit(int(error.exit_code)) from None
    click.echo(json.dumps({"ok": True, "problems": []}))


def _check(recipe: str, sets: Sequence[str], ranks: int) -> str:
    """How the recipe's batch is dealt out; raises ForgeError when the recipe cannot be run."""
    from ddpforge.recipe import check_world, load_recipe
    from ddpforge.recipe.trial import check_optimizer
    from ddpforge.registry import Registry

    registry = Registry.installed()
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    plan = check_world(loaded, ranks)
    check_optimizer(loaded, registry)
    return str(plan)


def _problems(error: ForgeError) -> list[dict[str, object]]:
    from ddpforge.recipe import Problem

    problems = error.problems if isinstance(error, RecipeError) else [Problem(error.message, hints=error.hints)]
    return [problem.as_dict() for problem in problems]
