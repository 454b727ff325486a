"""Trains a recipe: the steps of a run in their order, from the recipe to the trained model."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, Never

from ddpforge.app.attempt import Attempt, Outcome
from ddpforge.app.build import build_alike, check_chosen
from ddpforge.app.choose import choose
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, PeerFailed, StoppedBeforeStart, StrategyError, UsageError
from ddpforge.interfaces import World
from ddpforge.ranks import heartbeat, process_exit
from ddpforge.ranks import join as ranks_join
from ddpforge.ranks.backend_flags import restored_backend_flags
from ddpforge.ranks.environment import environment, raising_peer_failures
from ddpforge.ranks.logs import setup_logging
from ddpforge.ranks.run_limits import seconds_of
from ddpforge.ranks.signals import StopRequests
from ddpforge.ranks.writers import WriterGroup, on_rank_zero
from ddpforge.recipe import LoadedRecipe, Recipe, load_recipe
from ddpforge.recipe.load import reject_text
from ddpforge.recipe.run_plan import StepWindow
from ddpforge.runs.environment import world_size
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.observers import ObservedRun, RunObserver, observers_of
from ddpforge.runs.resume import open_folder
from ddpforge.training.checks import check_together
from ddpforge.training.problems import Problems
from ddpforge.training.stages import Chosen

__all__ = ["Outcome", "RunOptions", "join", "peers_of", "run", "run_loaded"]


_OBJECTS = "objects: ddpforge.train(recipe, model=…); settings are keys of the recipe"


@dataclass(frozen=True)
class RunOptions:
    """Options of a run besides its recipe, see `run`; `sources` is the code of objects of Python, for its folder."""

    out: str | Path | None = None
    fresh: bool = False
    allow_change: Sequence[str] = ()
    max_time: str | None = None
    profile: str | None = None
    sources: Mapping[str, bytes] = field(default_factory=dict)

    def check(self) -> StepWindow | None:
        """Returns the steps to profile. Raises UsageError for an option of another form."""
        reject_text("allow_change", self.allow_change)
        if not isinstance(self.fresh, bool):
            raise UsageError(f"fresh={self.fresh!r}: expected True or False")
        seconds_of(self.max_time)
        return StepWindow.parse(self.profile) if self.profile else None


def run(
    recipe: str | Path | Mapping[str, Any] | LoadedRecipe,
    *,
    sets: Sequence[str] = (),
    out: str | Path | None = None,
    fresh: bool = False,
    allow_change: Sequence[str] = (),
    max_time: str | None = None,
    profile: str | None = None,
    **objects: Never,
) -> Outcome:
    """Trains a recipe with the ranks that the launcher's environment describes. Call it on every rank.

    Args:
        recipe: a recipe file, the name of a bundled recipe, a dict, or a loaded recipe.
        sets: changes to the recipe, KEY=VALUE.
        out: replaces the recipe's `output_dir`.
        fresh: rename the folder of an earlier run of this name, and start from scratch instead of resuming it.
        allow_change: recipe keys that may differ from the run that is resumed.
        max_time: stop after this time, e.g. "4h", with a checkpoint, as after a stop signal.
        profile: the steps to profile, e.g. "20..25". A trace and a table go into the run's folder.

    Raises ForgeError for all expected failures; a RecipeError is raised before anything starts. See `train` for objects
    of Python.
    """
    if objects:
        given = ", ".join(f"{name}=…" for name in objects)
        raise UsageError(
            f"`run` takes only a recipe, not {given}",
            hints=["objects: ddpforge.train(recipe, model=…); settings are keys of the recipe"],
        )
    loaded = load_recipe(recipe, sets=sets)
    with loaded.locating():
        return run_loaded(loaded, Registry.installed(), RunOptions(out, fresh, allow_change, max_time, profile))


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def run_loaded(loaded: LoadedRecipe, registry: Registry, options: RunOptions) -> Outcome:
    """Trains a loaded recipe, see `run`."""
    environment().export_variables()
    window = options.check()
    # Restarted ranks resume the run that they began as a fresh one.
    fresh = options.fresh and not environment().is_restart()
    folder, problems = RunFolder.of(loaded.recipe, options.out), Problems(loaded)
    resumes = not fresh and any(folder.checkpoints.glob("step-*"))
    chosen = choose(loaded, registry, problems, ranks=world_size(), resumes=resumes)
    check_chosen(chosen, problems)
    with StopRequests() as stop, ExitStack() as claims, raising_peer_failures():
        world = join(chosen)
        peers = peers_of(chosen.recipe, world)
        _leave_if_asked(stop, world, peers)
        check_together("folder", folder.path.parent, peers.ranks)
        fresh = all(peers.ranks.all_gather_object(fresh))  # on a machine that joins later, `is_restart` is False
        observers = observers_of(ObservedRun(folder=folder, recipe=chosen.recipe, world=world, window=window))
        on_rank_zero(world.global_ranks, partial(_before_open, observers, fresh=fresh))

        is_new = fresh or not folder.exists()
        build = partial(build_alike, chosen, world, peers, problems, samples=is_new)
        built = build() if is_new else None  # before the folder: a new run that cannot be built leaves none
        taken = snapshot(chosen.loaded, options.sources)
        opened = on_rank_zero(
            world.global_ranks,
            lambda: open_folder(folder, taken, claims, fresh=fresh, allow_change=options.allow_change),
        )
        environment().on_begin()
        if opened.result:
            for observer in observers if world.is_rank_zero else ():
                observer.on_finished()
            return Outcome(folder.path, opened.result, world.is_rank_zero)
        return Attempt(
            folder,
            opened,
            chosen,
            taken,
            world,
            peers,
            build=lambda: built or build(),
            claims=claims,
            allow_change=options.allow_change,
            observers=observers,
            max_time=options.max_time,
        ).run()


def _before_open(observers: Sequence[RunObserver], *, fresh: bool) -> None:
    for observer in observers:
        observer.before_open(fresh=fresh)


def join(chosen: Chosen) -> World:
    """Joins the process group, checks that all hosts agree, and sets up the strategy."""
    timeout = chosen.recipe.train.hang_timeout
    heartbeat.set_hang_timeout(math.inf if timeout == "off" else timeout.seconds)
    with raising_peer_failures():
        joined = ranks_join.join(chosen.recipe.train, chosen.strategy)
        process_exit.skip_interpreter_cleanup()
        setup_logging(joined.global_ranks.rank)
        # This waits for all ranks. Later checks may raise on every rank, and a rank that leaves while others still
        # join would make those fail.
        check_together("joined", chosen, joined.global_ranks)
        world = chosen.strategy.setup(chosen.recipe.train, joined)
    if chosen.trains and world.dp_ranks.size != chosen.batch.data_ranks:
        raise StrategyError(
            f"strategy `{chosen.recipe.strategy.use}` announced {chosen.batch.data_ranks} data-parallel ranks, "
            f"but its `setup` made {world.dp_ranks.size}",
            hints=["this is a bug in the strategy: `data_ranks` must return the number that `setup` makes"],
        )
    return world


def peers_of(recipe: Recipe, world: World) -> WriterGroup:
    """Connects the ranks for exchanges outside of training steps. Call it on every rank."""
    return WriterGroup.of(world.global_ranks, timedelta(seconds=recipe.train.collective_timeout.seconds))


def _leave_if_asked(stop: StopRequests, world: World, peers: WriterGroup) -> None:
    """Raises on all ranks if any rank received a stop request before training."""
    if any(peers.ranks.all_gather_object(stop.requested)):
        ranks_join.leave(world)
        raised = StoppedBeforeStart if world.is_rank_zero else partial(PeerFailed, ExitCode.PREEMPTED)
        raise raised("stopped before training began", hints=["nothing is lost: the same command starts it again"])
