"""Trains one recipe under several strategies, from one initial state, and gathers how far they come apart."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from ddpforge import preflight
from ddpforge.app.choose import choose
from ddpforge.checkpoint import retention
from ddpforge.components.registry import Registry
from ddpforge.errors import EnvironmentProblem, ExitCode, ForgeError, RecipeError, UsageError
from ddpforge.launchers import process
from ddpforge.launchers.torchrun import NO_GPUS, torchrun_command
from ddpforge.preflight import Problems
from ddpforge.recipe import LoadedRecipe, Problem, load_recipe
from ddpforge.runs.folder import RunFolder, snapshot
from ddpforge.runs.metrics import read_metrics
from ddpforge.tools.parity.compare import TOLERANCES, Point, Quantity, Record, Tolerances, compare, first_drift
from ddpforge.tools.parity.specs import Spec, parse, split
from ddpforge.training.contract import contract_of

__all__ = ["ParityReport", "RunFailed", "Verdict", "parity"]

_PROBE = "ddpforge_parity"  # the name of the callback
_LINES = 40  # of what a failed run said


class RunFailed(ForgeError):
    """A run did not reach its end; `code` is what the comparison should end with."""

    def __init__(self, spec: Spec, code: int, said: str) -> None:
        self.code = code
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):  # whoever stopped the run meant the comparison
            self.code = int(ExitCode.INTERRUPTED)
            super().__init__(f"stopped in the run of `{spec.text}`; nothing was compared")
            return
        lines = [f"    {line}" for line in said.rstrip().splitlines()[-_LINES:]]
        message = "\n".join([f"`{spec.text}` ended with exit code {code}; the last it said:", *lines])
        super().__init__(message, hints=["--out DIR keeps the runs' folders and everything they said"])


@dataclass(frozen=True)
class Verdict:
    """The comparison of the run called `name` with the reference, which itself has no quantities."""

    spec: Spec
    name: str
    steps: int
    quantities: list[Quantity]
    averages: str = "gradients"

    @property
    def drift(self) -> tuple[Quantity, Point] | None:
        """The first step at which something is beyond its tolerance, and what."""
        return first_drift(self.quantities)

    def as_dict(self) -> dict[str, Any]:
        """For JSON: every quantity at every step."""
        drift = self.drift
        return {
            "strategy": self.spec.text,
            "use": self.spec.use,
            "options": list(self.spec.options),
            "ranks": self.spec.ranks,
            "run": self.name,
            "steps": self.steps,
            "same": drift is None,
            "drift": {"quantity": drift[0].name} | _point(drift[1]) if drift else None,
            "quantities": {
                quantity.name: {
                    "tolerance": quantity.tolerance,
                    "largest": _finite(quantity.largest.difference),
                    "tensor": quantity.where,
                    "points": [_point(point) for point in quantity.points],
                }
                for quantity in self.quantities
            },
        }


@dataclass(frozen=True)
class ParityReport:
    """The result of a comparison; the first verdict is that of the reference."""

    recipe: str
    precision: str
    tolerances: Tolerances
    verdicts: list[Verdict]

    @property
    def same(self) -> bool:
        """True if no run drifts."""
        return not any(verdict.drift for verdict in self.verdicts)

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN and no infinity: what is not finite is null."""
        return {
            "recipe": self.recipe,
            "precision": self.precision,
            "same": self.same,
            "reference": self.verdicts[0].spec.text,
            "tolerances": asdict(self.tolerances),
            "runs": [verdict.as_dict() for verdict in self.verdicts],
        }


def parity(
    recipe: str,
    strategies: Sequence[str],
    *,
    ranks: int,
    steps: int,
    out: Path,
    sets: Sequence[str] = (),
    tolerance: float | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> ParityReport:
    """Trains `recipe` under each of `strategies`, all from the initial state of the first; compares each with that.

    What a strategy can be is told in `specs`; `ranks` is for those that do not say. The runs' folders are made in
    `out`, which must be empty. `tolerance` replaces that of the loss and scales the others. `say` is told what goes
    on. Raises UsageError, or RecipeError with every problem, before anything is started; raises RunFailed at the
    first run that does not reach its end.
    """
    runs = _plan(recipe, split(strategies), ranks=ranks, steps=steps, out=out, sets=sets)
    precision = runs[0].loaded.recipe.train.precision
    tolerances = TOLERANCES[precision] if tolerance is None else TOLERANCES[precision].scaled(tolerance)
    _make_empty(out)
    variables = _variables(runs, say)

    for run in runs:
        say(f"{run.spec.text}: training {steps} steps on {run.spec.ranks} rank{'s' * (run.spec.ranks > 1)}")
        run.train(start=None if run is runs[0] else runs[0].start(), variables=variables)
    reference = runs[0].record()
    verdicts = [Verdict(runs[0].spec, runs[0].name, reference.steps, [], reference.averages)]
    for run in runs[1:]:
        record = run.record()
        verdicts.append(
            Verdict(run.spec, run.name, record.steps, compare(record, reference, tolerances), record.averages)
        )
    return ParityReport(recipe, precision, tolerances, verdicts)


def _variables(runs: Sequence[_ComparedRun], say: Callable[[str], None]) -> Mapping[str, str]:
    """The variables that have all runs compute on the CPU, if there are too few GPUs for one of them."""
    from torch.cuda import device_count

    gpus, most = device_count(), max(run.spec.ranks for run in runs)
    if not gpus or gpus >= most or runs[0].loaded.recipe.train.device != "auto":
        return {}
    say(f"comparing on the CPU: {most} processes need {most} GPUs, and there {'are' if gpus > 1 else 'is'} {gpus}")
    return NO_GPUS


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise EnvironmentProblem(f"{folder} cannot be written: {error}") from error
    if used:
        raise UsageError(f"{folder} is not empty", hints=["give --out a folder that is new"])


def _point(point: Point) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(point).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class _ComparedRun:
    """One run of the comparison: what `ddpforge launch RECIPE --set …` would train."""

    spec: Spec
    recipe: str
    sets: list[str]
    loaded: LoadedRecipe
    out: Path
    averages: str

    @property
    def name(self) -> str:
        """Of the run and of its folder."""
        return self.loaded.recipe.name

    @property
    def folder(self) -> RunFolder:
        """The folder of the run."""
        return RunFolder(self.out / self.name)

    def train(self, *, start: Path | None, variables: Mapping[str, str]) -> None:
        """Trains, from the checkpoint `start` if there is one, with these environment variables; raises RunFailed."""
        if start:
            self.folder.create(**snapshot(self.loaded))
            copytree(start, self.folder.checkpoints / start.name)
        arguments = [self.recipe, *(f"--set={one}" for one in self.sets), f"--out={self.out}"]
        arguments += ["--allow-change=run"] if start else []  # all begin with the weights of the first
        command = torchrun_command(arguments, nproc=self.spec.ranks)
        output = self.out / f"{self.name}.log"
        with output.open("wb") as file:
            code = process.launch(command, nproc=self.spec.ranks, output=file, variables=variables)
        if code:
            raise RunFailed(self.spec, code, output.read_text(errors="replace"))

    def start(self) -> Path:
        """The checkpoint before the first step."""
        found, _ = retention.committed(self.folder.checkpoints)
        return next(path for path, manifest in found if manifest.step == 0)

    def record(self) -> Record:
        """Reads the record of the finished run."""
        from ddpforge.checkpoint.reader import Reader

        checkpoint = Reader(retention.committed(self.folder.checkpoints)[0][0][0])
        final = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
        probed = [name for name in checkpoint.names("callbacks") if name.startswith(f"{_PROBE}/")]
        initial = {name.removeprefix(f"{_PROBE}/"): checkpoint.read("callbacks", name) for name in probed}
        return Record(read_metrics(self.folder.path), initial, final, self.averages)


def _plan(
    recipe: str, strategies: Sequence[str], *, ranks: int, steps: int, out: Path, sets: Sequence[str]
) -> list[_ComparedRun]:
    """The runs, checked as far as that goes without starting them."""
    if len(strategies) < 2:
        raise UsageError("there is nothing to compare with", hints=["name several strategies: --strategies ddp,fsdp"])
    registry = Registry.installed()
    runs: list[_ComparedRun] = []
    problems: dict[Problem, None] = {}  # one with the recipe itself comes up under every strategy
    for number, text in enumerate(strategies, start=1):
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")
        name = f"{number}-{label}"[:100]
        try:
            spec = parse(text, registry, ranks=ranks)
            runs.append(_compared_run(recipe, [*sets, *spec.sets], spec, registry, name=name, steps=steps, out=out))
        except RecipeError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise RecipeError(list(problems))
    return runs


def _compared_run(
    recipe: str, sets: Sequence[str], spec: Spec, registry: Registry, *, name: str, steps: int, out: Path
) -> _ComparedRun:
    """Returns the run of a recipe under a strategy; raises RecipeError for what cannot work."""
    try:
        overrides = [*sets, *_overrides(load_recipe(recipe, sets=sets, registry=registry), name, steps)]
        loaded = load_recipe(recipe, sets=overrides, registry=registry)
        problems = Problems(loaded)
        chosen = choose(loaded, registry, problems, ranks=spec.ranks)
        preflight.check(chosen, problems)
        problems.raise_if_any()
    except RecipeError as error:
        raise RecipeError([spec.own(problem) for problem in error.problems]) from error
    return _ComparedRun(spec, recipe, overrides, loaded, out, contract_of(chosen.strategy).averages)


def _overrides(loaded: LoadedRecipe, name: str, steps: int) -> list[str]:
    """The settings that make a run of the recipe one of the comparison; none of them changes what a step computes."""
    key = f"callbacks.{_PROBE}"
    return [
        f"name={json.dumps(name)}",
        "track.every=1st",
        *(f"track.{json.dumps(tracker)}.use=ddpforge.interfaces:Tracker" for tracker in loaded.recipe.track.trackers),
        *([f"train.eval_every={steps}st"] if loaded.recipe.data.eval else []),
        "checkpoint.at_start=true",
        f"checkpoint.every={steps}st",
        "checkpoint.keep.last=2",
        f"{key}.use=ddpforge.tools.parity.probe:Probe",
        f"{key}.steps={steps}",
        f"{key}.inherit={json.dumps(loaded.recipe.checkpoint.init_from is not None)}",
    ]
