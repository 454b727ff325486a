"""Holds a run against its plan, which `ddpforge plan` makes of its recipe in a process of its own."""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import shlex
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import psutil
import torch
from pydantic import ByteSize

from ddpforge import disk
from ddpforge.cores import ranks_here
from ddpforge.errors import OutOfMemory
from ddpforge.interfaces import World
from ddpforge.ranks import phases
from ddpforge.recipe.schema import Recipe
from ddpforge.runs.folder import RunFolder
from ddpforge.training.contract import Size

if TYPE_CHECKING:
    from ddpforge.training.ledger import Ledger

__all__ = ["PlanCheck", "Room", "advised", "compares"]

log = logging.getLogger("ddpforge")

_SMALL = 1_000_000  # parameters of a model whose memory is nobody's worry
_MEASURED = 2  # the step of an attempt that is measured: the optimizer's state is there
_LARGEST = 0.1  # difference that nobody is told of
_LONGEST = 300.0  # seconds that a run waits for its plan when it ends
_LESS = 0.9  # of a plan that should have fitted and did not
_PATIENCE = 120.0  # seconds that people wait to hear why a run ended
_NICE = 19
_FRAGMENTS = 0.1  # of what lives, that the caching allocator of a GPU cannot hand out again
_LAUNCHERS = re.compile(r"(LOCAL_)?(RANK|WORLD_SIZE)|(MASTER|GROUP|ROLE|TORCHELASTIC|ACCELERATE)_.*")


def compares(recipe: Recipe, size: Size) -> bool:
    """True if a run is to be held against its plan: the same on every rank."""
    if recipe.train.compile != "off":  # compiled steps take other memory
        return False
    return recipe.track.memory_check == "on" or (recipe.track.memory_check == "auto" and size.all >= _SMALL)


class PlanCheck:
    """Measures the second step of an attempt, and writes beside it what was planned; told of every step that comes.

    On CPUs the bytes are those of all tensors that live at the largest moment of the step, on CUDA the most that the
    allocator has given out so far; both of the rank that has most. The plan is made by rank 0, in a process that gives
    way to all others. Where planned and measured differ by more than a tenth, the log says so.
    """

    def __init__(self, folder: RunFolder, world: World, recipe: Recipe) -> None:
        self._folder, self._world, self._recipe = folder, world, recipe
        self._begun = 0  # steps of this attempt
        self._life = ExitStack()
        self._ledger: Ledger | None = None
        self._plan: _Plan | None = None
        self._measured: dict[str, Any] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Waits for the plan where the recipe asks for it; else it is given up."""
        self._life.close()
        if self._plan and kind is None and self._recipe.track.memory_check == "on":
            self._plan.wait(_LONGEST)
            self._look()
        if self._plan:
            self._plan.end()

    def before(self, step: int) -> None:
        """The next step is `step`."""
        self._begun += 1
        if self._begun == _MEASURED:
            self._measure()
        elif self._begun == _MEASURED + 1:
            self._compare(step - 1)
        elif self._plan:
            self._look()

    def close(self, step: int) -> None:
        """No step follows; the next one would have been `step`."""
        if self._begun == _MEASURED:
            self._compare(step - 1)

    def _measure(self) -> None:
        from ddpforge.training.ledger import Ledger  # it takes a while, and most runs do without

        if self._world.device.type == "cpu":
            self._ledger = self._life.enter_context(Ledger(_phase, real=True))

    def _compare(self, step: int) -> None:
        self._life.close()
        mine = (
            (self._ledger.peak + self._ledger.older, self._ledger.peak_phase)
            if self._ledger
            else (torch.cuda.max_memory_allocated(self._world.device), None)
        )
        self._ledger = None
        found = self._world.all.everyone(mine)
        if self._world.is_main:
            largest, phase = max(found, key=lambda one: one[0])
            self._measured = {
                "step": step,
                "of": "live tensors" if self._world.device.type == "cpu" else "torch.cuda's allocator",
                "peak": largest,
                "phase": phase,
                "ranks": [peak for peak, _ in found],
            }
            self._write(None, None)
            self._plan = _Plan(self._folder.resolved, self._world.all.size)
            self._plan.give_way()

    def _look(self) -> None:
        if self._plan is None or not self._plan.is_over:
            return
        said, self._plan = self._plan.said(), None
        if not said:
            log.warning("the plan to hold this run against failed: see `ddpforge plan %s`", self._folder.resolved)
            return
        (planned,) = said
        peak, measured = planned["peak"], self._measured["peak"]
        in_step = self._measured["phase"] not in ("eval", "save")
        difference = peak / measured - 1 if peak and measured and in_step else None
        self._write(planned, difference)
        if difference is not None and abs(difference) > _LARGEST:
            log.warning(
                "memory: the plan has %s on a rank at the largest moment of a step, and step %d had %s (%s): see %s",
                *(_size(peak), self._measured["step"], _size(measured), self._measured["of"], self._folder.memory),
            )

    def _write(self, planned: dict[str, Any] | None, difference: float | None) -> None:
        found = {"measured": self._measured, "planned": planned, "difference": difference}
        try:
            disk.replace(self._folder.memory, f"{json.dumps(found, indent=2)}\n".encode())
        except OSError as error:  # no reason to stop training
            log.warning("%s was not written: %s", self._folder.memory, error)


class Room:
    """The memory that tensors may take in this process: what was free when it was made, before there were any."""

    def __init__(self) -> None:
        self._before = psutil.Process().memory_info()

    def bytes(self, device: torch.device) -> int:
        """The bytes that tensors take now and that are free beside them; on a GPU without what the allocator loses."""
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            return int((free + torch.cuda.memory_reserved(device)) / (1 + _FRAGMENTS))
        now = psutil.Process().memory_info()
        ranks = ranks_here()
        there: list[int] = [now.rss - self._before.rss + psutil.virtual_memory().available // ranks]
        limit, _ = resource.getrlimit(resource.RLIMIT_AS)
        if limit != resource.RLIM_INFINITY:
            there.append(limit - self._before.vms)
        return max(1, min(there))


def advised(error: BaseException, folder: RunFolder, world: World, recipe: Recipe, room: Room) -> BaseException:
    """Returns `error`, or if it is an OutOfMemory one that says what the plan does: what is needed, and what fits.

    It stays as it is if no plan can be made. With `track.memory_check = "off"` none is: a plan takes a gigabyte of the
    host's memory, which may be the full one, and minutes in which the run's devices wait. The error then names the
    command.
    """
    if not isinstance(error, OutOfMemory) or not folder.resolved.exists():
        return error
    there = room.bytes(world.device)
    if recipe.track.memory_check == "off":
        command = f"ddpforge plan {shlex.quote(str(folder.resolved))} --ranks {world.all.size}"
        budget = _size(there).replace(" ", "")
        hint = f"see what a step needs, and which changes fit: {command} --memory {budget}"
        return _caused(OutOfMemory(error.message, hints=[*error.hints, hint]), error)
    log.info("memory is full: looking for changes that fit")
    planned = _planned(folder.resolved, world.all.size, there)
    if planned is None or planned["peak"] is None:
        return error
    needed, about = planned["peak"], ""
    if needed <= there / 2:
        about = ": something else than a planned step has filled it, an evaluation perhaps"
    elif needed <= there:
        about = ", of which some is lost in small pieces"
        planned = _planned(folder.resolved, world.all.size, int(needed * _LESS)) or planned
    said = OutOfMemory(
        f"{error.message}\nby the plan a step needs {_size(needed)} for tensors on a rank, and there were "
        f"{_size(there)}{about}",
        hints=[_hint(remedy) for remedy in planned["remedies"]] or error.hints,
    )
    return _caused(said, error)


def _caused(said: OutOfMemory, error: OutOfMemory) -> OutOfMemory:
    said.__cause__ = error.__cause__
    return said


def _planned(recipe: Path, ranks: int, budget: int) -> dict[str, Any] | None:
    plan = _Plan(recipe, ranks, "--memory", str(budget))
    plan.wait(_PATIENCE)
    said = plan.said() if plan.is_over else []
    plan.end()
    return said[0] if said else None


def _hint(remedy: Mapping[str, Any]) -> str:
    changes = " and ".join(f"{key} = {value}" for key, value in remedy["sets"].items())
    return f"set {changes}: {_size(remedy['needs'])} by the plan"


class _Plan:
    """A plan that is being made; it takes no GPU."""

    def __init__(self, recipe: Path, ranks: int, *options: str) -> None:
        plan = ("-P", "-m", "ddpforge", "plan", str(recipe), "--ranks", str(ranks), "--json")
        command = [sys.executable, *plan, *options]
        alone = {name: value for name, value in os.environ.items() if not _LAUNCHERS.fullmatch(name)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,  # of a few kB, which a pipe holds
            stderr=subprocess.DEVNULL,
            env=alone | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        )

    def give_way(self) -> None:
        """Takes from now on what other processes leave of the CPUs."""
        with suppress(psutil.Error):  # it may have ended
            psutil.Process(self._process.pid).nice(_NICE)

    @property
    def is_over(self) -> bool:
        """True once it is made, or failed."""
        return self._process.poll() is not None

    def wait(self, seconds: float) -> None:
        """Waits until it is over, but not longer than so many seconds."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(seconds)

    def said(self) -> list[dict[str, Any]]:
        """Returns what it came to, by strategy; nothing where it failed."""
        out, _ = self._process.communicate()
        try:
            found: list[dict[str, Any]] = json.loads(out)
        except ValueError:
            return []
        return found

    def end(self) -> None:
        """Gives it up."""
        self._process.kill()
        self._process.wait()


def _phase() -> str:
    return phases.NAMES[phases.here().phase]


def _size(count: int) -> str:
    return ByteSize(count).human_readable(decimal=True, separator=" ")
