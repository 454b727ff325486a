"""Evaluation of a run's model, and its predictions for every sample of a dataset."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ddpforge.app.build import build_checked, check_chosen, deal
from ddpforge.app.choose import choose
from ddpforge.app.prediction_tables import TableWriter, check_table, writing
from ddpforge.app.run import join
from ddpforge.checkpoint.reader import CheckpointReader
from ddpforge.components.attributes import missing_attribute
from ddpforge.components.registry import Registry
from ddpforge.disk import reject_existing
from ddpforge.errors import UsageError
from ddpforge.interfaces import World, class_names_of
from ddpforge.ranks import process_exit
from ddpforge.ranks.backend_flags import restored_backend_flags
from ddpforge.ranks.environment import environment
from ddpforge.ranks.join import leave
from ddpforge.ranks.writers import on_rank_zero
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.load import reject_text
from ddpforge.recipe.report import did_you_mean
from ddpforge.runs.checkpoints import choose as choose_checkpoint
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import RunFolder
from ddpforge.training.assemble import assemble_evaluator
from ddpforge.training.callbacks import overriding
from ddpforge.training.data_names import DataNames
from ddpforge.training.prediction import INDEX, Predicted, check_single_update, in_order, predictions
from ddpforge.training.problems import Problems
from ddpforge.training.stages import Chosen, Dealt, key_of, source_components
from ddpforge.watchdog.watchdog import end_startup_watch

__all__ = [
    "Evaluation",
    "Prediction",
    "check_sets",
    "choose_parts",
    "evaluate",
    "evaluate_checkpoint",
    "predict",
]

log = logging.getLogger("ddpforge")


@dataclass(frozen=True)
class Evaluation:
    """Result of an evaluation."""

    step: int
    metrics: dict[str, float]
    is_rank_zero: bool
    if not TYPE_CHECKING:
        __getattr__ = missing_attribute

    def as_dict(self) -> dict[str, Any]:
        """Returns step and metrics for JSON. JSON has no NaN: a metric that is not finite is None."""
        return {"step": self.step} | {name: x if math.isfinite(x) else None for name, x in self.metrics.items()}


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def evaluate(
    folder: RunFolder,
    *,
    step: int | None = None,
    best: bool = False,
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
    registry: Registry | None = None,
) -> Evaluation:
    """Evaluates a checkpoint of a run on the recipe's evaluation sets. Call it on every rank. Writes nothing.

    The default is the newest intact checkpoint; rank 0 selects it, and may read all of a checkpoint for that. Averaged
    weights are used if the recipe's callbacks evaluate with them. Builds only the model, evaluation data and callbacks,
    and reads only weights.

    Args:
        folder: the run's folder.
        step: evaluate the checkpoint of this step.
        best: evaluate the best checkpoint by `checkpoint.keep.by`.
        sets: changes to the recipe, KEY=VALUE.
        only: the names of the evaluation sets `[data.eval.NAME]` to use; all if empty.
        registry: the components; by default the installed ones.
    """
    environment().export_variables()
    reject_text("only", only)
    chosen, problems = choose_parts(folder, sets, registry, only)
    world = join(chosen)
    if chosen.other_layout and world.is_rank_zero:
        log.info("%s", chosen.other_layout)
    checkpoint = on_rank_zero(world.global_ranks, lambda: choose_checkpoint(folder, step=step, best=best))
    found = evaluate_checkpoint(checkpoint, chosen, world, problems, folder)
    leave(world)
    return found


def choose_parts(
    folder: RunFolder, sets: Sequence[str], registry: Registry | None, only: Sequence[str] = ()
) -> tuple[Chosen, Problems]:
    """Loads the recipe of a run, chooses and checks the components of an evaluation; see `evaluate`."""
    return _choose(*_load(folder, sets, registry), only)


def evaluate_checkpoint(
    checkpoint: Path, chosen: Chosen, world: World, problems: Problems, folder: RunFolder
) -> Evaluation:
    """Builds model and data, and evaluates the weights of `checkpoint`. Collective."""
    reader = CheckpointReader(checkpoint)
    dealt = _build(chosen, world, problems, reader)
    end_startup_watch()  # an evaluation may take long
    with assemble_evaluator(dealt, world, reader, folder.path) as evaluator:
        if world.is_rank_zero:
            log.info("evaluating %s", _what_is_used(checkpoint, dealt))
        metrics = evaluator.evaluate(reader.metadata.step)
    return Evaluation(reader.metadata.step, metrics, world.is_rank_zero)


@dataclass(frozen=True)
class Prediction:
    """Result of a prediction: the file, the number of samples in it, and the step of the weights."""

    file: Path
    samples: int
    step: int
    is_rank_zero: bool
    if not TYPE_CHECKING:
        __getattr__ = missing_attribute

    def as_dict(self) -> dict[str, Any]:
        """Returns file, samples and step for JSON."""
        return {"file": str(self.file), "samples": self.samples, "step": self.step}


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def predict(
    folder: RunFolder,
    out: Path,
    *,
    step: int | None = None,
    best: bool = False,
    weights: str | None = None,
    data: Sequence[str] = (),
    sets: Sequence[str] = (),
    limit: int | None = None,
    force: bool = False,
    registry: Registry | None = None,
) -> Prediction:
    """Writes the predictions of a run's model for every sample of a dataset to `out`, in the order of the data.

    Call it on every rank; rank 0 writes. A failure leaves no `out`. Checkpoint and strategy are selected as in
    `evaluate`.

    Args:
        folder: the run's folder.
        out: a .jsonl or .parquet file.
        step: use the checkpoint of this step.
        best: use the best checkpoint by `checkpoint.keep.by`.
        weights: "model", or the name of a callback that keeps its own weights. Default: the weights of evaluations.
        data: the name of one of the recipe's datasets ("eval", "eval.NAME", "train"), and KEY=VALUE for its options.
            Default: the evaluation set, if the recipe has exactly one.
        sets: changes to the recipe, KEY=VALUE.
        limit: stop after this number of samples.
        force: replace `out` if it exists. Without it, an existing `out` raises UsageError.
        registry: the components; by default the installed ones.
    """
    environment().export_variables()
    reject_text("data", data)
    check_table(out)
    loaded, registry, only = _to_predict(folder, data, sets, registry)
    chosen, problems = _choose(loaded, registry, only)
    world = join(chosen)
    check_single_update(chosen.task)
    on_rank_zero(world.global_ranks, lambda: reject_existing(out, force=force))
    checkpoint = on_rank_zero(world.global_ranks, lambda: choose_checkpoint(folder, step=step, best=best))
    reader = CheckpointReader(checkpoint)
    dealt = _build(chosen, world, problems, reader)
    (name,) = dealt.evaluations()
    key = key_of(name)
    dealt = deal(replace(dealt, data={**dealt.data, key: in_order(dealt.data[key])}), world)
    end_startup_watch()  # an evaluation may take long
    with ExitStack() as files, assemble_evaluator(dealt, world, reader, folder.path, weights=weights) as evaluator:
        if world.is_rank_zero:
            log.info("predicting with %s", _what_is_used(checkpoint, dealt, weights))
        found = predictions(
            evaluator, dealt.task, dealt.evaluation[name], world, limit=limit, names=dealt.names.classes
        )
        samples = _write(out, found, world, files)
    leave(world)
    return Prediction(out, samples, reader.metadata.step, world.is_rank_zero)


def _build(chosen: Chosen, world: World, problems: Problems, reader: CheckpointReader) -> Dealt:
    """Builds data and model; the data numbers its classes by the names of the training data in the checkpoint."""
    names = DataNames.recorded(reader.metadata.data)
    dealt = build_checked(chosen, world, problems, samples=False, names=names)
    if names is None and world.is_rank_zero and any(map(class_names_of, dealt.data.values())):
        log.warning("the checkpoint is of an older version, without the names of classes: none is compared with them")
    return dealt


def _write(out: Path, found: Iterable[Sequence[Predicted]], world: World, files: ExitStack) -> int:
    """Writes predictions on rank 0 as they arrive; returns the number of samples. A failure leaves no file."""
    tables: list[TableWriter] = []

    def add(parts: Sequence[Predicted]) -> None:
        for part in parts:
            tables[0].add({INDEX: np.arange(part.first, part.first + part.samples), **part.columns})

    samples = 0
    on_rank_zero(world.global_ranks, lambda: tables.append(files.enter_context(writing(out))))
    for parts in found:
        on_rank_zero(world.global_ranks, partial(add, parts))
        samples += sum(part.samples for part in parts)
    on_rank_zero(world.global_ranks, files.close)
    return samples


def _to_predict(
    folder: RunFolder, data: Sequence[str], sets: Sequence[str], registry: Registry | None
) -> tuple[LoadedRecipe, Registry, list[str]]:
    """Returns a run's recipe, set to evaluate on the dataset that `data` names; its registry; the value of `only`."""
    names, options = ([word for word in data if ("=" in word) == with_value] for with_value in (False, True))
    name = _dataset(_load(folder, sets, registry)[0].recipe, names)
    loaded, registry = _load(folder, (*sets, *(f"data.{name}.{option}" for option in options)), registry)
    if training := source_components(loaded.recipe).get(name):
        section = loaded.recipe.data.model_copy(update={"eval": training})
        loaded = replace(loaded, recipe=loaded.recipe.model_copy(update={"data": section}))
    return loaded, registry, [name.removeprefix("eval.")] if name.startswith("eval.") else []


def _load(folder: RunFolder, sets: Sequence[str], registry: Registry | None) -> tuple[LoadedRecipe, Registry]:
    """Loads the recipe of a run."""
    folder.reject_odd()
    registry = registry or Registry.installed()
    return load_recipe(folder.resolved, sets=sets, registry=registry), registry


def check_sets(recipe: Recipe, only: Sequence[str]) -> None:
    """Raises UsageError if the recipe has no evaluation set, or lacks one in `only`."""
    known = [name for name in recipe.data.evaluations if name]
    if not recipe.data.evaluations:
        hints = ["it is part of the run's recipe: a run that is trained with eval_data=… has one"]
        raise UsageError("the recipe has no evaluation set: add [data.eval]", hints=hints)
    for name in only:
        if name not in known:
            there = [f"it has {', '.join(known)}"] if known else ["its only evaluation set [data.eval] has no name"]
            raise UsageError(
                f"the recipe has no evaluation set [data.eval.{name}]", hints=[*did_you_mean(name, known), *there]
            )


def _choose(loaded: LoadedRecipe, registry: Registry, only: Sequence[str]) -> tuple[Chosen, Problems]:
    """Chooses and checks the components of an evaluation."""
    check_sets(loaded.recipe, only)
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=world_size(), trains=False, only=only)
    check_chosen(chosen, problems)
    return chosen, problems


def _dataset(recipe: Recipe, names: Sequence[str]) -> str:
    """Returns the key of the named dataset, by default of the only evaluation set. Raises UsageError if ambiguous."""
    sets = [key_of(name) for name in recipe.data.evaluations]
    known = [*sets, *source_components(recipe)]
    if not names and len(sets) == 1:
        return sets[0]
    hints = [f"--data {name}" for name in known]
    if not names:
        what = "no [data.eval]" if not sets else "several evaluation sets"
        raise UsageError(f"the recipe has {what}: name the dataset to predict", hints=hints)
    if len(names) > 1:
        raise UsageError(f"--data names {' and '.join(names)}; expected one dataset", hints=hints)
    if names[0] not in known:
        raise UsageError(
            f"the recipe has no data {names[0]!r}", hints=[*did_you_mean(names[0], known), *hints, "--data path=…"]
        )
    return names[0]


def _what_is_used(checkpoint: Path, dealt: Dealt, weights: str | None = None) -> str:
    """Describes the checkpoint, the callbacks that provide the weights, and the size of each set."""
    averaging = [weights] if weights else overriding(dealt.callbacks, "evaluating")
    others = f", with the weights of {', '.join(averaging)}" if averaging and weights != "model" else ""
    found = {name: dealt.data[key_of(name)] for name in dealt.evaluation}
    counted = [
        f"{len(data):,} samples{f' of {name}' if name else ''}"
        for name, data in found.items()
        if hasattr(data, "__len__")
    ]
    return f"{checkpoint}{others}{', on ' if counted else ''}{', '.join(counted)}"
