"""Checks between the keys of a recipe: settings that are right by themselves and a mistake together."""

from __future__ import annotations

import re

from ddpforge.errors import RecipeError
from ddpforge.interfaces.direction import lower_is_better
from ddpforge.interfaces.durations import Duration
from ddpforge.recipe.batch import plan_batch
from ddpforge.recipe.explain import Explainer
from ddpforge.recipe.layers import SETS
from ddpforge.recipe.report import dotted
from ddpforge.recipe.schema import Recipe, TrainSection

_SET = re.compile(r"[\w-]+")
_NEEDS_NO_TOTAL = ("constant", "step")  # schedules that do not ask how long the run is


def cross_check(recipe: Recipe, explainer: Explainer) -> None:
    """Reports what contradicts itself; nothing here depends on the machine or the number of ranks."""
    _check_batch(recipe, explainer)
    _check_evaluation(recipe, explainer)
    _check_best(recipe, explainer)
    _check_initial(recipe, explainer)
    _check_schedule(recipe, explainer)
    _check_compile(recipe, explainer)
    _check_float8(recipe, explainer)
    if recipe.optimizer.groups and recipe.optimizer.turns:
        message = "[optimizer.groups] and [optimizer.turns] cannot be used together"
        explainer.add(("optimizer", "groups"), message, "give each turn the settings that its parameters need")


def _check_compile(recipe: Recipe, explainer: Explainer) -> None:
    if recipe.train.compile_blocks and recipe.train.compile == "off":
        message = '`train.compile_blocks` has no effect while `train.compile` is "off"'
        explainer.add(("train", "compile_blocks"), message, 'set a mode, e.g. compile = "default"', on_key=True)


def _check_float8(recipe: Recipe, explainer: Explainer) -> None:
    train = recipe.train
    if train.fp8 != "off" and train.precision != "bf16":
        message = f'`train.fp8` computes all but some layers in bf16, and `train.precision` is "{train.precision}"'
        explainer.add(("train", "fp8"), message, 'set precision = "bf16", or leave fp8 out', on_key=True)
    if train.fp8 == "off" and train.fp8_skip != TrainSection.model_fields["fp8_skip"].default:
        message = '`train.fp8_skip` has no effect while `train.fp8` is "off"'
        explainer.add(("train", "fp8_skip"), message, 'set fp8 = "tensorwise" or "rowwise"', on_key=True)


def _check_batch(recipe: Recipe, explainer: Explainer) -> None:
    try:
        plan_batch(recipe.train, data_ranks=1)
    except RecipeError as error:
        for problem in error.problems:
            explainer.add(("train", "micro_batch"), problem.message, *problem.hints)

    if recipe.train.elastic_shards and recipe.train.sync_batchnorm:
        message = "`train.sync_batchnorm` computes statistics over all ranks, and `train.elastic_shards` over none"
        explainer.add(("train", "sync_batchnorm"), message, "leave one of them out", on_key=True)


def _check_initial(recipe: Recipe, explainer: Explainer) -> None:
    if recipe.checkpoint.init_skip and recipe.checkpoint.init_from is None:
        message = "`checkpoint.init_skip` has no effect without `init_from`"
        explainer.add(("checkpoint", "init_skip"), message, on_key=True)


def _check_evaluation(recipe: Recipe, explainer: Explainer) -> None:
    for name in filter(None, recipe.data.evaluations):
        at = f"[{dotted((*SETS, name))}]"
        if not _SET.fullmatch(name):
            message = f"{at}: the name of a set may hold letters, digits, `_` and `-`, for its metrics are eval/NAME/…"
            explainer.add((*SETS, name), message, on_key=True)
        elif lower_is_better(name) is not None:
            message = f"{at}: a set cannot have the name of a metric: `eval/{name}/loss` would be read in two ways"
            explainer.add((*SETS, name), message, "name it after its samples", on_key=True)
    for key in ("eval_batch", "eval_every"):
        if not recipe.data.evaluations and ("train", key) in explainer.layers.origins:
            explainer.add(("train", key), f"`train.{key}` has no effect without a section [data.eval]", on_key=True)


def _check_best(recipe: Recipe, explainer: Explainer) -> None:
    keep, at = recipe.checkpoint.keep, ("checkpoint", "keep")
    if keep.best and keep.by is None:
        example = next((f"eval/{name}/loss" if name else "eval/loss" for name in recipe.data.evaluations), "train/loss")
        hint = f'say by which metric, e.g. by = "{example}"'
        explainer.add((*at, "best"), "`checkpoint.keep.best` needs `by`", hint)
    for key in ("by", "mode"):
        if getattr(keep, key) is not None and not keep.best:
            hint = "say how many of the best to keep, e.g. best = 1"
            explainer.add((*at, key), f"`checkpoint.keep.{key}` has no effect without `best`", hint, on_key=True)

    if keep.by is None:
        return
    prefix, _, metric = keep.by.partition("/")
    if prefix not in ("train", "eval") or not metric:
        message = f'`checkpoint.keep.by` must name a metric by "train/…" or "eval/…", not "{keep.by}"'
        explainer.add((*at, "by"), message)
    elif prefix == "eval" and not recipe.data.evaluations:
        message = f'`checkpoint.keep.by` is "{keep.by}", and there is no section [data.eval] to compute it from'
        explainer.add((*at, "by"), message)
    elif prefix == "eval" and not _is_of_a_set(metric, recipe):
        last = metric.rpartition("/")[2]
        message = f'`checkpoint.keep.by` is "{keep.by}", and the evaluation sets have names: it must name one'
        hint = f"one of: {', '.join(f'eval/{name}/{last}' for name in recipe.data.evaluations)}"
        explainer.add((*at, "by"), message, hint)


def _is_of_a_set(metric: str, recipe: Recipe) -> bool:
    name, _, rest = metric.partition("/")
    return "" in recipe.data.evaluations or (name in recipe.data.evaluations and bool(rest))


def _check_schedule(recipe: Recipe, explainer: Explainer) -> None:
    length, schedule = recipe.train.length, recipe.schedule
    if length.is_time and schedule.use.removeprefix("ddpforge:") not in _NEEDS_NO_TOTAL:
        message = f'`train.length` is a wall time, and the schedule "{schedule.use}" must know the number of steps'
        hints = (
            "give the length in epochs or steps",
            f"schedules for a wall time: {', '.join(_NEEDS_NO_TOTAL)}",
        )
        explainer.add(("train", "length"), message, *hints)

    for key, value in schedule.options.items():
        if isinstance(value, Duration) and value.unit == length.unit and value.value > length.value:
            message = f"`schedule.{key}` is {value}, longer than the run, which is {length}"
            explainer.add(("schedule", key), message, "shorten it, or raise `train.length`")
