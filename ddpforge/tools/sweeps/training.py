"""Trains the runs of a sweep, each by a command of its own: `jobs` at a time, and none twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Literal

from ddpforge.api import RunFolder, RunSummary, snapshot, summarize
from ddpforge.errors import ExitCode, UsageError
from ddpforge.interfaces.metric_direction import lower_is_better
from ddpforge.launchers.local import check_world
from ddpforge.local_world import cores_per_rank
from ddpforge.ranks.signal_policy import received_signal
from ddpforge.runs.resume import is_finished
from ddpforge.tools.sweeps.space import SearchSpace, Variant

if TYPE_CHECKING:
    from ddpforge.components.registry import Registry
    from ddpforge.recipe import LoadedRecipe, Recipe

__all__ = ["Commands", "SweepPlan", "Trained", "devices", "mode_of", "train"]


@dataclass(frozen=True)
class SweepPlan:
    """Sweep of a recipe with checked values; `folder` contains its runs."""

    recipe: str
    space: SearchSpace
    folder: Path
    nproc: int
    base: Recipe  # with the first value of each key
    registry: Registry

    @classmethod
    def of(cls, recipe: str, space: SearchSpace, *, out: str | None, nproc: int) -> SweepPlan:
        """Checks each value by itself; raises RecipeError for an invalid one, UsageError if `name` is set."""
        from ddpforge.components.registry import Registry

        if "name" in (*space.axes, *(text.partition("=")[0].strip() for text in space.fixed)):
            raise UsageError(
                "name: the runs of a sweep are named by their values", hints=["name the sweep's folder: --out DIR"]
            )
        registry = Registry.installed()
        checked = [_checked(recipe, sets, nproc, registry) for sets in space.corners()]
        base = checked[0].recipe
        folder = Path(out) if out else RunFolder.of(base).path.with_name(f"{base.name}-sweep")
        return cls(recipe, space, folder, nproc, base, registry)

    def metric(self, named: str | None) -> str:
        """Returns the metric to compare runs: `named`, else `checkpoint.keep.monitor`, else the loss."""
        return named or self.base.checkpoint.keep.monitor or ("eval/loss" if self.base.data.eval else "train/loss")

    def split(self, variants: Sequence[Variant]) -> tuple[list[Variant], list[Trained]]:
        """Returns the runs to train, and the results of runs that have finished or diverged."""
        open_, ended = [], []
        for variant in variants:
            loaded = _checked(self.recipe, variant.sets, self.nproc, self.registry)
            folder = RunFolder(self.folder / variant.name)
            if is_finished(folder, snapshot(loaded)) or (folder.exists() and summarize(folder).state == "diverged"):
                ended.append(Trained.of(summarize(folder), self.folder / "logs" / f"{variant.name}.log"))
            else:
                open_.append(variant)
        return open_, ended


def _checked(recipe: str, sets: Sequence[str], nproc: int, registry: Registry) -> LoadedRecipe:
    from ddpforge.recipe import load_recipe

    loaded = load_recipe(recipe, sets=sets, registry=registry)
    check_world(loaded, nproc)
    return loaded


def mode_of(metric: str, named: Literal["min", "max"] | None) -> Literal["min", "max"]:
    """Returns `named`, or the better direction by the metric's name; raises UsageError if that is unknown."""
    lower = lower_is_better(metric)
    if named is None and lower is None:
        raise UsageError(f"it is unknown whether less of {metric} is better", hints=["add --mode min or --mode max"])
    return named or ("min" if lower else "max")


def devices(recipe: Recipe, *, jobs: int, nproc: int) -> list[str]:
    """Returns the GPUs for parallel runs to share; none for one run at a time, or without GPUs.

    Raises UsageError if there are too few.
    """
    if jobs == 1 or recipe.train.device == "cpu":
        return []
    from ddpforge.api import accelerators

    count = accelerators()
    if 0 < count < jobs * nproc:
        raise UsageError(
            f"{jobs} runs at a time with {nproc} GPU each need {jobs * nproc}, but there are {count}",
            hints=[f"--jobs {max(1, count // nproc)}", "or compute on the CPU: train.device=cpu"],
        )
    named = os.environ.get(_visible())
    return named.split(",")[:count] if named else [str(number) for number in range(count)]


def _visible() -> str:
    """Returns the environment variable that lists the GPUs of a process."""
    from ddpforge.ranks.devices import accelerator_kind

    kind = accelerator_kind()
    return (kind.visible if kind else None) or "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Result of a run: its state, or "refused" if it left no folder; `log` is the file with its output."""

    name: str
    state: str
    metrics: Mapping[str, float | None] = field(default_factory=dict)
    error: str | None = None
    log: Path

    @classmethod
    def of(cls, run: RunSummary, log: Path) -> Trained:
        """Returns the result of a run that has a folder."""
        return cls(name=run.folder.path.name, state=run.state, metrics=run.metrics, error=run.error, log=log)


@dataclass(frozen=True, kw_only=True)
class Commands:
    """Commands of a sweep's runs: `nproc` processes each, `jobs` runs at a time, each on `devices` of its own."""

    recipe: str
    folder: Path
    nproc: int = 1
    jobs: int = 1
    devices: Sequence[str] = ()  # GPUs, as in CUDA_VISIBLE_DEVICES; empty: runs inherit that variable

    def line(self, variant: Variant) -> list[str]:
        """Returns the command that trains or resumes a run."""
        start = ["launch", f"--nproc={self.nproc}"] if self.nproc > 1 else ["run"]
        sets = [f"--set={text}" for text in (*variant.sets, f"name={variant.name}")]
        return [sys.executable, "-P", "-m", "ddpforge", *start, self.recipe, f"--out={self.folder}", *sets]

    def variables(self, slot: int) -> dict[str, str]:
        """Returns the environment of the run in one of the `jobs` places."""
        found = {"OMP_NUM_THREADS": str(cores_per_rank(self.jobs * self.nproc)), **os.environ}
        if self.devices:
            found[_visible()] = ",".join(self.devices[slot * self.nproc : (slot + 1) * self.nproc])
        return found

    def log(self, variant: Variant) -> Path:
        """Returns the file for a run's output."""
        return self.folder / "logs" / f"{variant.name}.log"


def train(
    variants: Iterable[Variant],
    commands: Commands,
    *,
    begins: Callable[[Variant], None] = lambda _: None,
    on_result: Callable[[Variant, Trained], None] = lambda *_: None,
) -> tuple[list[Trained], bool]:
    """Trains each of `variants`; returns the results, and True if a signal requested a stop.

    A variant is taken when a place is free, so it may depend on earlier results. `begins` is called before each run and
    `on_result` after it, one at a time. After a first signal the runs save and end; a second one ends them at once.
    """
    queue = _Queue(iter(variants), commands, begins, on_result)
    places = [threading.Thread(target=queue.work, args=(slot,)) for slot in range(commands.jobs)]
    with received_signal(queue.stop):
        for place in places:
            place.start()
        for place in places:
            place.join()
    if queue.error:
        raise queue.error
    return queue.ended, queue.stopped


class _Queue:
    """Runs that wait, that train, and that have ended; several threads work on it."""

    def __init__(
        self,
        waiting: Iterator[Variant],
        commands: Commands,
        begins: Callable[[Variant], None],
        on_result: Callable[[Variant, Trained], None],
    ) -> None:
        self.ended: list[Trained] = []
        self.stopped = False
        self.error: BaseException | None = None
        self._waiting, self._commands, self._begins, self._on_result = waiting, commands, begins, on_result
        self._lock = threading.Lock()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def work(self, slot: int) -> None:
        """Trains one run after another, in one place."""
        try:
            while variant := self._next():
                self._train(variant, slot)
        except BaseException as error:
            self.error = self.error or error

    def stop(self, number: int, _: FrameType | None) -> None:
        """Requests all runs to save and end; called by a signal handler, so it takes no lock."""
        self.stopped = True
        for process in list(self._processes.values()):
            if process.poll() is None:
                process.terminate()

    def _next(self) -> Variant | None:
        with self._lock:
            if self.stopped or self.error:
                return None
            if variant := next(self._waiting, None):
                self._begins(variant)
            return variant

    def _train(self, variant: Variant, slot: int) -> None:
        log = self._commands.log(variant)
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            # A session of its own, because a terminal would send Ctrl-C to the run, too.
            process = self._processes[slot] = subprocess.Popen(
                self._commands.line(variant),
                env=self._commands.variables(slot),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
            if self.stopped:
                process.terminate()
            code = process.wait()
        trained = _outcome(self._commands.folder / variant.name, variant, log, code)
        with self._lock:
            self.ended.append(trained)
            self._on_result(variant, trained)


def _outcome(path: Path, variant: Variant, log: Path, code: int) -> Trained:
    """Returns the result from the run's folder; the error of a refused run is only at the end of its log."""
    folder = RunFolder(path)
    if folder.exists() and (code != ExitCode.USAGE or summarize(folder).state == "failed"):
        return Trained.of(summarize(folder), log)
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    said = next((line for line in reversed(lines) if "error" in line.casefold()), lines[-1] if lines else "")
    state = "preempted" if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED, -signal.SIGTERM) else "refused"
    return Trained(name=variant.name, state=state, error=said or f"exit code {code}", log=log)
