"""Finds where two runs part: the first step by replays, then the module, the direction and the operation."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ddpforge.api import (
    PERTURBED,
    UPDATES,
    VISIBLE,
    CheckpointReader,
    Excess,
    Record,
    Rounding,
    RunFolder,
    committed,
    compare,
    excesses,
    first_drift,
    load_recipe,
    norm_of,
    read_metrics,
    relative,
    resolution_of,
)
from ddpforge.components.registry import Registry, build
from ddpforge.recipe import Recipe
from ddpforge.recipe.toml import toml_value
from ddpforge.testing.ranks import starter
from ddpforge.tools.bisect.calls import Calls, Difference, first_difference
from ddpforge.tools.bisect.recorder import BACKWARD, FORWARD, GRADIENT, INPUT, OPERATION
from ddpforge.tools.parity.runs import ComparedRun, plan_run
from ddpforge.tools.parity.specs import Spec, parse

__all__ = ["BisectResult", "Side", "bisect"]

_MODEL = "model"  # name of the whole model among its modules
_CLEAR = 1e-3  # relative difference of logged losses that rounding does not make in a few steps
_RECORDER = "ddpforge_bisect"  # the name of the callback


@dataclass(frozen=True)
class Side:
    """One of two runs that must agree.

    Attributes:
        recipe: file or name of a recipe.
        sets: settings that only this side has.
        spec: the strategy; None for the recipe's own.
        ranks: number of ranks.
        run: folder of a run of the recipe, whose checkpoints serve as starts.
        python: interpreter of the ranks; None for this one.
    """

    recipe: str
    sets: Sequence[str]
    spec: Spec | None
    ranks: int
    run: RunFolder | None
    python: str | None

    @classmethod
    def of(cls, text: str, strategy: str | None, sets: Sequence[str], python: str | None = None) -> Side:
        """Returns the side for a recipe, or for the folder or the name of a run.

        `strategy` is a text as for `ddpforge parity`; without it, the recipe's strategy on the ranks of the run.
        """
        run = next((one for one in (RunFolder(Path(text)), RunFolder(Path("runs", text))) if one.exists()), None)
        recipe, status = (str(run.resolved), run.status()) if run else (text, None)
        ranks = status["world_size"] if status else 1
        spec = parse(strategy, Registry.installed(), ranks=ranks) if strategy else None
        return cls(recipe, sets, spec, spec.ranks if spec else ranks, run, python)


@dataclass(frozen=True)
class BisectResult:
    """Result: the first step that differs, and the first value in it.

    Attributes:
        step: None if the runs agree.
        kind: "samples", "forward", "backward", "gradient", "update", or "row" for only numbers of the row.
        name: of the module, or of the parameter.
        where: place within the module.
        operation: within the module, if the runs execute the same operations.
        multiple: factor from the first run to the second, None if there is none.
        worst: names of the parameters that differ most, with their factors.
    """

    step: int | None
    kind: str = ""
    name: str = ""
    where: str = ""
    call: int = 1
    difference: float = 0.0
    allowed: float = 0.0
    multiple: float | None = None
    operation: str = ""
    worst: Sequence[tuple[str, float | None]] = ()
    steps: int = 0

    def as_dict(self) -> dict[str, Any]:
        """Returns the finding for JSON."""
        return asdict(self)


def bisect(a: Side, b: Side, *, steps: int, out: Path, say: Callable[[str], None] = lambda _: None) -> BisectResult:
    """Trains both sides from the same weights, and returns the first value that differs by more than rounding.

    Args:
        steps: largest number of steps to replay.
        out: folder for the runs.

    Raises:
        RecipeError, UsageError: a side cannot train.
        RunFailed: a run did not reach its end.
    """
    return _Bisection(a, b, steps, out, say).find()


class _Bisection:
    def __init__(self, a: Side, b: Side, steps: int, out: Path, say: Callable[[str], None]) -> None:
        self._a, self._b, self._out, self._say = a, b, out, say
        self._registry = Registry.installed()
        self._most = max(a.ranks, b.ranks)  # both sides use the same kind of devices
        self._apart = _first_row(a.run, b.run)
        self._start = _newest(a.run, self._apart)
        self._begin = self._start[0] if self._start else 0
        self._end = self._begin + steps

    def find(self) -> BisectResult:
        """Returns the first value that differs."""
        step = self._first_step()
        steps = self._end - self._begin  # that were replayed
        # Modules and gradients show smaller differences than losses and weights do: the first step is recorded, too.
        for one in sorted({self._begin + 1, step or self._begin + 1}):
            self._say(f"recording step {one}")
            found = self._within(one)
            if found.kind or one == step:
                return replace(found, step=one, kind=found.kind or "row", steps=steps)
        return BisectResult(None, steps=steps)

    # ------------------------------------------------------------------------------------------ the step
    def _first_step(self) -> int | None:
        """Replays all steps on both sides, with a checkpoint of each; returns the first step that differs."""
        if self._apart and self._apart > self._end:
            begin = self._apart - (self._end - self._begin) // 2
            self._say(f"training the first one from step {self._begin} to {begin}, near the step at which they part")
            near = self._train(self._a, "a-before", begin, [], start=self._start and self._start[1])
            self._start, self._end = (begin, _checkpoint(near.folder, begin)), begin + self._end - self._begin
            self._begin = begin
        every = ["checkpoint.every=1st", f"checkpoint.keep.last={self._end - self._begin + 1}"]
        self._say(f"replaying {self._end - self._begin} steps of both")
        self._reference = self._train(self._a, "a", self._end, every, start=self._start and self._start[1])
        others = [
            self._train(self._b, "b", self._end, every),
            *(
                self._train(self._a, f"a-perturbed-{seed}", self._end, every, seed=seed)
                for seed in range(1, 1 + PERTURBED)
            ),
        ]
        # A recipe may be shorter, and a callback may end a run.
        self._end = min(read_metrics(one.folder.path)[-1]["step"] for one in (self._reference, *others))
        for step in range(self._begin + 1, self._end + 1):
            reference, run, *perturbed = (self._record(one, step) for one in (self._reference, *others))
            found = compare(run, reference, VISIBLE, perturbed)
            if first_drift([one for one in found if one.name != "initial weights"]):
                return step
        return None

    def _record(self, run: ComparedRun, step: int) -> Record:
        """Returns the record of a run's replay until a step."""
        rows = [row for row in read_metrics(run.folder.path) if self._begin < row["step"] <= step]
        return Record(rows, _begun(run, self._begin), _weights(run.folder, step), run.averages)

    # ------------------------------------------------------------------------------------------ within the step
    def _within(self, step: int) -> BisectResult:
        """Records a step on both sides from the same weights; returns the first value that differs."""
        reference, run, perturbed = self._recorded(step)
        calls = (reference.calls, run.calls, [one.calls for one in perturbed])
        if found := first_difference(*calls, kinds=[INPUT, FORWARD]):
            if found.module == _MODEL and found.kind == INPUT:
                return _finding(step, found, "samples", _MODEL)
            # The input of a module comes from the code of the module that calls it.
            module = found.module if found.kind == FORWARD else found.module.rpartition(".")[0] or _MODEL
            before = f"before it calls `{found.module}`" if found.kind == INPUT else ""
            return replace(_finding(step, found, FORWARD, module, before), operation=self._operation(step, module))
        if found := first_difference(*calls, kinds=[BACKWARD]):
            of, _, module = found.module.partition(" of ")
            return _finding(
                step, found, BACKWARD, module, f"the gradient of its {'input' if of == INPUT else 'output'}"
            )
        if reference.gradients and run.gradients:
            rounding = Rounding.measured([reference.gradients], *([one.gradients] for one in perturbed))
            if worst := excesses(run.gradients, reference.gradients, partial(rounding.allowed, 1)):
                return _worst(step, "gradient", worst)
        norms = {name: norm_of([one]) for name, one in reference.updates.items()}
        least = [resolution_of(reference.before, norms)]
        updates = ([one.updates] for one in perturbed)
        rounding = Rounding.measured([reference.updates], *updates, factor=UPDATES, resolution=least)
        if worst := excesses(run.updates, reference.updates, partial(rounding.allowed, 1)):
            return _worst(step, "update", worst)
        return BisectResult(step)

    def _operation(self, step: int, module: str) -> str:
        """Returns the first operation of a module that differs: its result, or the operation itself."""
        reference, run, perturbed = self._recorded(step, operations=module)
        one = first_difference(reference.calls, run.calls, [each.calls for each in perturbed], kinds=[OPERATION])
        lists = (
            [name.split("|")[1] for name in each.calls.shared if name.startswith(OPERATION)]
            for each in (reference, run)
        )
        other = next(((a, b) for a, b in zip_longest(*lists, fillvalue="0 nothing") if a != b), None)
        if one and (other is None or _place(one.module) < _place(other[0])):
            return f"result of {one.module.partition(' ')[2]}"
        return " in A, ".join(each.partition(" ")[2] for each in other) + " in B" if other else ""

    def _recorded(self, step: int, operations: str = "") -> tuple[_Recorded, _Recorded, list[_Recorded]]:
        start = _checkpoint(self._reference.folder, step - 1)
        sides = [(self._a, "a", 0), (self._b, "b", 0), *((self._a, "a", seed) for seed in range(1, 1 + PERTURBED))]
        found = []
        for side, label, seed in sides:
            name = f"{label}-step-{step}{f'-{seed}' if seed else ''}{'-operations' if operations else ''}"
            folder = self._out / "calls" / name
            key = f"callbacks.{_RECORDER}"
            sets = [
                f"{key}.use=ddpforge.tools.bisect.recorder:recorder",
                f"{key}.folder={toml_value(str(folder.resolve()))}",
                f"{key}.operations={toml_value(operations)}",
            ]
            run = self._train(side, name, step, sets, start=start, seed=seed, records=True)
            found.append(_Recorded(run, folder, step))
        return found[0], found[1], found[2:]

    def _train(
        self,
        side: Side,
        name: str,
        until: int,
        sets: Sequence[str],
        *,
        start: Path | None = None,
        seed: int = 0,
        records: bool = False,
    ) -> ComparedRun:
        recipe = load_recipe(side.recipe, sets=side.sets, registry=self._registry).recipe
        spec = side.spec or Spec(recipe.strategy.use, recipe.strategy.use, (), side.ranks)
        planned = plan_run(
            side.recipe, [*side.sets, *spec.sets], spec, self._registry, name=name, steps=until, out=self._out
        )
        if records:
            train = planned.loaded.recipe.train
            strategy = build(self._registry, "strategy", planned.loaded.recipe.strategy)
            shards = train.virtual_ranks or strategy.data_ranks(spec.ranks)
            passes = max(1, train.global_batch // (shards * train.per_pass(shards))) * (
                shards // strategy.data_ranks(spec.ranks)
            )
            reads = "callbacks.ddpforge_parity.gradients=true" in planned.sets
            key = f"callbacks.{_RECORDER}"
            sets = [*sets, f"{key}.passes={passes}", f"{key}.gradients={toml_value(reads)}"]
        run = planned.perturbed(seed) if seed else planned
        # A side that diverges is recorded like any other.
        run = run.changed(name, ['train.on_nonfinite="skip"', *sets])
        shutil.rmtree(run.folder.path, ignore_errors=True)
        if start is None and name not in ("a", "a-before"):
            start = _checkpoint(self._reference.folder, self._begin)
        run.train(
            start=start,
            ranks=starter(self._most, planned.loaded.recipe.train.device, side.python),
            allow=_keys_of_data(planned.loaded.recipe),
        )
        return run


class _Recorded:
    """Values of a recorded step."""

    def __init__(self, run: ComparedRun, calls: Path, step: int) -> None:
        self._run, self._step = run, step
        self.calls = Calls.read(calls)
        self.before = _begun(run, step - 1)

    @cached_property
    def gradients(self) -> Mapping[str, Any]:
        """Returns the reduced gradients, if the strategy has them."""
        reader = CheckpointReader(_checkpoint(self._run.folder, self._step))
        prefix = f"{_RECORDER}/{GRADIENT}"
        names = [name for name in reader.names("callbacks") if name.startswith(prefix)]
        return {name.removeprefix(prefix): reader.read("callbacks", name) for name in names}

    @cached_property
    def updates(self) -> Mapping[str, Any]:
        """Returns the change of each weight in the step."""
        after = _weights(self._run.folder, self._step)
        return {name: after[name].double() - one.double() for name, one in self.before.items()}


def _finding(step: int, found: Difference, kind: str, name: str, where: str = "") -> BisectResult:
    return BisectResult(step, kind, name, where, found.call, found.difference, found.allowed, found.multiple)


def _place(operation: str) -> int:
    return int(operation.partition(" ")[0])


def _worst(step: int, kind: str, found: Sequence[Excess]) -> BisectResult:
    one = found[0]
    named = [(each.name, each.multiple) for each in found]
    return BisectResult(step, kind, one.name, "", 1, one.difference, one.allowed, one.multiple, worst=named)


def _begun(run: ComparedRun, step: int) -> dict[str, Any]:
    """Returns the trained weights with which a run began: those of a checkpoint, perturbed if the run is."""
    kept = run.record().initial
    changed = any(".perturbed=" in one for one in run.sets)
    weights = {} if changed else _weights(run.folder, step)
    return {name: kept[name] if changed else weights[name] for name in kept}


def _checkpoint(folder: RunFolder, step: int) -> Path:
    """Returns the checkpoint of a step."""
    found, _ = committed(folder.checkpoints)
    return next(path for path, manifest in found if manifest.step == step)


def _weights(folder: RunFolder, step: int) -> dict[str, Any]:
    reader = CheckpointReader(_checkpoint(folder, step))
    return {name: reader.read("model", name) for name in reader.names("model")}


def _first_row(a: RunFolder | None, b: RunFolder | None) -> int | None:
    """Returns the first step at which two runs logged clearly different losses, or the end of the first; None else."""
    if a is None or b is None:
        return None
    mine, theirs = ({row["step"]: row.get("train/loss") for row in read_metrics(one.path)} for one in (a, b))
    shared = [step for step in mine if step in theirs]
    return next((step for step in shared if relative(theirs[step], mine[step]) > _CLEAR), max(shared, default=None))


def _newest(run: RunFolder | None, before: int | None) -> tuple[int, Path] | None:
    """Returns the step and the path of the newest checkpoint before a step; None to begin with initial weights."""
    found = committed(run.checkpoints)[0] if run and before else []
    return max(((one.step, path) for path, one in found if 0 < one.step < (before or 0)), default=None)


def _keys_of_data(recipe: Recipe) -> list[str]:
    """Returns the keys of all datasets: the sides may have other samples."""
    sets = {"train": recipe.data.sources, "eval": recipe.data.evaluations}
    return [f"data.{key}.{name}".rstrip(".") for key, several in sets.items() for name in several]
