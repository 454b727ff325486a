"""Trains one recipe under several strategies, from one initial state, and compares the runs."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from typing import Any

from ddpforge.api import (
    PERTURBED,
    TOLERANCES,
    VISIBLE,
    Excess,
    Point,
    Problems,
    Quantity,
    Record,
    RunFolder,
    Tolerances,
    check,
    choose,
    committed,
    compare,
    contract_of,
    first_drift,
    read_metrics,
    snapshot,
)
from ddpforge.components.registry import Registry
from ddpforge.errors import ExitCode, ForgeError, RecipeError, SetupError, UsageError
from ddpforge.launchers import process
from ddpforge.launchers.torchrun import NO_GPUS, torchrun_command
from ddpforge.recipe import Diagnostic, LoadedRecipe, load_recipe
from ddpforge.recipe.schema import TrainSection
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.parity.probe import GRADIENT
from ddpforge.tools.parity.specs import Spec, parse, split

__all__ = ["ComparedRun", "ParityReport", "RunFailed", "StartRanks", "Verdict", "parity", "plan_run", "torchrun"]

StartRanks = Callable[[Sequence[str], int, Path], int]
"""Runs `ddpforge run ARGUMENTS` on a number of ranks, writes their output to the file, and returns the exit code."""
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
                    "worst": [_excess(one) for one in quantity.worst],
                    "points": [_point(point) for point in quantity.points],
                }
                for quantity in self.quantities
            },
        }


@dataclass(frozen=True)
class ParityReport:
    """Result of a comparison; the first verdict is that of the reference.

    `tolerances` are the given ones. If rounding was measured, they are upper limits, and `measured` has
    quantities with the tolerances that it gives.
    """

    recipe: str
    precision: str
    tolerances: Tolerances
    verdicts: list[Verdict]
    measured: Sequence[Quantity] = ()

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
            "measured": {one.name: _finite(one.tolerance) for one in self.measured},
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

    Rounding is measured by further runs of the first, from weights that differ by one unit in the last place.

    Args:
        strategies: texts as described in `specs`.
        ranks: number of ranks of strategies that do not set it.
        steps: number of steps of each run.
        out: folder for the folders of the runs; it must be empty.
        tolerance: tolerance of the loss; the others are scaled in proportion, and no rounding is measured.
        say: receives messages about the progress.

    Raises:
        UsageError, RecipeError: the comparison is not possible; raised before a run starts, with every problem.
        SetupError: `out` cannot be written.
        RunFailed: the reference did not reach its end, or the comparison was stopped; the later runs are not started.
    """
    runs = _plan(recipe, split(strategies), ranks=ranks, steps=steps, out=out, sets=sets)
    precision = runs[0].loaded.recipe.train.precision
    tolerances = VISIBLE if tolerance is None else TOLERANCES[precision].scaled(tolerance)
    nearby = [runs[0].perturbed(seed) for seed in range(1, 1 + PERTURBED)] if tolerance is None else []
    _make_empty(out)
    ranks_of = partial(torchrun, _variables(runs, say))

    failed: dict[str, RunFailed] = {}
    for run in [*runs, *nearby]:
        what = "training" if run in runs else "weights differ by one unit in the last place: training"
        say(f"{run.spec.text}: {what} {steps} steps on {run.spec.ranks} rank{'s' * (run.spec.ranks > 1)}")
        try:
            run.train(start=None if run is runs[0] else runs[0].start(), ranks=ranks_of)
        except RunFailed as error:
            if run is runs[0] or run in nearby or error.code == ExitCode.INTERRUPTED:
                raise
            say(f"{run.spec.text}: failed with exit code {error.code}")
            failed[run.name] = error
    reference, perturbed = runs[0].record(), [one.record() for one in nearby]
    verdicts = [Verdict(runs[0].spec, runs[0].name, reference.steps, [], reference.averages)]
    for run in runs[1:]:
        if run.name in failed:
            verdicts.append(Verdict(run.spec, run.name, 0, [], failed=failed[run.name]))
            continue
        record = run.record()
        found = compare(record, reference, tolerances, perturbed)
        verdicts.append(Verdict(run.spec, run.name, record.steps, found, record.averages))
    measured = compare(reference, reference, tolerances, perturbed) if perturbed else ()
    return ParityReport(recipe, precision, tolerances, verdicts, measured)


def _variables(runs: Sequence[ComparedRun], say: Callable[[str], None]) -> Mapping[str, str]:
    """Returns environment variables that make all runs use the CPU, if there are too few GPUs for one of them."""
    from ddpforge.api import accelerators

    gpus, most = accelerators(), max(run.spec.ranks for run in runs)
    if not gpus or gpus >= most or runs[0].loaded.recipe.train.device != "auto":
        return {}
    say(f"comparing on the CPU: {most} processes need {most} GPUs, but there {'are' if gpus > 1 else 'is'} {gpus}")
    return NO_GPUS


def torchrun(
    variables: Mapping[str, str], arguments: Sequence[str], ranks: int, output: Path, *, python: str | None = None
) -> int:
    """Runs `ddpforge run ARGUMENTS` under torchrun, with these environment variables; see StartRanks.

    `python` is another interpreter, e.g. of an environment with another torch.
    """
    command = torchrun_command(arguments, nproc=ranks)
    command[0] = python or command[0]
    with output.open("wb") as file:
        return process.launch(command, nproc=ranks, output=file, variables=variables)


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


def _excess(one: Excess) -> dict[str, Any]:
    return {name: value if isinstance(value, str) else _finite(value) for name, value in asdict(one).items()}


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


# ---------------------------------------------------------------------------------------------- the runs
@dataclass(frozen=True)
class ComparedRun:
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

    def changed(self, name: str, sets: Sequence[str] = ()) -> ComparedRun:
        """Returns a run of another name with further settings."""
        sets = [*self.sets, f"name={toml_value(name)}", *sets]
        return replace(self, sets=sets, loaded=load_recipe(self.recipe, sets=sets))

    def perturbed(self, seed: int) -> ComparedRun:
        """Returns a run that differs only by one unit in the last place of the weights."""
        train, key = self.loaded.recipe.train, f"callbacks.{_PROBE}"
        # TF32 has as many bits as float16. On a CPU it is not used: the measured differences are then too large.
        low = {"bf16": "bfloat16", "fp16": "float16"}.get(train.precision, "float16" if _uses_tf32(train) else "")
        sets = [f"{key}.perturbed={seed}", *([f"{key}.dtype={toml_value(low)}"] if low else [])]
        return self.changed(f"perturbed-{seed}", sets)

    def train(self, *, start: Path | None, ranks: StartRanks, allow: Sequence[str] = ()) -> None:
        """Trains the run from the checkpoint `start`, if given; raises RunFailed.

        `allow` are further keys that may differ from the run of the checkpoint.
        """
        if start:
            self.folder.create(**snapshot(self.loaded))
            copytree(start, self.folder.checkpoints / start.name)
        arguments = [self.recipe, *(f"--set={one}" for one in self.sets), f"--out={self.out}"]
        # All runs begin with the weights of the first.
        arguments += [f"--allow-change={key}" for key in ("run", *allow)] if start else []
        output = self.out / f"{self.name}.log"
        code = ranks(arguments, self.spec.ranks, output)
        if code:
            raise RunFailed(self.spec, code, output.read_text(errors="replace"))

    def start(self) -> Path:
        """Returns the checkpoint before the first step."""
        found, _ = committed(self.folder.checkpoints)
        return next(path for path, manifest in found if manifest.step == 0)

    def record(self) -> Record:
        """Reads the record of the finished run."""
        from ddpforge.api import CheckpointReader

        checkpoint = CheckpointReader(committed(self.folder.checkpoints)[0][0][0])
        final = {name: checkpoint.read("model", name) for name in checkpoint.names("model")}
        probed = [name for name in checkpoint.names("callbacks") if name.startswith(f"{_PROBE}/")]
        kept = {name.removeprefix(f"{_PROBE}/"): checkpoint.read("callbacks", name) for name in probed}
        initial = {name: one for name, one in kept.items() if not name.startswith(GRADIENT)}
        gradients = {name.removeprefix(GRADIENT): one for name, one in kept.items() if name not in initial}
        return Record(read_metrics(self.folder.path), initial, final, self.averages, gradients)


def _uses_tf32(train: TrainSection) -> bool:
    from ddpforge.api import accelerators

    return train.tf32 and train.device != "cpu" and bool(accelerators())


def _plan(
    recipe: str, strategies: Sequence[str], *, ranks: int, steps: int, out: Path, sets: Sequence[str]
) -> list[ComparedRun]:
    """Returns the runs, checked as far as possible without starting them."""
    if len(strategies) < 2:
        raise UsageError("there is nothing to compare with", hints=["name several strategies: --strategies ddp,fsdp"])
    registry = Registry.installed()
    runs: list[ComparedRun] = []
    problems: dict[Diagnostic, None] = {}  # without repetition: a problem of the recipe occurs under every strategy
    for number, text in enumerate(strategies, start=1):
        label = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip(".-")
        name = f"{number}-{label}"[:100]
        try:
            spec = parse(text, registry, ranks=ranks)
            runs.append(plan_run(recipe, [*sets, *spec.sets], spec, registry, name=name, steps=steps, out=out))
        except RecipeError as error:
            problems |= dict.fromkeys(error.problems)
    if problems:
        raise RecipeError(list(problems))
    return runs


def plan_run(
    recipe: str, sets: Sequence[str], spec: Spec, registry: Registry, *, name: str, steps: int, out: Path
) -> ComparedRun:
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
    contract = contract_of(chosen.strategy)
    if contract.reads_gradients:
        overrides.append(f"callbacks.{_PROBE}.gradients=true")
    return ComparedRun(spec, recipe, overrides, loaded, out, contract.averages)


def _overrides(loaded: LoadedRecipe, name: str, steps: int) -> list[str]:
    """Returns the settings of a run in the comparison; none of them changes the computation of a step."""
    key = f"callbacks.{_PROBE}"
    return [
        f"name={toml_value(name)}",
        "track.every=1st",
        *(f"track.{toml_value(tracker)}.use=ddpforge.interfaces:Tracker" for tracker in loaded.recipe.track.trackers),
        *(["train.eval_by=run", f"train.eval_every={steps}st"] if loaded.recipe.data.eval else []),
        "checkpoint.at_start=true",
        f"checkpoint.every={steps}st",
        "checkpoint.keep.last=2",
        f"{key}.use=ddpforge.tools.parity.probe:probe",
        f"{key}.steps={steps}",
        f"{key}.inherit={toml_value(loaded.recipe.checkpoint.init_from is not None)}",
    ]
