"""`ddpforge check`: finds every error in a recipe and starts nothing."""

import json
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import device_option, imports_option, json_option, ranks_option, recipe_argument, sets_options
from ddpforge.components.stand_ins import look, need_libraries, without_libraries
from ddpforge.errors import ForgeError, RecipeError, UsageError

if TYPE_CHECKING:
    from ddpforge.training.parts import Parts


@click.command()
@recipe_argument
@sets_options
@ranks_option
@device_option
@click.option(
    "--build",
    "builds",
    is_flag=True,
    help="Also build every component, with a large model on the meta device, and evaluate a few samples.",
)
@imports_option
@json_option
def check(
    recipe: str, sets: Sequence[str], ranks: int, device: str | None, builds: bool, imports: bool, as_json: bool
) -> None:
    """Validate RECIPE (a file or a bundled recipe's name) without starting anything.

    This imports the code that the recipe names, which runs what stands at the top of it; a model that the strategy cuts
    is also built, without memory for weights. What only data and model can tell is found by --build, and by `run`
    before it trains.
    """
    if builds and not imports:
        raise UsageError("--build runs the code that --no-import is not to import", hints=["leave one of them out"])
    checked = partial(_check, recipe, sets, ranks, device, builds, imports)
    if not as_json:
        click.echo(f"{recipe}: ok, {checked() if builds else look(checked)}")
        return
    try:
        checked() if builds else look(checked)
    except ForgeError as error:
        click.echo(json.dumps({"ok": False, "problems": _problems(error)}))
        raise SystemExit(int(error.exit_code)) from None
    click.echo(json.dumps({"ok": True, "problems": []}))


def _check(recipe: str, sets: Sequence[str], ranks: int, device: str | None, builds: bool, imports: bool) -> str:
    """Describes the run that the recipe amounts to; raises ForgeError when it cannot be run."""
    parts = foreseen(recipe, sets, ranks, device, imports=imports)
    if not builds and not parts.found:
        _check_cut(parts)
    built = _build(parts) if builds else ""
    parts.report()
    skipped = f"; not imported, nor checked: {', '.join(parts.not_imported)}" if parts.not_imported else ""
    return f"{parts.batch}{skipped}{built}"


def foreseen(recipe: str, sets: Sequence[str], ranks: int, device: str | None, *, imports: bool = True) -> "Parts":
    """Loads a recipe and asks what can be known of it on so many ranks; `report` of what it returns says that."""
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import load_recipe
    from ddpforge.runs.folder import RunFolder
    from ddpforge.training.foreseeing import foresee
    from ddpforge.training.parts import Parts

    registry = Registry.installed() if imports else Registry.installed().only_registered()
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    parts = Parts(loaded, registry)
    foresee(parts, ranks=ranks, device=device, folder=RunFolder.of(loaded.recipe))
    return parts


def _check_cut(parts: "Parts") -> None:
    """Asks a strategy that cuts the model whether it can: that is no matter of data."""
    known = parts.built.strategy is not None and parts.built.task is not None
    if not known or not parts.strategy.cuts_model or parts.recipe.model.use in parts.not_imported:
        return
    if without_libraries():
        need_libraries()
    from ddpforge.training.building import check_cut

    check_cut(parts)


def _build(parts: "Parts") -> str:
    from ddpforge.training.building import build_data_and_model, shares_of, short_steps
    from ddpforge.training.trying import try_out

    build_data_and_model(parts, meta=True)
    tried = try_out(parts)
    parts.report()
    steps = parts.plan.horizon.total
    lines = [
        f"{parts.size.all:,} parameters, {parts.size.trainable:,} of them trainable",
        f"{steps:,} steps" if steps is not None else f"{parts.recipe.train.length} of training",
    ]
    lines += [note] if (note := short_steps(parts)) else []
    lines += [f"optimizer of {share}" for share in shares_of(parts)]
    for key, rehearsal in tried.items():
        numbers = "".join(f", {name} {value:.4g}" for name, value in rehearsal.metrics.items())
        lines.append(f"[data.{key}] gives {rehearsal.batch}{numbers}")
    return "".join(f"\n  {line}" for line in lines)


def _problems(error: ForgeError) -> list[dict[str, object]]:
    from ddpforge.confidential import redacted
    from ddpforge.recipe import Problem

    problems = error.problems if isinstance(error, RecipeError) else [Problem(error.message, hints=error.hints)]
    return [redacted(problem.as_dict()) for problem in problems]
