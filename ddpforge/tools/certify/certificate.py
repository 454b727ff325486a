"""Trains a recipe for some steps under many layouts, and compares each with one process; one row per layout."""

from __future__ import annotations

import json
import math
import platform
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal

import torch

from ddpforge import __version__
from ddpforge.api import VISIBLE, Point, Quantity, Record, compare, load_recipe
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, ForgeError, RecipeError, SetupError, UsageError
from ddpforge.testing.ranks import starter
from ddpforge.tools.certify.layouts import Layout, declared, settings_of, shuffled
from ddpforge.tools.parity.runs import ComparedRun, RunFailed, StartRanks, plan_run
from ddpforge.tools.parity.specs import Spec

__all__ = ["LayoutCertificate", "Row", "certify"]

State = Literal["trained", "refused", "failed"]
Verdict = Literal["same", "differs", "refused", "failed"]
_PERTURBED = 8  # references that measure rounding: one that flips the choice of an expert, or a unit of ReLU, is rare
_REFERENCE = Spec("single@1", "single", (), 1)


@dataclass(frozen=True)
class Row:
    """Result of one layout.

    Attributes:
        state: "refused" if ddpforge named the reason before the first step, "failed" if the run ended otherwise.
        differences: by quantity, the relative difference that is the largest in proportion to what rounding explains:
            `largest`, `allowed`, its `step`, and the `tensor` with most of it.
        reason: why the layout did not train.
        seconds: wall time of the run.
    """

    layout: str
    use: str
    ranks: int
    state: State
    differences: Mapping[str, Mapping[str, Any]]
    reason: str
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """Returns the verdict: a trained layout is the same if rounding explains all differences."""
        if self.state != "trained":
            return self.state
        return "differs" if self.share > 1 else "same"

    @property
    def share(self) -> float:
        """Returns the largest difference as a share of what rounding explains."""
        return max(map(self._share, self.differences), default=0.0)

    @property
    def worst(self) -> str:
        """Returns the quantity with the largest share, its step and tensor; or why the layout did not train."""
        if not self.differences:
            return self.reason
        name = max(self.differences, key=self._share)
        found = self.differences[name]
        return f"{name} at step {found['step']}{' in ' + found['tensor'] if found['tensor'] else ''}"

    def largest(self, quantity: str) -> float:
        """Returns the difference of a quantity; infinite if a value is not finite, 0 if it is absent."""
        found = self.differences.get(quantity, {"largest": 0.0})["largest"]
        return math.inf if found is None else float(found)

    def _share(self, quantity: str) -> float:
        largest, allowed = self.largest(quantity), self.differences[quantity]["allowed"]
        return (largest / allowed if allowed else math.inf) if largest else 0.0


@dataclass(frozen=True)
class LayoutCertificate:
    """Rows of one recipe, of this and of earlier calls.

    Attributes:
        subject: the recipe that was certified, with its settings, steps, versions.
        layouts: number of layouts that the strategies declare.
        rows: one for each layout that was tried.
    """

    subject: Mapping[str, Any]
    layouts: int
    rows: Sequence[Row]

    def of(self, *verdicts: Verdict) -> list[Row]:
        """Returns the rows with one of these verdicts."""
        return [row for row in self.rows if row.verdict in verdicts]

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate for JSON."""
        return {
            "subject": dict(self.subject),
            "layouts": self.layouts,
            "rows": [asdict(row) | {"verdict": row.verdict} for row in self.rows],
        }


def certify(
    recipe: str,
    *,
    out: Path,
    most: int = 8,
    steps: int = 20,
    sets: Sequence[str] = (),
    strategies: Sequence[str] = (),
    rows: int | None = None,
    budget: float | None = None,
    seed: int = 0,
    say: Callable[[str], None] = lambda _: None,
) -> LayoutCertificate:
    """Trains `recipe` for `steps` steps under the layouts on 1 to `most` ranks; goes on with the rows that `out` has.

    Args:
        rows: number of layouts to train; None for all. Layouts that are refused do not count.
        budget: seconds after which no further run starts; None for no limit.
        seed: of the order in which layouts are tried.

    Raises:
        RecipeError, UsageError: the recipe cannot train in one process, or `out` has rows of something else.
        RunFailed: one process did not reach the end.
        SetupError: `out` cannot be written.
    """
    registry, end = Registry.installed(), time.monotonic() + (budget or math.inf)
    train = load_recipe(recipe, sets=sets, registry=registry).recipe.train
    layouts = shuffled(declared(registry, most=most, strategies=strategies, accumulates=not train.virtual_ranks), seed)
    store = _Store(out, _subject(recipe, sets, steps, registry))
    ranks = starter(most, train.device)
    reference = _Reference(recipe, sets, steps, registry, out, ranks, say)
    known = {row.layout: row for row in store.rows()}
    trained = sum(row.state != "refused" for row in known.values())
    for layout in layouts:
        if layout.text in known:
            continue
        if time.monotonic() > end or (rows is not None and trained >= rows):
            break
        row = known[layout.text] = reference.row_of(layout)
        store.add(row)
        trained += row.state != "refused"
        if row.state != "refused":
            say(f"{trained}: {row.layout}: {row.verdict} in {row.seconds} s{f': {row.reason}' if row.reason else ''}")
    return LayoutCertificate(store.subject, len(layouts), list(known.values()))


def _subject(recipe: str, sets: Sequence[str], steps: int, registry: Registry) -> dict[str, Any]:
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    return {
        "recipe": recipe,
        "sets": list(sets),
        "digest": sha256(loaded.recipe.model_dump_json().encode()).hexdigest()[:16],
        "steps": steps,
        "ddpforge": __version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
    }


def _largest(found: Quantity) -> dict[str, Any]:
    def share(point: Point) -> float:
        allowed = found.tolerance if point.allowed is None else point.allowed
        return (point.difference / allowed if allowed else math.inf) if point.difference else 0.0

    point = max(found.points, key=share)
    allowed = found.tolerance if point.allowed is None else point.allowed
    difference = point.difference if math.isfinite(point.difference) else None
    return {"largest": difference, "allowed": allowed, "step": point.step, "tensor": found.where}


class _Store:
    """Rows in a folder, `rows.jsonl`, with their recipe and versions in `subject.json`."""

    def __init__(self, folder: Path, subject: dict[str, Any]) -> None:
        self._rows, self.subject = folder / "rows.jsonl", subject
        file = folder / "subject.json"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if file.exists():
                self._check(json.loads(file.read_text(encoding="utf-8")))
            elif any(folder.iterdir()):
                raise UsageError(f"{folder} is not empty, and has no rows", hints=["name another folder with --out"])
            file.write_text(json.dumps(subject), encoding="utf-8")
        except OSError as error:
            raise SetupError(f"{folder} cannot be written: {error}") from error

    def _check(self, found: Mapping[str, Any]) -> None:
        for key, value in self.subject.items():
            if found.get(key) != value:
                message = f"{self._rows.parent} has rows of another {key}: {found.get(key)} instead of {value}"
                raise UsageError(message, hints=["name another folder with --out, or remove this one"])

    def rows(self) -> Iterator[Row]:
        """Yields the rows of earlier calls."""
        if self._rows.exists():
            for line in self._rows.read_text(encoding="utf-8").splitlines():
                yield Row(**json.loads(line))

    def add(self, row: Row) -> None:
        """Appends a row."""
        with self._rows.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(row)) + "\n")


class _Reference:
    """Run in one process, with which each layout is compared; it trains when the first layout needs it."""

    def __init__(
        self,
        recipe: str,
        sets: Sequence[str],
        steps: int,
        registry: Registry,
        out: Path,
        ranks: StartRanks,
        say: Callable[[str], None],
    ) -> None:
        self._recipe, self._sets, self._steps, self._registry = recipe, sets, steps, registry
        self._folder, self._ranks, self._say = out / "runs", ranks, say
        self._run = self._planned(_REFERENCE, [*sets, *_REFERENCE.sets], "reference")
        self._record: Record | None = None

    def row_of(self, layout: Layout) -> Row:
        """Trains a layout from the reference's initial weights, and compares it."""
        began = time.monotonic()

        def row(state: State, reason: str = "", differences: Mapping[str, Any] | None = None) -> Row:
            seconds = round(time.monotonic() - began, 1)
            return Row(layout.text, layout.spec.use, layout.spec.ranks, state, differences or {}, reason, seconds)

        try:
            sets = settings_of(layout, self._recipe, self._registry, self._sets)
            run = self._planned(layout.spec, sets, sha256(layout.text.encode()).hexdigest()[:12])
        except ForgeError as error:
            return row("refused", error.problems[0].message if isinstance(error, RecipeError) else error.message)
        reference = self.record()
        began = time.monotonic()
        try:
            shutil.rmtree(run.folder.path, ignore_errors=True)  # of a call that was killed
            run.train(start=self._run.start(), ranks=self._ranks)
            quantities = compare(run.record(), reference, VISIBLE, self._perturbed)
        except RunFailed as error:
            if error.code == ExitCode.INTERRUPTED:
                raise
            named = error.code in (ExitCode.USAGE, ExitCode.ENVIRONMENT) and not run.folder.metrics.exists()
            return row("refused" if named else "failed", error.reason)
        finally:
            shutil.rmtree(run.folder.path, ignore_errors=True)
        return row("trained", differences={one.name: _largest(one) for one in quantities})

    def record(self) -> Record:
        """Returns the record of the reference; trains it and the perturbed ones, if no earlier call has."""
        if self._record is None:
            perturbed = [self._run.perturbed(seed) for seed in range(1, 1 + _PERTURBED)]
            for run in (self._run, *perturbed):
                if (found := run.folder.status()) is None or found["state"] != "done":
                    self._say(f"one process ({run.name}): training {self._steps} steps")
                    shutil.rmtree(run.folder.path, ignore_errors=True)
                    run.train(start=None if run is self._run else self._run.start(), ranks=self._ranks)
            self._record, self._perturbed = self._run.record(), [run.record() for run in perturbed]
        return self._record

    def _planned(self, spec: Spec, sets: Sequence[str], name: str) -> ComparedRun:
        return plan_run(self._recipe, sets, spec, self._registry, name=name, steps=self._steps, out=self._folder)
