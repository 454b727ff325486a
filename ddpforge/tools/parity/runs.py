"""Trains one recipe under several strategies, from one initial state, and compares the runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from shutil import copytree
from typing import Any

from ddpforge.api import (
    TOLERANCES,
    Point,
    Problems,
    Quantity,
    Record,
    RunFolder,
    Tolerances,
    check,
    choose,
    compare,
    contract_of,
    first_drift,
    read_metrics,
    snapshot,
)
from ddpforge.checkpoint import retention
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, ForgeError, RecipeError, SetupError, UsageError
from ddpforge.launchers import process
from ddpforge.launchers.torchrun import NO_GPUS, torchrun_command
from ddpforge.recipe import Diagnostic, LoadedRecipe, load_recipe
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.parity.specs import Spec, parse, split

__all__ = ["ParityReport", "RunFailed", "Verdict", "parity"]

_PROBE = "ddpforge_parity"  # the name of the callback
_LINES = 40  # of the output of a failed run


class RunFailed(ForgeError):
    """Failure of a run; `code` is the exit code for the whole comparison, and `reason` the error in one line."""

    def __init__(self, spec: Spec, code: int, said: str) -> None:
        self.code, self.reason = code, _reason(said) or f"exit code {code}"
        if code in (ExitCode.PREEMPTED, ExitCode.INTERRUPTED):  # a request to stop is meant for the comparison
            self.code = int(ExitCode.INTERRUPTED)
            super().__init__(f"stopped during the run of `{spec.text}`; nothing was compared")
            return
        lines = [f"    {line}" for line in said.rstrip().splitlines()[-_LINES:]]
        message = "\n".join([f"`{spec.text}` ended with exit code {code}; its last output:", *lines])
        super().__init__(message, hints=["--out DIR keeps the runs' folders and all of their output"])


def _reason(said: str) -> str:
    """Returns the first error in the output of a run, or else its last line."""
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.partition("error: ")[2] for line in lines if re.match(r"(\[rank \d+\] )?error: ", line)]
    return next(iter(errors), lines[-1] if lines else "")


@dataclass(frozen=True)
class Verdict:
    """Comparison of the run called `name` with the reference. The reference itself has no quantities."""

    spec: Spec
    name: str
    steps: int
    quantities: list[Quantity]
    averages: str = "gradients"
    failed: RunFailed | None = None

    @property
    def same(self) -> bool:
        """True if the run reached its end and does not drift."""
        return self.failed is None and self.drift is None

    @property
    def drift(self) -> tuple[Quantity, Point] | None:
        """Returns the quantity that is first above its tolerance, and the point; None if all are within."""
        return first_drift(self.quantities)

    def as_dict(self) -> dict[str, Any]:
        """Returns every quantity at every step, for JSON."""
        drift = self.drift
        return {
            "strategy": self.spec.text,
            "use": self.spec.use,
            "options": list(self.spec.options),
            "ranks": self.spec.ranks,
            "run": self.name,
            "steps": self.steps,
            "same": self.same,
            "failed": {"exit_code": self.failed.code, "reason": self.failed.reason} if self.failed else None,
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
    """Result of a comparison; the first verdict is that of the reference."""

    recipe: str
    precision: str
    tolerances: Tolerances
    verdicts: list[Verdict]

    @property
    def same(self) -> bool:
        """True if all runs reached their end, and none drifts."""
        return all(verdict.same for verdict in self.verdicts)

    @property
    def failed(self) -> list[RunFailed]:
        """Returns the failures of runs."""
        return [verdict.failed for verdict in self.verdicts if verdict.failed]

    def as_dict(self) -> dict[str, Any]:
        """Returns the report for JSON; a number that is not finite becomes null."""
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
    """Trains `recipe` under each of `strategies`, from the initial state of the first; compares each with the first.

    Args:
        strategies: texts as described in `specs`.
        ranks: number of ranks of strategies that do not set it.
        steps: number of steps of each run.
        out: folder for the folders of the runs; it must be empty.
        tolerance: tolerance of the loss; the others are scaled in proportion.
        say: receives messages about the progress.

    Raises:
        UsageError, RecipeError: the comparison is not possible; raised before a run starts, with every problem.
        SetupError: `out` cannot be written.
        RunFailed: the reference did not reach its end, or the comparison was stopped; the later runs are not started.
    """
    runs = _plan(recipe, split(strategies), ranks=ranks, steps=steps, out=out, sets=sets)
    precision = runs[0].loaded.recipe.train.precision
    tolerances = TOLERANCES[precision] if tolerance is None else TOLERANCES[precision].scaled(tolerance)
    _make_empty(out)
    variables = _variables(runs, say)

    failed: dict[str, RunFailed] = {}
    for run in runs:
        say(f"{run.spec.text}: training {steps} steps on {run.spec.ranks} rank{'s' * (run.spec.ranks > 1)}")
        try:
            run.train(start=None if run is runs[0] else runs[0].start(), variables=variables)
        except RunFailed as error:
            if run is runs[0] or error.code == ExitCode.INTERRUPTED:
                raise
            say(f"{run.spec.text}: failed with exit code {error.code}")
            failed[run.name] = error
    reference = runs[0].record()
    verdicts = [Verdict(runs[0].spec, runs[0].name, reference.steps, [], reference.averages)]
    for run in runs[1:]:
        if run.name in failed:
            verdicts.append(Verdict(run.spec, run.name, 0, [], failed=failed[run.name]))
            continue
        record = run.record()
        verdicts.append(
            Verdict(run.spec, run.name, record.steps, compare(record, reference, tolerances), record.averages)
        )
    return ParityReport(recipe, precision, tolerances, verdicts)


def _variables(runs: Sequence[_ComparedRun], say: Callable[[str], None]) -> Mapping[str, str]:
    """Returns environment variables that make all runs use the CPU, if there are too few GPUs for one of them."""
    from ddpforge.api import accelerators

    gpus, most = accelerators(), max(run.spec.ranks for run in runs)
    if not gpus or gpus >= most or runs[0].loaded.recipe.train.device != "auto":
        return {}
    say(f"comparing on the CPU: {most} processes need {most} GPUs, but there {'are' if gpus > 1 else 'is'} {gpus}")
    return NO_GPUS


def _make_empty(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        used = any(folder.iterdir())
    except OSError as error:
        raise SetupError(f"{folder} cannot be written: {error}") from error
    if used:
        raise UsageError(f"{folder} is not empty", hints=["name a new folder with --out"])


def _point(point: Point) -> dict[str, Any]:
    return {name: _finite(value) for name, value in asdict(point).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class _ComparedRun:
    """One run of the comparison, the same as of `ddpforge launch RECIPE --set …`."""

    spec: Spec
    recipe: str
    sets: list[str]
    loaded: LoadedRecipe
    out: Path
    averages: str

    @property
    def name(self) -> str:
        """Returns the name of the run and of its folder."""
        return self.loaded.recipe.name

    @property
    def folder(self) -> RunFolder:
        """Returns the folder of the run."""
        return RunFolder(self.out / self.name)

    def train(self, *, start: Path | None, variables: Mapping[str, str]) -> None:
        """Trains the run from the checkpoint `start`, if given, with these environment variables; raises RunFailed."""
        if start:
            self.folder.create(**snapshot(self.loaded))
            copytree(start, self.folder.checkpoints / start.name)
        arguments = [self.recipe, *(f"--set={one}" for one in self.sets), f"--out={self.out}"]
        arguments += ["--allow-change=run"] if start else []  # all runs begin with the weights of the first
        command = torchrun_command(arguments, nproc=self.spec.ranks)
        output = self.out / f"{self.name}.log"
        with output.open("wb") as file:
            code = process.launch(command, nproc=self.spec.ranks, output=file, variables=variables)
        if code:
            raise RunFailed(self.spec, code, output.read_text(errors="replace"))

    def start(self) -> Path:
        """Returns the checkpoint before the first step."""
        found, _ = retention.committed(self.folder.checkpoints)
        return next(path for path, manifest in found if manifest.step == 0)

    def record(self) -> Record:
        """Reads the record of the finished run."""
        from ddpforge.api import CheckpointReader

        checkpoint = CheckpointReader(retention.committed(self.folder.checkpoints)[0][0][0])
        final = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
        probed = [name for name in checkpoint.names("callbacks") if name.startswith(f"{_PROBE}/")]
        initial = {name.removeprefix(f"{_PROBE}/"): checkpoint.read("callbacks", name) for name in probed}
        return Record(read_metrics(self.folder.path), initial, final, self.averages)


def _plan(
    recipe: str, strategies: Sequence[str], *, ranks: int, steps: int, out: Path, sets: Sequence[str]
) -> list[_ComparedRun]:
    """Returns the runs, checked as far as possible without starting them."""
    if len(strategies) < 2:
        raise UsageError("there is nothing to compare with", hints=["name several strategies: --strategies ddp,fsdp"])
    registry = Registry.installed()
    runs: list[_ComparedRun] = []
    problems: dict[Diagnostic, None] = {}  # without repetition: a problem of the recipe occurs under every strategy
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
    """Returns the run of a recipe under a strategy; raises RecipeError if it cannot work."""
    try:
        overrides = [*sets, *_overrides(load_recipe(recipe, sets=sets, registry=registry), name, steps)]
        loaded = load_recipe(recipe, sets=overrides, registry=registry)
        problems = Problems(loaded)
        chosen = choose(loaded, registry, problems, ranks=spec.ranks)
        check("chosen", chosen, problems)
        problems.raise_if_any()
    except RecipeError as error:
        raise RecipeError([spec.own(problem) for problem in error.problems]) from error
    return _ComparedRun(spec, recipe, overrides, loaded, out, contract_of(chosen.strategy).averages)


def _overrides(loaded: LoadedRecipe, name: str, steps: int) -> list[str]:
    """Returns the settings of a run in the comparison; none of them changes the computation of a step."""
    key = f"callbacks.{_PROBE}"
    return [
        f"name={toml_value(name)}",
        "track.every=1st",
        *(f"track.{toml_value(tracker)}.use=ddpforge.interfaces:Tracker" for tracker in loaded.recipe.track.trackers),
        *([f"train.eval_every={steps}st"] if loaded.recipe.data.eval else []),
        "checkpoint.at_start=true",
        f"checkpoint.every={steps}st",
        "checkpoint.keep.last=2",
        f"{key}.use=ddpforge.tools.parity.probe:Probe",
        f"{key}.steps={steps}",
        f"{key}.inherit={toml_value(loaded.recipe.checkpoint.init_from is not None)}",
    ]
