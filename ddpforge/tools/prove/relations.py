"""Runs a script under changes whose result is known, compares the gradients, and names the relations that do not hold.

No oracle is needed: the same samples in another order, in smaller micro-batches or on more ranks have the same
gradient. The measure of rounding is the difference that one unit in the last place of the weights makes, in this model
and dtype.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.tools.prove.observed import ScriptChange
from ddpforge.tools.script_comparison.compare import run_alone

__all__ = ["Broken", "Certificate", "Relation", "prove"]

_TIMES_ROUNDING = 100.0  # a difference up to this many times that of one unit in the last place is rounding
_LEAST = 1e-6  # relative differences up to this are rounding, whatever the measured one
_SMALL = 1e-3  # gradients below this share of the largest are compared relative to that share
_OUTPUT = 12  # lines of a failed script to show
_NOT_INHERITED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Broken:
    """First step at which a relation does not hold.

    Attributes:
        parameter: The parameter whose gradient differs most.
        difference: Of this gradient, relative to its norm.
        factor: By which the gradient is multiplied; None if it is not a multiple.
        worst: Factors of the five parameters that differ most.
        loss: Of the script and under the change, the mean over the backward passes of the step.
    """

    step: int
    parameter: str
    difference: float
    factor: float | None
    worst: Mapping[str, float | None]
    loss: tuple[float, float]


@dataclass(frozen=True)
class Relation:
    """Relation and its result: "holds", "broken" or "not tried"."""

    name: str
    about: str
    result: str
    why: str = ""
    difference: float = 0.0  # the largest one
    allowed: float = 0.0  # at the same step
    broken: Broken | None = None
    meaning: str = ""


@dataclass(frozen=True)
class Certificate:
    """Results of all relations for one script."""

    script: str
    steps: int
    rounding: float  # largest difference that one unit in the last place of the weights makes
    relations: Sequence[Relation] = field(default_factory=list)

    @property
    def broken(self) -> list[Relation]:
        """Returns the relations that do not hold."""
        return [one for one in self.relations if one.result == "broken"]

    def as_dict(self) -> dict[str, Any]:
        """Returns the certificate for JSON."""
        return asdict(self) | {"proved": not self.broken and any(one.result == "holds" for one in self.relations)}

    def lines(self) -> Iterator[str]:
        """Yields the certificate as lines of text."""
        yield f"{'relation':<12}  {'result':<9}  {'difference':>10}  {'allowed':>8}"
        for one in self.relations:
            numbers = "" if one.result == "not tried" else f"{one.difference:>10.1e}  {one.allowed:>8.1e}"
            yield f"{one.name:<12}  {one.result:<9}  {numbers or one.why}"
        for one in self.broken:
            assert one.broken is not None
            found = one.broken
            factor = f" × {found.factor:.4g}" if found.factor is not None else f" differs by {found.difference:.1e}"
            yield ""
            yield f"{one.name}: {one.about}"
            loss = f"loss {found.loss[0]:.6g}, {found.loss[1]:.6g}"
            yield f"  step {found.step}: the gradient of `{found.parameter}`{factor}; {loss}"
            others = [f"{name} × {value:.4g}" for name, value in list(found.worst.items())[1:] if value is not None]
            if others:
                yield f"  also: {', '.join(others)}"
            if one.meaning:
                yield f"  {one.meaning}"
        yield ""
        tried = [one for one in self.relations if one.result != "not tried"]
        held = len(tried) - len(self.broken)
        yield f"{held} of {len(tried)} relations hold over {self.steps} steps of {self.script}"


@dataclass(frozen=True)
class _Tried:
    name: str
    about: str
    change: ScriptChange
    ranks: int = 1


def prove(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = 3,
    ranks: int = 2,
    batch: str = "",
    accumulate: str = "",
    samples: int = 8,
    torchrun: bool = False,
) -> Certificate:
    """Tries all relations on a script.

    Args:
        script: runs unmodified, with `arguments`, several times for `steps` optimizer steps each.
        ranks: the number of processes for the relation of ranks; 1 leaves it out.
        batch: option of the script that sets the samples of a micro-batch, with "{}" for their number: "--bs {}".
        accumulate: option that sets the number of micro-batches in a step: "--ga {}".
        samples: the samples of a step, if `batch` is given.
        torchrun: starts the script by torchrun with one process too, as scripts that join ranks need.

    Raises UsageError if the script fails, or if its own repetition differs.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}", hints=["give the path of a Python file"])
    text = script.read_text(encoding="utf-8")
    joins = torchrun or any(word in text for word in ("init_process_group", "LOCAL_RANK"))
    with TemporaryDirectory(prefix="ddpforge-prove-") as name:
        runs = _Runs(script, arguments, Path(name), steps, batch, accumulate, samples, joins)
        reference = runs.run(ScriptChange())
        again, rounded = runs.run(ScriptChange()), runs.run(ScriptChange(rounding=True))
        rounding = [_difference(one, other) for one, other in zip(reference.gradients, rounded.gradients, strict=False)]
        allowed = [max(_LEAST, _TIMES_ROUNDING * one) for one in rounding]
        found = [_judged(_Tried("again", "The same command again.", ScriptChange()), reference, again, allowed)]
        if found[0].result == "broken":
            raise UsageError(
                f"two runs of {script} differ: {found[0].difference:.1e} at step {found[0].broken.step}",  # type: ignore[union-attr]
                hints=["seed it: torch.manual_seed(0), or the trainer's option", "the relations need equal samples"],
            )
        for one in _relations(ranks):
            why = runs.obstacle(one, text)
            if why:
                found.append(Relation(one.name, one.about, "not tried", why))
                continue
            try:
                base, changed = _both(runs, one, reference)
            except UsageError as error:  # the script alone runs: it fails under this change
                found.append(Relation(one.name, one.about, "not tried", error.message.splitlines()[-1].strip()))
                continue
            if why := _without_effect(one, base, changed):
                found.append(Relation(one.name, one.about, "not tried", why))
            else:
                found.append(_judged(one, base, changed, allowed))
    return Certificate(str(script), len(reference.gradients), max(rounding, default=0.0), found)


def _both(runs: _Runs, one: _Tried, reference: _Run) -> tuple[_Run, _Run]:
    """Returns a run and one under the change, which the relation compares."""
    changed = runs.run(replace(one.change, batches=reference.batches), one.ranks)
    if one.ranks == 1 or sorted(reference.samples[0]) == sorted(changed.samples[0]):
        return reference, changed
    # One process may have another sampler than several.
    more = replace(one.change, divide=2 * one.ranks, batches=reference.batches)
    return changed, runs.run(more, 2 * one.ranks)


def _without_effect(one: _Tried, base: _Run, changed: _Run) -> str:
    """Returns the reason why two runs prove nothing; empty if only the change is different."""
    before, after = base.samples[0], changed.samples[0]
    if not before:
        return "the samples cannot be read from the inputs of the model"
    if len(changed.gradients) < len(base.gradients):
        return f"the changed run ended after {len(changed.gradients)} steps"
    if sorted(after) != sorted([*before, *before] if one.change.doubled else before):
        return "the steps have other samples"
    nothing = {
        "order": before == after,
        "workers": not changed.loaders,
        "split": changed.passes != base.passes * one.change.split,
    }
    return "the change has no effect on this script" if nothing.get(one.name) else ""


def _relations(ranks: int) -> Iterator[_Tried]:
    yield _Tried("order", "The samples of a batch in reverse order.", ScriptChange(order=True))
    yield _Tried("doubled", "Each sample of a batch twice: the mean is the same.", ScriptChange(doubled=True))
    yield _Tried("workers", "Two loader processes.", ScriptChange(workers=2))
    yield _Tried("split", "Two micro-batches of half the size, accumulated.", ScriptChange(split=2))
    if ranks > 1:
        yield _Tried(
            "ranks", f"{ranks} processes, each with its share of the batch.", ScriptChange(divide=ranks), ranks
        )


# ---------------------------------------------------------------------------------------------- runs of the script
@dataclass(frozen=True)
class _Run:
    gradients: Sequence[Mapping[str, Tensor]]
    losses: Sequence[float]  # means over the backward passes of each step, on rank 0
    batches: Sequence[int]
    samples: Sequence[Sequence[str]]  # fingerprints of the samples of each step, of one rank after the other
    passes: int  # backward passes of the first step on rank 0
    loaders: int  # DataLoaders that the script built


@dataclass
class _Runs:
    script: Path
    arguments: Sequence[str]
    folder: Path
    steps: int
    batch: str
    accumulate: str
    samples: int
    joins: bool
    _number: int = 0

    def obstacle(self, one: _Tried, text: str) -> str:
        """Returns the reason why a relation cannot be tried; empty if it can."""
        if one.change.split > 1 and not (self.batch and self.accumulate):
            if "transformers" in text or "trl" in text or "lightning" in text:
                return ""
            if "Accelerator" in text and ".accumulate(" in text:
                return ""
            return "give --batch and --accumulate, the script's own options"
        known = self.joins or any(word in text for word in ("Accelerator", "transformers", "trl", "lightning"))
        return "the script does not join ranks" if one.ranks > 1 and not known else ""

    def run(self, change: ScriptChange, ranks: int = 1) -> _Run:
        """Runs the script under a change; raises UsageError if it fails."""
        self._number += 1
        folder = self.folder / str(self._number)
        folder.mkdir()
        options = self._options(change)
        if options:  # the script changes its batches by itself
            change = replace(change, split=1, divide=1)
        python = ["-m", "ddpforge.tools.prove.observed"]
        program = [*python, str(folder), str(self.steps), json.dumps(asdict(change)), str(self.script)]
        launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
        started = [sys.executable, *(launcher if self.joins or ranks > 1 else []), *program, *self.arguments, *options]
        variables = {name: value for name, value in os.environ.items() if name not in _NOT_INHERITED}
        variables |= {"OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "TOKENIZERS_PARALLELISM": "false"}
        if not torch.cuda.is_available():
            variables["ACCELERATE_USE_CPU"] = "true"  # otherwise its ranks on CPUs do not join each other
        with (folder / "output.txt").open("w+b") as output:
            code = run_alone(started, variables, output)
        files = [folder / f"steps-{rank}.json" for rank in range(ranks)]
        if code or not all(file.exists() for file in files):
            last = (folder / "output.txt").read_text(errors="replace").rstrip().splitlines()[-_OUTPUT:]
            raise UsageError(
                f"{self.script} failed with exit code {code}:\n" + "\n".join(last),
                hints=["it must work alone; arguments of the script come after `--`"],
            )
        each = [json.loads(file.read_text()) for file in files]
        gradients = sorted(folder.glob("gradients-*.safetensors"), key=lambda file: int(file.stem.partition("-")[2]))
        if not gradients:
            raise UsageError(f"{self.script} ended without an optimizer step in its process")
        steps = each[0]["steps"]
        losses = [sum(row["losses"]) / max(1, len(row["losses"])) for row in steps]
        samples = [
            [one for rank in each if step < len(rank["steps"]) for one in rank["steps"][step]["samples"]]
            for step in range(len(steps))
        ]
        passes = len(steps[0]["losses"])
        return _Run(
            [load_file(file) for file in gradients], losses, each[0]["batches"], samples, passes, each[0]["loaders"]
        )

    def _options(self, change: ScriptChange) -> list[str]:
        """Returns the script's own options for its micro-batches."""
        if not self.batch:
            return []
        micro, rest = divmod(self.samples, change.split * change.divide)
        if rest or not micro:
            raise UsageError(f"--samples {self.samples} cannot be divided by {change.split * change.divide}")
        words = self.batch.format(micro).split()
        return words + (self.accumulate.format(change.split).split() if self.accumulate else [])


# ---------------------------------------------------------------------------------------------- comparison
def _judged(tried: _Tried, reference: _Run, changed: _Run, allowed: Sequence[float]) -> Relation:
    largest, most = 0.0, allowed[0] if allowed else _LEAST
    for step, (one, other) in enumerate(zip(reference.gradients, changed.gradients, strict=False), start=1):
        limit = allowed[min(step, len(allowed)) - 1]
        differences = _differences(one, other)
        name = max(differences, key=lambda each: differences[each])
        if differences[name] > limit:
            order = sorted(differences, key=lambda each: -differences[each])[:5]
            factors = {each: _factor(one.get(each), other.get(each)) for each in order}
            loss = (reference.losses[step - 1], changed.losses[step - 1])
            broken = Broken(step, name, differences[name], factors[name], factors, loss)
            meaning = _meaning(tried, _common(list(factors.values())))
            return Relation(
                tried.name, tried.about, "broken", "", differences[name], limit, broken=broken, meaning=meaning
            )
        if differences[name] >= largest:
            largest, most = differences[name], limit
    return Relation(tried.name, tried.about, "holds", "", largest, most)


def _differences(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the difference of each gradient, relative to its norm; infinite if only one run has it."""
    norms = {name: one[name].double().norm().item() if name in one else 0.0 for name in {**one, **other}}
    least = _SMALL * max(norms.values(), default=0.0)
    found = {}
    for name, norm in norms.items():
        a, b = one.get(name), other.get(name)
        if a is None or b is None or a.shape != b.shape:
            found[name] = math.inf
            continue
        distance = (a.double() - b.double()).norm().item()
        found[name] = distance / max(norm, least) if distance else 0.0
    return found


def _difference(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    return max(_differences(one, other).values(), default=0.0)


def _factor(one: Tensor | None, other: Tensor | None) -> float | None:
    """Returns the factor from `one` to `other`; None if the two are not parallel."""
    if one is None or other is None or one.shape != other.shape:
        return None
    a, b = one.double(), other.double()
    square = (a @ a).item()
    if not square:
        return None
    factor = (a @ b).item() / square
    rest = (b - factor * a).norm().item()
    return factor if rest <= 1e-2 * max(b.norm().item(), 1e-30) else None


def _common(factors: Sequence[float | None]) -> float | None:
    """Returns the factor of all parameters, None if they differ."""
    known = [one for one in factors if one is not None]
    same = len(known) == len(factors) and all(math.isclose(one, known[0], rel_tol=1e-2) for one in known)
    return known[0] if known and same else None


def _meaning(tried: _Tried, factor: float | None) -> str:
    """Returns the usual cause of a factor."""
    parts = {"split": tried.change.split, "ranks": tried.ranks, "doubled": 2}.get(tried.name, 0)
    if factor is None:
        return {
            "split": "no common factor: each micro-batch has its own mean (tokens, weights), or samples are compared",
            "ranks": "no common factor: each rank has a mean of its own, or a part is not reduced over ranks",
            "doubled": "no common factor: the loss compares samples with each other",
            "workers": "the samples depend on the loader process: random numbers of numpy or random, or shared state",
            "order": "the loss depends on the place of a sample in its batch",
        }.get(tried.name, "")
    near = {parts: "times", 1 / parts if parts else 0: "divided"}
    kind = next((how for value, how in near.items() if value and math.isclose(factor, value, rel_tol=0.02)), "")
    texts = {
        ("split", "times"): "the losses of micro-batches are added and not divided by their number",
        ("split", "divided"): "the loss is divided by the number of micro-batches twice",
        ("ranks", "times"): "gradients are added over ranks and not averaged",
        (
            "ranks",
            "divided",
        ): "gradients are averaged over ranks, and the loss is divided by the samples of all ranks",
        ("doubled", "times"): "the loss is a sum over samples: the learning rate depends on the batch size",
    }
    return texts.get((tried.name, kind), f"all gradients are multiplied by {factor:.4g}")
