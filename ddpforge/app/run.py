"""Trains a recipe: the steps of a run in their order, from the recipe to the trained model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path

from ddpforge.app.attempt import Attempt, Outcome
from ddpforge.app.build import build_alike, check_chosen
from ddpforge.app.choose import choose
from ddpforge.app.hosts import compare_clocks, refuse_differences, share_folder
from ddpforge.app.planned import Room
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, PeerFailed, Postponed, StrategyError
from ddpforge.interfaces import World
from ddpforge.launchers.slurm import adopt_slurm
from ddpforge.launchers.verdict import has_begun, record_begun
from ddpforge.preflight import Problems
from ddpforge.ranks import join as ranks_join
from ddpforge.ranks import leaving, phases
from ddpforge.ranks.arithmetic import settings_restored
from ddpforge.ranks.halt import seconds_of
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.signals import StopRequests
from ddpforge.ranks.writers import Peers, on_rank_zero
from ddpforge.recipe import Recipe, load_recipe
from ddpforge.recipe.load import refuse_text
from ddpforge.recipe.plan import Window
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.mirror import Mirror
from ddpforge.runs.opening import open_folder
from ddpforge.training.stages import Chosen
from ddpforge.watchdog.watch import beginning

__all__ = ["Outcome", "join", "peers_of", "run"]


@leaving.nobody_leaves()
@settings_restored()
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
    """Trains a recipe with the ranks that the launcher's environment describes. Call it on every rank.

    Args:
        source: a recipe file, or the name of a bundled recipe.
        sets: changes to the recipe, KEY=VALUE.
        out: replaces the recipe's `output_dir`.
        fresh: rename the folder of an earlier run of this name, and start from scratch instead of resuming it.
        allow_change: recipe keys that may differ from the run that is resumed.
        max_time: stop after this time, e.g. "4h", with a checkpoint, as after a stop signal.
        profile: the steps to profile, e.g. "20..25". A trace and a table go into the run's folder.

    Raises ForgeError for all expected failures; a RecipeError is raised before anything starts.
    """
    adopt_slurm()
    refuse_text("allow_change", allow_change)
    seconds_of(max_time)  # raises UsageError
    window = Window.parse(profile) if profile else None
    fresh = fresh and not has_begun()  # restarted ranks resume the run that they began as a fresh one
    room = Room()

    registry = Registry.installed()
    loaded = load_recipe(source, sets=sets, registry=registry)
    folder, problems = RunFolder.of(loaded.recipe, out), Problems(loaded)
    resumes = not fresh and any(folder.checkpoints.glob("step-*"))
    chosen = choose(loaded, registry, problems, ranks=world_size(), resumes=resumes)
    check_chosen(chosen, problems)
    with StopRequests() as stop, ExitStack() as claims, beginning():
        world = join(chosen)
        peers = peers_of(chosen.recipe, world)
        _leave_if_asked(stop, world, peers)
        share_folder(folder.path.parent, peers.ranks)
        fresh = all(peers.ranks.everyone(fresh))  # on a machine that joins later, `has_begun` is False
        mirror = Mirror.of(folder, chosen.recipe.checkpoint) if world.is_main else None
        on_rank_zero(world.all, lambda: mirror.fetch(fresh=fresh) if mirror else None)

        is_new = fresh or not folder.exists()
        build = partial(build_alike, chosen, world, peers, problems, samples=is_new)
        built = build() if is_new else None  # before the folder: a new run that cannot be built leaves none
        taken = snapshot(chosen.loaded)
        opened = on_rank_zero(
            world.all, lambda: open_folder(folder, taken, claims, fresh=fresh, allow_change=allow_change)
        )
        record_begun()
        if opened.result:
            if mirror:
                mirror.complete()
            return Outcome(folder.path, opened.result, world.is_main)
        return Attempt(
            folder,
            opened,
            chosen,
            taken,
            world,
            peers,
            build=lambda: built or build(),
            claims=claims,
            allow_change=allow_change,
            room=room,
            mirror=mirror,
            max_time=max_time,
            window=window,
        ).run()


def join(chosen: Chosen) -> World:
    """Joins the process group, checks that all hosts agree, and sets up the strategy."""
    stall = chosen.recipe.train.hang_timeout
    phases.allow(math.inf if stall == "off" else stall.seconds)
    with beginning():
        joined = ranks_join.join(chosen.recipe.train, chosen.strategy)
        leaving.at_once()
        setup_logging(joined.all.rank)
        # This waits for all ranks. Later checks may raise on every rank, and a rank that leaves while others still
        # join would make those fail.
        refuse_differences(joined.all, chosen.loaded, chosen.registry)
        compare_clocks(joined.all)
        world = chosen.strategy.setup(chosen.recipe.train, joined)
    if chosen.trains and world.data.size != chosen.batch.data_ranks:
        raise StrategyError(
            f"strategy `{chosen.recipe.strategy.use}` announced {chosen.batch.data_ranks} data-parallel ranks, "
            f"but its `setup` made {world.data.size}",
            hints=["this is a bug in the strategy: `data_ranks` must return the number that `setup` makes"],
        )
    return world


def peers_of(recipe: Recipe, world: World) -> Peers:
    """Connects the ranks for exchanges outside of training steps. Call it on every rank."""
    return Peers.of(world.all, timedelta(seconds=recipe.train.collective_timeout.seconds))


def _leave_if_asked(stop: StopRequests, world: World, peers: Peers) -> None:
    """Raises on all ranks if any rank received a stop request before training."""
    if any(peers.ranks.everyone(stop.requested)):
        ranks_join.leave(world)
        raised = Postponed if world.is_main else partial(PeerFailed, ExitCode.PREEMPTED)
        raise raised("stopped before training began", hints=["nothing is lost: the same command starts it again"])
