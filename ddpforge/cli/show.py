"""`ddpforge show`: prints the resolved recipe with the origin of each value, and facts about the run."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from ddpforge.cli.check import choose_and_check
from ddpforge.cli.options import device_option, imports_option, json_option, ranks_option, recipe_argument, sets_options
from ddpforge.cli.plan import short

if TYPE_CHECKING:
    from ddpforge.interfaces import Contract
    from ddpforge.recipe import LoadedRecipe

_WIDEST = 48  # column of the comments; after a longer value the comment is further right


@click.command()
@recipe_argument
@sets_options
@ranks_option
@device_option
@imports_option
@click.option("--plan", "plans", is_flag=True, help="Also print a short form of `ddpforge plan`; takes some seconds.")
@json_option
def show(
    recipe: str, sets: Sequence[str], ranks: int, device: str | None, imports: bool, plans: bool, as_json: bool
) -> None:
    """Print RECIPE resolved, with all defaults and the origin of each value. The output is a recipe too.

    This imports the code that the recipe names, which runs its module-level statements.
    """
    if not plans:
        click.echo("\n".join(_shown(recipe, sets, ranks, device, imports, as_json)))
        return
    from ddpforge.components.registry import Registry
    from ddpforge.tools.simulation.forecast import forecast

    text = "\n".join(_shown(recipe, sets, ranks, device, imports, as_json))
    plan = forecast(recipe, None, ranks=ranks, registry=Registry.installed(), sets=sets)
    if as_json:
        click.echo(json.dumps(json.loads(text) | {"plan": plan.as_dict()}, indent=2))
    else:
        click.echo("\n".join([text, *(f"# {line}" for line in short(plan))]))


def _shown(
    recipe: str, sets: Sequence[str], ranks: int, device: str | None, imports: bool, as_json: bool
) -> Iterator[str]:
    from ddpforge.api import MISSING, batches_per_step, contract_of

    chosen, problems = choose_and_check(recipe, sets, ranks, device, imports=imports)
    problems.raise_if_any()
    loaded = chosen.loaded  # includes metric directions declared by the task
    contract = None if chosen.strategy is MISSING else contract_of(chosen.strategy)
    generated = chosen.strategy.generated_config(loaded.recipe.train, ranks) if contract else {}

    if as_json:
        facts = {
            "batch": asdict(chosen.batch),
            "contract": asdict(contract) if contract else None,
            "generated": generated,
            "not_imported": problems.not_imported,
        }
        yield json.dumps(_as_dict(loaded) | facts, indent=2)
        return
    yield _annotated(loaded)
    yield f"\n# batch: {chosen.batch}"
    if (draws := batches_per_step(chosen.updates)) > 1:
        yield f"# batches per step: {draws}"
    for use in problems.not_imported:
        yield f"# not imported, its options are not checked: {use}"
    for name, promise in _promises(contract, ranks) if contract else ():
        yield f"# {loaded.recipe.strategy.use} {name}: {promise}"
    for name, config in generated.items():
        text = f"{name}: {json.dumps(config, indent=2)}"
        yield from (f"# {line}" for line in text.splitlines())


def _promises(contract: "Contract", ranks: int) -> Iterator[tuple[str, str]]:
    """Yields name and text of each promise in a strategy's contract."""
    spread = f"over {ranks // contract.replicas} of {ranks} ranks" if contract.replicas > 1 else "over all ranks"
    yield "shards", f"{', '.join(contract.shards)}, {spread}" if contract.shards else "nothing: every rank holds all"
    yield "averages over ranks", contract.averages
    yield "master weights", contract.master_dtype
    yield "gradients are reduced in", contract.reduce_dtype
    yield "optimizers", contract.optimizers
    yield "clipping", contract.clipping
    yield "accumulation", contract.accumulation


def _annotated(loaded: "LoadedRecipe") -> str:
    """Returns the resolved recipe with the origin of every value as a comment after it."""
    from ddpforge.recipe.toml import Source

    text = loaded.dumps().rstrip()
    lines = text.split("\n")
    column = min(_WIDEST, max(map(len, lines)))
    written = Source("", text)
    for path, origin in loaded.origins.items():
        line = written.place(path, key=True).line - 1
        if not lines[line].startswith("["):
            lines[line] = f"{lines[line]:{column}}  {click.style(f'# {origin}', dim=True)}"
    return "\n".join(lines)


def _as_dict(loaded: "LoadedRecipe") -> dict[str, object]:
    from ddpforge.recipe.report import dotted

    return {
        "recipe": loaded.tables,
        "origins": {dotted(path): str(origin) for path, origin in loaded.origins.items()},
    }
