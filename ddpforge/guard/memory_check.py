"""Compares the memory of a run with its plan, which `ddpforge plan` computes in a separate process."""

from __future__ import annotations

import json
import logging
import resource
import shlex
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch
from pydantic import ByteSize
from typing_extensions import override

from ddpforge import disk
from ddpforge.errors import OutOfMemory
from ddpforge.features.plan_process import PlanProcess
from ddpforge.interfaces import World, device_kind
from ddpforge.local_world import local_world_size
from ddpforge.ranks import heartbeat
from ddpforge.recipe.schema import Recipe
from ddpforge.runs.folder import RunFolder
from ddpforge.runs.observers import ObservedRun, RunObserver

if TYPE_CHECKING:
    from ddpforge.features.memory_tracker import MemoryTracker

__all__ = ["MemoryBudget", "MemoryCheck", "MemoryObserver", "is_enabled", "with_oom_advice"]

log = logging.getLogger("ddpforge")

_SMALL = 1_000_000  # parameters; "auto" does not check the plan of a smaller model
_MEASURED = 2  # the step of an attempt that is measured: from then on there is optimizer state
_LARGEST = 0.1  # relative difference; a larger one is logged
_LONGEST = 300.0  # seconds that a run waits for its plan when it ends
_LESS = 0.9  # share of the planned memory to aim for, if a plan that should fit did not
_PATIENCE = 120.0  # seconds that a failed run waits for the plan
_FRAGMENTS = 0.1  # share of allocated memory that the CUDA caching allocator loses to fragmentation


def is_enabled(recipe: Recipe, parameters: int) -> bool:
    """True if the run's memory is compared with its plan; the same on every rank."""
    if recipe.train.compile != "off":  # compiled steps need a different amount of memory
        return False
    return recipe.track.memory_check == "on" or (recipe.track.memory_check == "auto" and parameters >= _SMALL)


class MemoryObserver(RunObserver):
    """Memory of a step next to its plan, and settings that fit if memory is full."""

    def __init__(self, run: ObservedRun) -> None:
        self._run, self._budget = run, MemoryBudget()

    @classmethod
    @override
    def of(cls, run: ObservedRun) -> Self:
        return cls(run)

    @override
    def around(self, parameters: int) -> MemoryCheck | None:
        run = self._run
        return MemoryCheck(run.folder, run.world, run.recipe) if is_enabled(run.recipe, parameters) else None

    @override
    def explain(self, error: BaseException) -> BaseException:
        return with_oom_advice(error, self._run.folder, self._run.world, self._run.recipe, self._budget)


class MemoryCheck:
    """Compares the peak memory of an attempt's second step with the plan; writes memory.json.

    The peak is that of the rank with the largest one: on CPUs the bytes of all live tensors, on CUDA
    `max_memory_allocated` so far. Rank 0 starts the plan in a process of low priority. A difference of more than 10 %
    is logged as a warning. The trainer calls `before` at every step.
    """

    def __init__(self, folder: RunFolder, world: World, recipe: Recipe) -> None:
        self._folder, self._world, self._recipe = folder, world, recipe
        self._begun = 0  # steps of this attempt
        self._life = ExitStack()
        self._ledger: MemoryTracker | None = None
        self._plan: PlanProcess | None = None
        self._measured: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the plan if the recipe has `track.memory_check = "on"`; otherwise ends the plan's process."""
        self._life.close()
        if self._plan and kind is None and self._recipe.track.memory_check == "on":
            self._plan.wait(_LONGEST)
            self._look()
        if self._plan:
            self._plan.end()

    def before(self, step: int) -> None:
        """Starts or ends the measurement; called before step `step`."""
        self._begun += 1
        if self._begun == _MEASURED:
            self._measure()
        elif self._begun == _MEASURED + 1:
            self._compare(step - 1)
        elif self._plan:
            self._look()

    def close(self, step: int) -> None:
        """Ends the measurement if step 2 was the last; called after training, with the number of the next step."""
        if self._begun == _MEASURED:
            self._compare(step - 1)

    def _measure(self) -> None:
        from ddpforge.features.memory_tracker import MemoryTracker  # a slow import that most runs do not need

        if device_kind(self._world.device).is_host:
            self._ledger = self._life.enter_context(MemoryTracker(_phase, real=True))

    def _compare(self, step: int) -> None:
        self._life.close()
        mine = (
            (self._ledger.peak + self._ledger.older, self._ledger.peak_phase)
            if self._ledger
            else (device_kind(self._world.device).peak_memory(self._world.device) or 0, None)
        )
        self._ledger = None
        found = self._world.global_ranks.all_gather_object(mine)
        if self._world.is_rank_zero:
            kind = device_kind(self._world.device)
            largest, phase = max(found, key=lambda one: one[0])
            self._measured = {
                "step": step,
                "of": "live tensors" if kind.is_host else f"torch.{kind.type}'s allocator",
                "peak": largest,
                "phase": phase,
                "ranks": [peak for peak, _ in found],
            }
            self._write(None, None)
            self._plan = PlanProcess(self._folder.resolved, self._world.global_ranks.size)
            self._plan.give_way()

    def _look(self) -> None:
        if self._plan is None or not self._plan.is_over:
            return
        said, self._plan = self._plan.said(), None
        if not said:
            log.warning("no plan to compare memory with: see the error of `ddpforge plan %s`", self._folder.resolved)
            return
        (planned,) = said
        peak, measured = planned["peak"], self._measured["peak"]
        in_step = self._measured["phase"] not in ("eval", "save")
        difference = peak / measured - 1 if peak and measured and in_step else None
        self._write(planned, difference)
        if difference is not None and abs(difference) > _LARGEST:
            log.warning(
                "memory: the plan has a peak of %s per rank, but step %d had %s (%s): see %s",
                *(_size(peak), self._measured["step"], _size(measured), self._measured["of"], self._folder.memory),
            )

    def _write(self, planned: dict[str, Any] | None, difference: float | None) -> None:
        found = {"measured": self._measured, "planned": planned, "difference": difference}
        try:
            disk.replace(self._folder.memory, f"{json.dumps(found, indent=2)}\n".encode())
        except OSError as error:  # training continues without memory.json
            log.warning("%s was not written: %s", self._folder.memory, error)


class MemoryBudget:
    """Memory that tensors may use in this process. Create it before the first tensor."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info()

    def bytes(self, device: torch.device) -> int:
        """Returns the bytes of current tensors plus free memory; on a device minus its allocator's fragmentation."""
        kind = device_kind(device)
        if not kind.is_host:
            return int(kind.unused_memory(device) / (1 + _FRAGMENTS))
        now = psutil.Process().memory_info()
        ranks = local_world_size()
        there: list[int] = [now.rss - self._before.rss + psutil.virtual_memory().available // ranks]
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            there.append(limit - self._before.vms)
        return max(1, min(there))


def with_oom_advice(
    error: BaseException, folder: RunFolder, world: World, recipe: Recipe, room: MemoryBudget
) -> BaseException:
    """Returns `error`; if it is OutOfMemory, with the planned memory need and settings that would fit.

    Returns it unchanged if the plan fails. With `track.memory_check = "off"` it only adds the command that makes the
    plan.
    """
    if not isinstance(error, OutOfMemory) or not folder.resolved.exists():
        return error
    there = room.bytes(world.device)
    # A plan takes a gigabyte of host memory, which may be full, and minutes in which the run's devices wait.
    if recipe.track.memory_check == "off":
        command = f"ddpforge plan {shlex.quote(str(folder.resolved))} --ranks {world.global_ranks.size}"
        budget = _size(there).replace(" ", "")
        hint = f"for the memory of a step and for settings that fit, run: {command} --memory {budget}"
        return _caused(OutOfMemory(error.message, hints=[*error.hints, hint]), error)
    log.info("memory is full: looking for settings that fit")
    planned = _planned(folder.resolved, world.global_ranks.size, there)
    if planned is None or planned["peak"] is None:
        return error
    needed, about = planned["peak"], ""
    if needed <= there / 2:
        about = ": the plan of a step does not explain this; it may be an evaluation"
    elif needed <= there:
        about = ", some of it lost to fragmentation"
        planned = _planned(folder.resolved, world.global_ranks.size, int(needed * _LESS)) or planned
    said = OutOfMemory(
        f"{error.message}\nby the plan a step needs {_size(needed)} for tensors on a rank; available: "
        f"{_size(there)}{about}",
        hints=[_hint(remedy) for remedy in planned["remedies"]] or error.hints,
    )
    return _caused(said, error)


def _caused(said: OutOfMemory, error: OutOfMemory) -> OutOfMemory:
    said.__cause__ = error.__cause__
    return said


def _planned(recipe: Path, ranks: int, budget: int) -> dict[str, Any] | None:
    plan = PlanProcess(recipe, ranks, "--memory", str(budget))
    plan.wait(_PATIENCE)
    said = plan.said() if plan.is_over else []
    plan.end()
    return said[0] if said else None


def _hint(remedy: Mapping[str, Any]) -> str:
    changes = " and ".join(f"{key} = {value}" for key, value in remedy["sets"].items())
    return f"set {changes}: {_size(remedy['needs'])} by the plan"


def _phase() -> str:
    return heartbeat.NAMES[heartbeat.current().phase]


def _size(count: int) -> str:
    return ByteSize(count).human_readable(decimal=True, separator=" ")
