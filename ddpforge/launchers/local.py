"""Starts a recipe's ranks on this machine: checks the recipe before, and reports failures that ranks could not."""

from __future__ import annotations

import os
import shlex
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, ForgeError, RecipeError, UsageError
from ddpforge.launchers import process
from ddpforge.launchers.exit_record import LaunchExit, RankDeath
from ddpforge.launchers.nodes import NODES, Nodes, default_id, fixed_number
from ddpforge.launchers.rendezvous import check_loopback, reject_held_ports
from ddpforge.launchers.store import store_at
from ddpforge.launchers.torchrun import names_rendezvous, torchrun_command, variables_for
from ddpforge.ranks.run_limits import STARTED, seconds_of
from ddpforge.recipe.run_plan import StepWindow
from ddpforge.runs.folder import RunFolder, Status, in_words, snapshot

if TYPE_CHECKING:
    from ddpforge.recipe import LoadedRecipe

__all__ = ["LaunchResult", "LaunchSpec", "LocalLaunch", "check_world", "prepare_launch"]

_MEETING = 600.0  # seconds: torchrun's timeout for a rendezvous


@dataclass(frozen=True)
class LaunchSpec:
    """Ranks to start: `nproc` on each of `nodes`, by default one per GPU, or one. `flags` are passed to torchrun."""

    nproc: int | None = None
    nodes: Nodes = field(default_factory=Nodes)
    run_id: str | None = None
    max_restarts: int | None = None
    flags: Sequence[str] = ()


@dataclass(frozen=True)
class LaunchResult:
    """Result of a launch; `unreported` is the failure of a rank that could not report it."""

    ended: LaunchExit
    folder: RunFolder
    unreported: ForgeError | None


@dataclass(frozen=True)
class LocalLaunch:
    """Checked recipe, and the launcher's command that trains it."""

    folder: RunFolder
    command: list[str]
    nproc: int
    nodes: Nodes
    patience: float
    keeps: bool = True  # False if ranks write nothing (a dry run)
    finished: Status | None = None  # status of the run if it has finished, so that its ranks had nothing to train
    variables: Mapping[str, str] = field(default_factory=dict)  # environment variables about the other machines

    def run(self) -> LaunchResult:
        """Starts the ranks and waits for their end; starts none if the run has finished."""
        folder = self.folder
        if self.finished:
            return LaunchResult(LaunchExit(0, ranks=frozenset(range(self.nproc)), reported=True), folder, None)
        if self.nodes.endpoint and self.nodes.is_first:
            reject_held_ports(self.nodes.endpoint)
        if not self.nodes.endpoint:
            check_loopback()
        before = folder.status_version()
        ended = process.start(
            self.command,
            nproc=self.nproc,
            patience=self.patience,
            variables={STARTED: str(time.time()), **self.variables},
            store=store_at(self.nodes.store, here=self.nodes.is_first),
        )
        if not self.keeps:
            return LaunchResult(ended, folder, None if ended.death is None else _killed(ended.death))
        failure = None
        if folder.status_version() != before:
            ended, failure = _as_written(ended, folder), folder.read_failure()
        return LaunchResult(ended, folder, _unreported(ended, folder, failure))

    def result(self) -> str:
        """Returns the result of a run that has finished, as the run printed it."""
        assert self.finished is not None
        return f"{self.folder.path}: {in_words(self.finished)}"

    def shown(self) -> str:
        """Returns the command with its environment variables, as a line for a shell."""
        variables = {name: os.environ.get(name) or value for name, value in variables_for(self.nproc).items()}
        return " ".join([*(f"{name}={value}" for name, value in variables.items()), shlex.join(self.command)])


def prepare_launch(
    recipe: str,
    ranks: LaunchSpec,
    *,
    sets: Sequence[str],
    out: str | None,
    fresh: bool,
    allow_change: Sequence[str],
    max_time: str | None = None,
    profile: str | None = None,
    dry_run: int | None = None,
    as_json: bool = False,
) -> LocalLaunch:
    """Checks everything that can be checked before a process starts, and returns the command to start.

    For the arguments see `ddpforge.run`; with `dry_run` the ranks train this number of steps and write nothing. Raises
    RecipeError, or UsageError for the other arguments.
    """
    seconds_of(max_time)  # raises UsageError
    if profile:
        StepWindow.parse(profile)
    loaded, folder, nproc = _checked(recipe, ranks, sets, out)
    flags = list(ranks.flags)
    if not names_rendezvous(flags):
        flags = [*ranks.nodes.flags(ranks.run_id or default_id(folder.path.name)), *flags]
    if ranks.max_restarts is not None:
        flags.append(f"--max-restarts={ranks.max_restarts}")

    nodes = ranks.nodes
    if fresh and nodes.fewest < nodes.most:
        raise UsageError(
            f"--fresh with --nnodes {nodes.fewest}:{nodes.most}: a machine that joins later would start from scratch",
            hints=["give the run another name with --set name=…, or rename the earlier run's folder"],
        )
    arguments = [recipe, *(f"--set={value}" for value in sets), *(f"--allow-change={key}" for key in allow_change)]
    arguments += [f"--out={out}"] if out else []
    arguments += ["--fresh"] if fresh else []
    arguments += [f"--max-time={max_time}"] if max_time else []
    arguments += [f"--profile={profile}"] if profile else []
    arguments += [f"--dry-run={dry_run}"] if dry_run else []
    arguments += ["--json"] if as_json else []
    command = torchrun_command(arguments, nproc=nproc, flags=flags)
    restarts = any("restarts" in flag for flag in flags) or ranks.nodes.fewest < ranks.nodes.most
    # When ranks are restarted, the launcher waits for a new rendezvous, which is not a failure.
    patience = process.PATIENCE + (_MEETING if restarts else 0.0)
    variables = nodes.variables()
    if number := fixed_number(ranks.flags):
        variables[NODES] = str(number)
    # The ranks of a run with a mirror complete its copies; other machines, named by flags too, start their own ranks.
    starts = fresh or dry_run or loaded.recipe.checkpoint.mirror or nodes.endpoint or nodes.most > 1 or ranks.flags
    finished = None
    if not starts and folder.exists():
        from ddpforge.runs.resume import finished_before  # here, because a new run needs none of it

        finished = finished_before(folder, snapshot(loaded))
    return LocalLaunch(
        folder, command, nproc, nodes, patience, keeps=not dry_run, finished=finished, variables=variables
    )


def _checked(
    recipe: str, ranks: LaunchSpec, sets: Sequence[str], out: str | None
) -> tuple[LoadedRecipe, RunFolder, int]:
    """Returns the recipe, the run's folder and the number of ranks here. Raises RecipeError if they do not fit."""
    from ddpforge.recipe import load_recipe

    registry = Registry.installed()
    if "torch" not in sys.modules:
        registry = registry.only_own()  # importing plugins may take seconds: the ranks check them
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    nproc = ranks.nproc or (loaded.recipe.train.device != "cpu" and _gpus()) or 1
    if not any(flag.startswith("--nnodes") for flag in ranks.flags):
        for world in ranks.nodes.worlds(nproc):
            check_world(loaded, world)
    return loaded, RunFolder.of(loaded.recipe, out), nproc


def check_world(loaded: LoadedRecipe, nproc: int) -> None:
    """Raises RecipeError if the global batch cannot be split over the data-parallel ranks."""
    from ddpforge.recipe.load import check_world

    # Only the strategy knows the number of data-parallel ranks, and the import of a plugin's strategy may take seconds.
    # That number divides `nproc`, so a batch that fits `nproc` ranks fits: build the strategy only if it does not.
    try:
        check_world(loaded, nproc)
    except RecipeError:
        from ddpforge.components.registry import build

        strategy = build(Registry.installed(), "strategy", loaded.recipe.strategy)
        check_world(loaded, strategy.data_ranks(nproc))


def _as_written(ended: LaunchExit, folder: RunFolder) -> LaunchExit:
    """Uses status.json if no rank reported an exit code; also records a usage error of a later restart."""
    status = folder.status()
    if status is None or ended.code == 0:
        return ended
    if ended.reported and ended.code == ExitCode.USAGE and status["exit_code"] != ended.code:
        error = ended.error or "the ranks refused to continue"
        folder.amend_failure(error, ended.code, states=("running", "failed", "preempted"))
    if not ended.reported and ended.death is None and status["exit_code"]:
        return replace(ended, code=status["exit_code"])
    return ended


def _unreported(ended: LaunchExit, folder: RunFolder, failure: Mapping[str, Any] | None) -> ForgeError | None:
    """Returns the failure of a rank that could not report it. Records it in the folder if no watchdog has done so."""
    from ddpforge.ranks.failures import recorded_causes

    watched = bool(ended.code and failure and failure["told_by"] == "watch")
    if ended.watched and failure is None:
        if folder.exists():
            folder.amend_failure(ended.watched, ended.code)
        return ForgeError(ended.watched)
    died = ended.death is not None and failure is not None and failure["rank"] == ended.death.rank
    if watched and failure and not (died and "without a report" in failure["error"]):
        return ForgeError(failure["error"], hints=[f"the state of all ranks: {folder.failure}"])
    if ended.death is None or (recorded_causes(folder.logs) and not watched):
        return None
    killed = _killed(ended.death)
    if folder.exists():
        folder.amend_failure(killed.message, ended.code)
    return killed


def _killed(death: RankDeath) -> ForgeError:
    out_of_memory = ["the host may have been out of memory: see `dmesg`"] if death.signal == signal.SIGKILL else []
    return ForgeError(f"rank {death.rank} was {death}", hints=out_of_memory)


def _gpus() -> int:
    from ddpforge.ranks.devices import accelerators

    return accelerators()
