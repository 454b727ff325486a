"""`ddpforge check`: finds all errors of a recipe without training."""

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from ddpforge.cli.options import device_option, imports_option, json_option, ranks_option, recipe_argument, sets_options
from ddpforge.errors import ForgeError, RecipeError, UsageError

if TYPE_CHECKING:
    from ddpforge.api import Chosen, Problems


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

    This imports the code that the recipe names, which runs its module-level statements. If the strategy splits the
    model, the model is also built, without memory for weights. Errors that need data and model are found by --build,
    and by `run` before it trains.
    """
    if builds and not imports:
        raise UsageError("--build imports the recipe's code, which --no-import excludes", hints=["omit one of them"])
    if not as_json:
        click.echo(f"{recipe}: ok, {_check(recipe, sets, ranks, device, builds, imports)}")
        return
    try:
        _check(recipe, sets, ranks, device, builds, imports)
    except ForgeError as error:
        click.echo(json.dumps({"ok": False, "problems": _problems(error)}))
        raise SystemExit(int(error.exit_code)) from None
    click.echo(json.dumps({"ok": True, "problems": []}))


def _check(recipe: str, sets: Sequence[str], ranks: int, device: str | None, builds: bool, imports: bool) -> str:
    """Returns a description of the run; raises ForgeError if the recipe has errors."""
    chosen, problems = choose_and_check(recipe, sets, ranks, device, imports=imports, seeds=builds)
    if not builds and not problems:
        _check_cut(chosen, problems)
    built = _build(chosen, problems) if builds else ""
    problems.raise_if_any()
    skipped = f"; not imported and not checked: {', '.join(problems.not_imported)}" if problems.not_imported else ""
    return f"{chosen.batch}{skipped}{built}"


def choose_and_check(
    recipe: str, sets: Sequence[str], ranks: int, device: str | None, *, imports: bool = True, seeds: bool = False
) -> "tuple[Chosen, Problems]":
    """Loads a recipe for `ranks` ranks, and collects the problems that can be found without data and model.

    `seeds`: models that the task holds get the same weights as in a run.
    """
    from ddpforge.api import Problems, RunFolder, choose
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import load_recipe
    from ddpforge.training import checks

    registry = Registry.installed() if imports else Registry.installed().only_registered()
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    problems = Problems(loaded)
    resumes = any(RunFolder.of(loaded.recipe).checkpoints.glob("step-*"))
    chosen = choose(loaded, registry, problems, ranks=ranks, device=device, resumes=resumes, seeds=seeds)
    checks.check("chosen", chosen, problems)
    return chosen, problems


def _check_cut(chosen: "Chosen", problems: "Problems") -> None:
    """Checks that the strategy can split the model, if it does so. Needs no data."""
    from ddpforge.api import MISSING

    if chosen.strategy is MISSING or chosen.task is MISSING or chosen.recipe.model.use in problems.not_imported:
        return
    if not chosen.strategy.splits_model:
        return
    from ddpforge.api import check_cut

    check_cut(chosen, problems)


def _build(chosen: "Chosen", problems: "Problems") -> str:
    from ddpforge.api import build, check_built, describe_shares, short_steps
    from ddpforge.guard.fit import check_optimizer
    from ddpforge.guard.samples import check_each_dataset

    built = build(chosen, problems, meta=True)
    fits = check_built(built, problems)
    if not problems:
        with problems.at("optimizer"):
            check_optimizer(built)  # a run builds its optimizer anyway, and needs no such check
    results = check_each_dataset(built, problems) if fits else {}
    problems.raise_if_any()
    steps = built.plan.horizon.total
    lines = [
        f"{built.size.all:,} parameters, {built.size.trainable:,} of them trainable",
        f"{steps:,} steps" if steps is not None else f"{built.recipe.train.length} of training",
    ]
    lines += [note] if (note := short_steps(built)) else []
    lines += [f"optimizer of {share}" for share in describe_shares(built)]
    for key, result in results.items():
        numbers = "".join(f", {name} {value:.4g}" for name, value in result.metrics.items())
        lines.append(f"[data.{key}] gives {result.batch}{numbers}")
    return "".join(f"\n  {line}" for line in lines)


def _problems(error: ForgeError) -> list[dict[str, object]]:
    from ddpforge.recipe import Diagnostic
    from ddpforge.secret_redaction import redacted

    problems = error.problems if isinstance(error, RecipeError) else [Diagnostic(error.message, hints=error.hints)]
    return [redacted(problem.as_dict()) for problem in problems]
