"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from ddpforge.app.attempt import Attempt, Outcome, build_parts, on_every_rank
from ddpforge.app.hosts import compare_clocks, refuse_differences, share_folder
from ddpforge.app.planned import Room
from ddpforge.checkpoint.reader import Reader
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, PeerFailed, Postponed, StrategyError, UsageError
from ddpforge.interfaces import World
from ddpforge.interop.new_file import refuse_existing
from ddpforge.interop.tables import Table, check_table, writing
from ddpforge.launchers.srun import adopt_slurm
from ddpforge.launchers.verdict import has_begun, record_begun
from ddpforge.ranks import leaving, phases
from ddpforge.ranks.halt import seconds_of
from ddpforge.ranks.join import join, leave
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.rank_zero import on_rank_zero
from ddpforge.ranks.signals import StopRequests
from ddpforge.ranks.switches import restored
from ddpforge.ranks.writers import Peers
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.recipe.load import refuse_text
from ddpforge.recipe.plan import Window
from ddpforge.recipe.report import did_you_mean
from ddpforge.recipe.schema import TrainSection
from ddpforge.runs.checkpoints import choose
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.mirror import Mirror
from ddpforge.runs.opening import open_folder
from ddpforge.training.assemble import evaluating
from ddpforge.training.building import build_data_and_model
from ddpforge.training.callbacks import overriding
from ddpforge.training.fingerprint import compare_built
from ddpforge.training.foreseeing import foresee
from ddpforge.training.parts import Parts, key_of
from ddpforge.training.prediction import INDEX, Predicted, in_order, predictions, refuse_turns
from ddpforge.training.trying import rehearse_training
from ddpforge.watchdog.watch import beginning, over

__all__ = ["Evaluation", "Outcome", "Prediction", "evaluate", "join_ranks", "load_parts", "peers_of", "predict", "run"]

log = logging.getLogger("ddpforge")


@leaving.nobody_leaves()
@restored()
def run(
    source: str | Path,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
    max_time: str | None = None,
    profile: str | None = None,
) -> Outcome:
    """Trains a recipe in the world that the launcher's environment describes; called on every rank.

    `source` is a recipe file or the name of a bundled recipe, `out` replaces its `output_dir`, and `fresh` sets an
    earlier run of this name aside instead of continuing it. After `max_time`, e.g. "4h", it stops as if asked to.
    The steps of `profile`, e.g. "20..25", are profiled, with a trace and a table in the run's folder.
    Raises ForgeError for everything that can be expected to go wrong; a RecipeError comes before anything is started.
    """
    adopt_slurm()
    refuse_text("allow_change", allow_change)
    seconds_of(max_time)  # raises UsageError
    window = Window.parse(profile) if profile else None
    fresh = fresh and not has_begun()  # ranks that are started again resume what is fresh
    room = Room()
    parts = load_parts(source, sets)
    folder = RunFolder.of(parts.recipe, out)
    with StopRequests() as stop, ExitStack() as claims, beginning():
        world = join_ranks(parts, folder=None if fresh else folder)
        peers = peers_of(parts.recipe, world)
        _leave_if_asked(stop, world, peers)
        share_folder(folder.path.parent, peers.ranks)
        fresh = all(peers.ranks.everyone(fresh))  # a machine that joins later has begun nothing
        mirror = Mirror.of(folder, parts.recipe.checkpoint) if world.is_main else None
        on_rank_zero(world.all, lambda: mirror.fetch(fresh=fresh) if mirror else None)
        is_new = fresh or not folder.exists()
        if is_new:
            on_every_rank(peers, lambda: build_parts(parts, world, rehearses=True))
        prints = compare_built(parts, world) if is_new else None
        taken = snapshot(parts.loaded)
        opened = on_rank_zero(
            world.all,
            lambda: open_folder(folder, taken, claims, fresh=fresh, allow_change=allow_change),
        )
        record_begun()
        if opened.result:
            if mirror:
                mirror.complete()
            return Outcome(folder.path, opened.result, world.is_main)
        asked: dict[str, Any] = {"room": room, "mirror": mirror, "max_time": max_time, "window": window}
        asked |= {"claims": claims, "prints": prints, "allow_change": allow_change}
        return Attempt(folder, opened, parts, taken, world, peers, **asked).run()


def _leave_if_asked(stop: StopRequests, world: World, peers: Peers) -> None:
    """Raises on all ranks where one was asked to stop already: nothing has begun, so nothing is lost."""
    if any(peers.ranks.everyone(stop.requested)):
        leave(world)
        told = Postponed if world.is_main else partial(PeerFailed, ExitCode.STOPPED)
        raise told("asked to stop before training began", hints=["nothing is lost: the same command begins again"])


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation."""

    step: int
    metrics: dict[str, float]
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a metric that is not finite is null."""
        return {"step": self.step} | {name: x if math.isfinite(x) else None for name, x in self.metrics.items()}


@leaving.nobody_leaves()
@restored()
def evaluate(
    folder: RunFolder,
    *,
    step: int | None = None,
    best: bool = False,
    sets: Sequence[str] = (),
    only: Sequence[str] = (),
) -> Evaluation:
    """Evaluates a run's newest intact checkpoint, its `best`, or that of a `step`, on the recipe's evaluation sets.

    Called on every rank; the first chooses, which may mean to read all of a checkpoint.

    `only` names those of several `[data.eval.NAME]` to evaluate on. Averaged weights are used where the recipe's
    callbacks evaluate with them. Only the model, evaluation data and callbacks are built, and only weights are read.
    Writes nothing.
    """
    adopt_slurm()
    folder.refuse_odd()
    parts = load_parts(folder.resolved, sets, trains=False, only=only)
    world = join_ranks(parts)
    if parts.other_layout and world.is_main:
        log.info("%s", parts.other_layout)
    checkpoint = on_rank_zero(world.all, lambda: choose(folder, step=step, best=best))
    build_data_and_model(parts)
    parts.report()
    over()  # an evaluation may take long
    reader = Reader(checkpoint)
    with evaluating(parts, world, reader, folder.path) as evaluator:
        if world.is_main:
            log.info("evaluating %s", _what_is_used(checkpoint, parts))
        metrics = evaluator.evaluate(reader.facts.step)
    leave(world)
    return Evaluation(reader.facts.step, metrics, world.is_main)


@dataclass(frozen=True)
class Prediction:
    """The file that a prediction wrote: so many samples, by the weights after `step`."""

    file: Path
    samples: int
    step: int
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {"file": str(self.file), "samples": self.samples, "step": self.step}


@leaving.nobody_leaves()
@restored()
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
) -> Prediction:
    """Writes what a run's model predicts of every sample of a dataset to `out`, in the order of the data.

    Called on every rank; rank 0 writes. Checkpoint, strategy and what is built are those of `evaluate`. `weights` is
    "model", or the name of a callback that keeps weights of its own; absent: those that evaluations use. `data` is the
    name of one of the recipe's datasets ("eval", "eval.NAME", "train"), and KEY=VALUE for its options; by default the
    one evaluation set. `out` appears complete or not at all. Raises UsageError where it exists, unless `force`.
    """
    adopt_slurm()
    refuse_text("data", data)
    check_table(out)
    parts = _to_predict(folder, data, sets)
    world = join_ranks(parts)
    refuse_turns(parts.task)
    on_rank_zero(world.all, lambda: refuse_existing(out, force=force))
    checkpoint = on_rank_zero(world.all, lambda: choose(folder, step=step, best=best))
    build_data_and_model(parts)
    parts.report()
    over()  # an evaluation may take long
    (name,) = parts.evaluations()
    parts.data[key_of(name)] = in_order(parts.data[key_of(name)])
    reader = Reader(checkpoint)
    with ExitStack() as files, evaluating(parts, world, reader, folder.path, weights=weights) as evaluator:
        if world.is_main:
            log.info("predicting with %s", _what_is_used(checkpoint, parts, weights))
        found = predictions(evaluator, parts.task, parts.evaluation[name], world, limit=limit)
        samples = _write(out, found, world, files)
    leave(world)
    return Prediction(out, samples, reader.facts.step, world.is_main)


def _write(out: Path, found: Iterable[Sequence[Predicted]], world: World, files: ExitStack) -> int:
    """Has rank 0 write predictions as they come, all or nothing; returns the number of samples."""
    tables: list[Table] = []

    def add(parts: Sequence[Predicted]) -> None:
        for part in parts:
            tables[0].add({INDEX: np.arange(part.first, part.first + part.samples), **part.columns})

    samples = 0
    on_rank_zero(world.all, lambda: tables.append(files.enter_context(writing(out))))
    for parts in found:
        on_rank_zero(world.all, partial(add, parts))
        samples += sum(part.samples for part in parts)
    on_rank_zero(world.all, files.close)
    return samples


def _to_predict(folder: RunFolder, data: Sequence[str], sets: Sequence[str]) -> Parts:
    """The parts of a run's recipe whose one evaluation set is the dataset that `data` means."""
    names, options = ([word for word in data if ("=" in word) == with_value] for with_value in (False, True))
    folder.refuse_odd()
    name = _dataset(load_recipe(folder.resolved, sets=sets).recipe, names)
    parts = load_parts(
        folder.resolved,
        (*sets, *(f"data.{name}.{option}" for option in options)),
        trains=False,
        only=[name.removeprefix("eval.")] if name.startswith("eval.") else (),
    )
    if name == "train":
        section = parts.recipe.data.model_copy(update={"eval": parts.recipe.data.train})
        parts.loaded = replace(parts.loaded, recipe=parts.recipe.model_copy(update={"data": section}))
    return parts


def _dataset(recipe: Recipe, names: Sequence[str]) -> str:
    """The key of the dataset that is named, or of the one to evaluate on; raises UsageError where that is not one."""
    sets = [key_of(name) for name in recipe.data.evaluations]
    known = [*sets, "train"]
    if not names and len(sets) == 1:
        return sets[0]
    hints = [f"--data {name}" for name in known]
    if not names:
        what = "no [data.eval]" if not sets else "several evaluation sets"
        raise UsageError(f"the recipe has {what}, so say what to predict", hints=hints)
    if len(names) > 1:
        raise UsageError(f"--data names {' and '.join(names)}, and one dataset is predicted at a time", hints=hints)
    if names[0] not in known:
        raise UsageError(
            f"the recipe has no data {names[0]!r}", hints=[*did_you_mean(names[0], known), *hints, "--data path=…"]
        )
    return names[0]


def _what_is_used(checkpoint: Path, parts: Parts, weights: str | None = None) -> str:
    """Names the checkpoint, the callbacks whose weights are used, and the samples of each set."""
    averaging = [weights] if weights else overriding(parts.callbacks, "evaluating")
    others = f", with the weights of {', '.join(averaging)}" if averaging and weights != "model" else ""
    found = {name: parts.data[key_of(name)] for name in parts.evaluation}
    counted = [
        f"{len(data):,} samples{f' of {name}' if name else ''}"
        for name, data in found.items()
        if hasattr(data, "__len__")
    ]
    return f"{checkpoint}{others}{', on ' if counted else ''}{', '.join(counted)}"


def load_parts(source: str | Path, sets: Sequence[str], *, trains: bool = True, only: Sequence[str] = ()) -> Parts:
    """A recipe, of which nothing is built yet; raises RecipeError."""
    refuse_text("only", only)
    registry = Registry.installed()
    return Parts(load_recipe(source, sets=sets, registry=registry), registry, trains=trains, only=only)


def join_ranks(parts: Parts, *, folder: RunFolder | None = None) -> World:
    """Joins the world that the strategy finds, unless it is known already that the recipe cannot work in it."""
    foresee(parts, ranks=world_size(), folder=folder)
    if parts.found:
        build_data_and_model(parts, meta=True)  # nobody has joined: all that is wrong is told at once
        rehearse_training(parts)
    parts.report()
    allow_standing(parts.recipe.train)
    with beginning():
        joined = join(parts.recipe.train, parts.strategy)
        leaving.at_once()
        setup_logging(joined.all.rank)
        # This waits for all. What comes next may be refused on every rank: one that left would end those still joining.
        refuse_differences(joined.all, parts.loaded, parts.registry)
        compare_clocks(joined.all)
        world = parts.strategy.setup(parts.recipe.train, joined)
    if parts.trains and world.data.size != parts.batch.data_ranks:
        raise StrategyError(
            f"strategy `{parts.recipe.strategy.use}` announced {parts.batch.data_ranks} ranks that see different data, "
            f"and its `setup` made it {world.data.size}",
            hints=["this is a bug in the strategy: `data_ranks` must tell what `setup` will do"],
        )
    return world


def allow_standing(train: TrainSection) -> None:
    """Has the watch over this rank know for how long it may stand in one place."""
    phases.allow(math.inf if train.stall == "off" else train.stall.seconds)


def peers_of(recipe: Recipe, world: World) -> Peers:
    """Connects the ranks for all that is said beside training. Called on every rank."""
    return Peers.of(world.all, timedelta(seconds=recipe.train.timeout.seconds))
