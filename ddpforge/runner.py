"""The composition root: a recipe in, a trained model out. The story of a run, told once."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

from ddpforge.attempt import Attempt, Outcome, build_parts, checkpoints_of, on_every_rank
from ddpforge.checkpoint.reader import Reader
from ddpforge.components.registry import Registry
from ddpforge.interfaces import Callback, Tracker, World
from ddpforge.ranks import leaving
from ddpforge.ranks.join import join, leave
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.rank_zero import on_rank_zero
from ddpforge.ranks.writers import Peers
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.recipe.load import check_world
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import (
    RunFolder,
    papers_of,
)
from ddpforge.runs.opening import open_folder
from ddpforge.training.assemble import assemble
from ddpforge.training.parts import Parts

__all__ = ["Evaluation", "Outcome", "evaluate", "run"]

log = logging.getLogger("ddpforge")

_WRITING = 2.0  # seconds in which another rank has written status.json, when it was the first to fail


@leaving.nobody_leaves()
def run(
    source: str | Path,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
) -> Outcome:
    """Trains a recipe in the world that the launcher's environment describes; called on every rank.

    `source` is a recipe file or the name of a bundled recipe, `out` replaces its `output_dir`, and `fresh` sets an
    earlier run of this name aside instead of continuing it. Raises ForgeError for everything that can be expected
    to go wrong; a RecipeError comes before anything is started.
    """
    parts = _load(source, sets)
    folder = RunFolder.of(parts.recipe, out)
    is_new = fresh or not folder.exists()
    world = _join(parts, folder=None if fresh else folder)
    peers = _peers(parts.recipe, world)
    if is_new:
        on_every_rank(peers, lambda: build_parts(parts, world, rehearses=True))
    papers = papers_of(parts.loaded)
    with ExitStack() as claims:
        opened = on_rank_zero(
            world.all,
            lambda: open_folder(folder, papers, claims, fresh=fresh, allow_change=allow_change),
        )
        if opened.result:
            return Outcome(folder.path, opened.result, world.is_main)
        return Attempt(folder, opened, parts, papers, world, peers, is_built=is_new).run()


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found."""

    step: int
    metrics: dict[str, float]
    is_main: bool

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: a metric that is not finite is null."""
        return {"step": self.step} | {name: x if math.isfinite(x) else None for name, x in self.metrics.items()}


@leaving.nobody_leaves()
def evaluate(folder: RunFolder, checkpoint: Path, *, sets: Sequence[str] = ()) -> Evaluation:
    """Evaluates one of a run's checkpoints on the recipe's `[data.eval]`; called on every rank.

    Averaged weights are used where the recipe's callbacks evaluate with them. Writes nothing.
    """
    parts = _load(folder.resolved, sets)
    world = _join(parts, trains=False)
    parts.recipe = recipe = _dealt_to(parts.recipe, world.data.size)
    parts.build()
    parts.report()
    checkpoints = checkpoints_of(folder, recipe, world, _peers(recipe, world))
    with _hearing_how_it_ends() as started:
        trainer = assemble(parts, world, checkpoints, Tracker(), started=started)
        trainer.restore(Reader(checkpoint))
        if world.is_main:
            log.info("%s", _what_is_evaluated(checkpoint, parts))
        metrics = trainer.evaluate()
    trainer.replica.close()
    leave(world)
    return Evaluation(trainer.progress.step, metrics, world.is_main)


def _what_is_evaluated(checkpoint: Path, parts: Parts) -> str:
    """Which checkpoint, with whose weights, on how many samples."""
    averaging = [name for name, one in parts.callbacks.items() if type(one).evaluating is not Callback.evaluating]
    weights = f", with the weights of {', '.join(averaging)}" if averaging else ""
    samples = f", on {len(parts.sets[-1]):,} samples" if hasattr(parts.sets[-1], "__len__") else ""
    return f"evaluating {checkpoint}{weights}{samples}"


@contextmanager
def _hearing_how_it_ends() -> Iterator[list[Callback]]:
    """Tells callbacks, as far as they have started, how what is done with them ended."""
    started: list[Callback] = []
    try:
        yield started
    except BaseException as error:
        for callback in started:
            Attempt._try(partial(callback.on_end, error))
        raise
    for callback in started:
        callback.on_end(None)


def _load(source: str | Path, sets: Sequence[str]) -> Parts:
    registry = Registry.installed()
    return Parts(load_recipe(source, sets=sets, registry=registry), registry)


def _join(parts: Parts, *, trains: bool = True, folder: RunFolder | None = None) -> World:
    """Joins the world that the strategy finds, unless it is known already that the recipe cannot work in it."""
    parts.foresee(ranks=world_size(), trains=trains, folder=folder)
    if parts.found:
        parts.build(meta=True)  # nobody has joined: all that is wrong is told at once
        parts.rehearse()
    parts.report()
    joined = join(parts.recipe.train, parts.strategy)
    leaving.at_once()
    setup_logging(joined.all.rank)
    # What comes next may be refused on every rank: one that left now would end those that are still joining.
    joined.all.barrier()
    world = parts.strategy.setup(parts.recipe.train, joined)
    if trains:
        check_world(parts.loaded, world.data.size)
    return world


def _dealt_to(recipe: Recipe, ranks: int) -> Recipe:
    """The recipe with a training batch that fits the ranks, for who does not train."""
    train = recipe.train
    micro = train.micro_batch or -(-train.global_batch // (train.elastic_shards or ranks))
    changes = {"micro_batch": micro, "global_batch": micro * ranks, "elastic_shards": None, "last_batch": "keep"}
    return recipe.model_copy(update={"train": train.model_copy(update=changes)})


def _peers(recipe: Recipe, world: World) -> Peers:
    return Peers.of(world.all, timedelta(seconds=recipe.train.timeout.seconds))
