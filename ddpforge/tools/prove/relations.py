"""Tries changes whose result is known, compares the gradients, and names the relations that do not hold.

No oracle is needed: the same samples in another order, in smaller micro-batches or on more ranks have the same
gradient. The measure of rounding is the difference that one unit in the last place of the weights makes, in this model
and dtype.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Protocol

from ddpforge.api import PERTURBED, UPDATES, Rounding, Values, apart, excesses
from ddpforge.errors import UsageError
from ddpforge.machine import usable_cores
from ddpforge.tools.prove.certificate import Broken, Certificate, Relation
from ddpforge.tools.prove.changes import ScriptChange
from ddpforge.tools.prove.meaning import meaning
from ddpforge.tools.prove.runs import Observed, Options, ScriptRuns

__all__ = ["SCALE", "Runs", "Tried", "middle", "prove", "try_relations"]

SCALE = 4.0  # a power of two: products are exact
_BY_SAMPLES = ("order", "doubled", "padding", "workers", "split", "ranks")


@dataclass(frozen=True)
class Tried:
    """Relation to try.

    Attributes:
        base: Change of the run to compare with; None for the unchanged run.
        equal_loss: The sum of the losses of a step must be the same, too.
        why: Reason why it cannot be tried; empty if it can.
        more: Further arguments of the script.
    """

    name: str
    about: str
    change: ScriptChange
    ranks: int = 1
    base: ScriptChange | None = None
    equal_loss: bool = True
    why: str = ""
    more: Sequence[str] = ()


class Runs(Protocol):
    """Runs of a script or of a recipe under changes."""

    steps: int

    @property
    def name(self) -> str:
        """Returns the name of the script or the recipe."""

    def relations(self, ranks: int) -> Iterator[Tried]:
        """Yields the relations; one that cannot be tried has a reason."""

    def run(
        self, change: ScriptChange, *, ranks: int = 1, steps: int | None = None, more: Sequence[str] = ()
    ) -> Observed:
        """Runs under a change; raises UsageError if it fails."""

    def resumed(self, at: int) -> Observed:
        """Runs `at` steps, stops, and returns the steps after a resume; raises UsageError if it fails."""


def prove(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    steps: int = 3,
    ranks: int = 2,
    skip: Sequence[str] = (),
    options: Options | None = None,
) -> Certificate:
    """Tries all relations on a script, which runs unmodified, with `arguments`, several times for `steps` steps.

    `ranks` is the largest number of processes; 1 leaves them out. Relations in `skip` are left out.

    Raises UsageError if the script fails, or if its own repetition differs.
    """
    if not script.is_file():
        raise UsageError(f"there is no script {script}", hints=["give the path of a Python file"])
    with TemporaryDirectory(prefix="ddpforge-prove-") as name, ExitStack() as life:
        runs = life.enter_context(_OfScript(script, arguments, Path(name), steps, options or Options()))
        return try_relations(runs, ranks=ranks, skip=skip)


def try_relations(runs: Runs, *, ranks: int, skip: Sequence[str] = ()) -> Certificate:
    """Tries all relations that apply; raises UsageError if the unchanged runs fail, or differ from each other."""
    wanted = [one for one in runs.relations(ranks) if one.name not in skip]
    if unknown := set(skip) - {one.name for one in runs.relations(ranks)}:
        names = ", ".join(one.name for one in wanted)
        raise UsageError(f"there is no relation `{min(unknown)}` to skip", hints=[f"relations: {names}"])
    reference = runs.run(ScriptChange())
    with ThreadPoolExecutor(max(2, usable_cores())) as pool:
        change = ScriptChange(batches=reference.batches, dtype=reference.dtype)
        again = pool.submit(runs.run, change)
        near = [pool.submit(runs.run, replace(change, perturbed=seed)) for seed in range(1, 1 + PERTURBED)]
        tried = [(one, pool.submit(_both, runs, one, reference)) for one in wanted]
        limits = RelationLimits.measured(reference, [one.result() for one in near])
        found = [judged(Tried("again", "The same command again.", change), reference, again.result(), limits)]
        if found[0].broken:
            raise UsageError(
                f"two runs of {runs.name} differ: {found[0].broken.quantity} at step {found[0].broken.step}",
                hints=["seed it: torch.manual_seed(0), or the trainer's option", "the relations need equal samples"],
            )
        for one, pair in tried:
            found.append(_tried(one, pair.result, limits))
    found = _without_random(found)
    rounding = max((max(row.values(), default=0.0) for row in limits.gradients.spread), default=0.0)
    return Certificate(runs.name, len(reference.gradients), rounding, reference.dtype, found)


def _tried(one: Tried, pair: Callable[[], tuple[Observed, Observed]], limits: RelationLimits) -> Relation:
    if one.why:
        return Relation(one.name, one.about, "not tried", one.why)
    try:
        base, changed = pair()
    except UsageError as error:  # the script alone runs: it fails under this change
        return Relation(one.name, one.about, "not tried", _last_error(error.message))
    if why := without_effect(one, base, changed):
        return Relation(one.name, one.about, "not tried", why)
    return judged(one, base, changed, limits)


def _last_error(text: str) -> str:
    """Returns the last line that names an exception, or else the last line."""
    lines = [line.strip() for line in text.splitlines()]
    return next(
        (line for line in reversed(lines) if re.match(r"(\[rank\d+\]: )?[\w.]+(Error|Exception)\b", line)), lines[-1]
    )


def _both(runs: Runs, one: Tried, reference: Observed) -> tuple[Observed, Observed]:
    """Returns a run and one under the change, which the relation compares."""
    if one.why:
        return reference, reference
    if one.name == "resume":
        return reference, runs.resumed(middle(runs.steps))
    change = replace(one.change, batches=reference.batches)
    changed = runs.run(change, ranks=one.ranks, more=one.more)
    if one.base is not None:
        return runs.run(replace(one.base, batches=reference.batches)), changed
    if one.ranks == 1 or [*map(sorted, reference.samples)] == [*map(sorted, changed.samples)]:
        return reference, changed
    # One process may have another sampler than several.
    return changed, runs.run(replace(change, divide=2 * one.ranks), ranks=2 * one.ranks)


def middle(steps: int) -> int:
    """Returns the number of steps before a resume."""
    return max(1, steps // 2)


def _without_random(found: Sequence[Relation]) -> list[Relation]:
    """Returns the relations; those of samples are not tried if the forward pass draws random numbers."""
    if not any(one.name == "seed" and one.broken for one in found):
        return [*found]
    why = "the computation draws random numbers: its result depends on a seed that is set before a forward pass"
    return [
        Relation(one.name, one.about, "not tried", why) if one.name in ("seed", *_BY_SAMPLES) else one for one in found
    ]


def without_effect(one: Tried, base: Observed, changed: Observed) -> str:
    """Returns the reason why two runs prove nothing; empty if only the change is different."""
    if not any(base.samples) and one.name in _BY_SAMPLES:
        return "the samples cannot be read from the inputs of the model"
    after, before = ({name: each.counts.get(name, 0) for name in _EFFECTS.values()} for each in (changed, base))
    counted = one.name in _EFFECTS and one.change != ScriptChange()  # settings of a recipe have their effect
    if counted and after[_EFFECTS[one.name]] == (
        before[_EFFECTS[one.name]] if one.name in ("evaluation", "checkpointing") else 0
    ):
        return _NOTHING.get(one.name, "the change has no effect on this script")
    if one.name == "split" and changed.passes != base.passes * one.change.split:
        return "the change has no effect on this script"
    if one.name == "resume":
        return ""
    if len(changed.gradients) < len(base.gradients) and one.name != "scale":
        return f"the changed run ended after {len(changed.gradients)} steps"
    for theirs, mine in zip(base.samples, changed.samples, strict=False):
        if sorted(mine) != sorted([*theirs, *theirs] if one.change.doubled else theirs):
            return "the steps have other samples"
    return "the change has no effect on this script" if one.name == "order" and base.samples == changed.samples else ""


_EFFECTS = {  # the count of each relation that must not be 0, or differ
    **{"workers": "loaders", "padding": "padded", "frozen": "frozen", "clipping": "clipped", "compile": "compiled"},
    **{"evaluation": "evaluated", "checkpointing": "checkpointed", "seed": "reseeded"},
}
_NOTHING = {
    "padding": "no batch has an attention mask",
    "clipping": "the script does not clip by torch.nn.utils.clip_grad_norm_",
    "evaluation": "the change has no effect on this script: is there evaluation data?",
}


# ---------------------------------------------------------------------------------------------- comparison
@dataclass(frozen=True)
class RelationLimits:
    """Rounding of each kind of quantity."""

    gradients: Rounding
    norms: Rounding
    updates: Rounding
    losses: Rounding

    @classmethod
    def measured(cls, reference: Observed, near: Sequence[Observed]) -> RelationLimits:
        """Measures rounding by runs whose weights differ by one unit in the last place."""

        def numbers(kind: str) -> list[list[Values]]:
            return [[{kind: one} for one in getattr(run, kind)] for run in (reference, *near)]

        updates = [[*run.updates] for run in (reference, *near)]
        return cls(
            Rounding.measured(reference.gradients, *(one.gradients for one in near)),
            Rounding.measured(*numbers("norms")),
            Rounding.measured(*updates, factor=UPDATES, resolution=reference.resolution),
            Rounding.measured(*numbers("losses")),
        )


def judged(one: Tried, base: Observed, changed: Observed, limits: RelationLimits) -> Relation:
    """Compares two runs step by step; returns the relation with the first step at which they differ."""
    shift = len(base.gradients) - len(changed.gradients) if one.name == "resume" else 0
    largest, most = 0.0, limits.gradients.allowed(1)
    for step, mine in enumerate(changed.gradients[: len(base.gradients) - shift], start=shift):
        theirs = base.gradients[step]
        differences = apart(mine, theirs)
        allowed = {name: limits.gradients.allowed(step + 1, name) for name in differences}
        name = max(differences, key=lambda each: differences[each] / allowed[each])
        if differences[name] / allowed[name] >= largest / most:
            largest, most = differences[name], allowed[name]
        broken = _broken(one, step, shift, base, changed, limits)
        if broken:
            factor = broken.factor if _common(broken) and abs((broken.factor or 0) - 1) > 1e-2 else None
            why = meaning(one.name, factor, one.change.split, one.ranks, broken.quantity)
            difference = largest if broken.quantity == "gradient" else broken.difference
            return Relation(one.name, one.about, "broken", "", difference, most, broken, why)
    return Relation(one.name, one.about, "holds", "", largest, most)


def _broken(
    one: Tried, step: int, shift: int, base: Observed, changed: Observed, limits: RelationLimits
) -> Broken | None:
    """Returns the first quantity of a step that differs by more than rounding."""
    at = step - shift  # the number of the step in the changed run
    loss = (_at(base.losses, step), _at(changed.losses, at))
    if one.name == "resume" and sorted(_of(base.samples, step)) != sorted(_of(changed.samples, at)):
        return Broken(step + 1, "samples", "", 0.0, None, (), loss)
    modes = _of(changed.modes, at)
    if one.name in ("evaluation", "resume") and modes and not _of(base.modes, step):
        return Broken(step + 1, "mode", modes[0], 0.0, None, (), loss)
    numbers: list[tuple[str, Rounding, Values, Values]] = [
        ("gradient", limits.gradients, changed.gradients[at], base.gradients[step]),
        ("gradient norm", limits.norms, _number("norms", changed.norms, at), _number("norms", base.norms, step)),
    ]
    theirs, mine = _of_names(base.updates, step), _of_names(changed.updates, at)
    if theirs and mine:
        numbers.append(("update", limits.updates, mine, theirs))
    if one.equal_loss:
        pair = _number("losses", changed.losses, at), _number("losses", base.losses, step)
        numbers.append(("loss", limits.losses, *pair))
    for quantity, rounding, value, reference in numbers:
        worst = excesses(value, reference, lambda name, its=rounding: its.allowed(step + 1, name))  # type: ignore[misc]
        if worst:
            name = worst[0].name if quantity in ("gradient", "update") else ""
            return Broken(step + 1, quantity, name, worst[0].difference, worst[0].multiple, worst, loss)
    return None


def _at(values: Sequence[float], step: int) -> float:
    return values[step] if step < len(values) else 0.0


def _of(values: Sequence[Sequence[str]], step: int) -> Sequence[str]:
    return values[step] if step < len(values) else ()


def _of_names(values: Sequence[Mapping[str, float]], step: int) -> Mapping[str, float]:
    return values[step] if step < len(values) else {}


def _number(name: str, values: Sequence[float], step: int) -> Values:
    return {name: values[step]} if step < len(values) else {}


def _common(broken: Broken) -> bool:
    """True if the worst parameters have the same factor."""
    factors = [one.multiple for one in broken.worst]
    return all(one is not None and abs(one - (factors[0] or 0)) <= 1e-2 * abs(one) for one in factors)


# ---------------------------------------------------------------------------------------------- scripts
class _OfScript(ScriptRuns):
    """Runs of a script, with the relations that apply to its trainer."""

    def __enter__(self) -> _OfScript:
        super().__enter__()
        return self

    def relations(self, ranks: int) -> Iterator[Tried]:
        """Yields the relations, those of trainers with the reason why they cannot be tried."""
        trainer, options = self.trains_in, self.options
        yield Tried("order", "The samples of a batch in reverse order.", ScriptChange(order=True))
        yield Tried("doubled", "Each sample of a batch twice: the mean is the same.", ScriptChange(doubled=True))
        yield Tried("padding", "More padding on the right, outside of the attention mask.", ScriptChange(padding=True))
        yield Tried("workers", "Two loader processes.", ScriptChange(workers=2))
        flags = (
            "" if options.batch and options.accumulate else "give --batch and --accumulate, the script's own options"
        )
        accumulates = trainer in ("transformers", "lightning") or (trainer and ".accumulate(" in self.text)
        yield Tried(
            "split",
            "Two micro-batches of half the size, accumulated.",
            ScriptChange(split=2),
            equal_loss=False,
            why="" if accumulates else flags,
        )
        number = 2
        while number <= ranks:
            yield Tried(
                "ranks" if number == 2 else f"ranks {number}",
                f"{number} processes, each with its share of the batch.",
                ScriptChange(divide=number),
                number,
                equal_loss=False,
                why="" if self.joins_ranks else "the script does not join ranks",
            )
            number *= 2
        saves = trainer in ("transformers", "lightning") or (options.save and options.resume)
        yield Tried(
            "resume",
            f"A stop after step {middle(self.steps)}, and a resume.",
            ScriptChange(),
            why="" if saves else "give --save and --resume, the script's own options",
        )
        evaluates = trainer in ("transformers", "lightning") or options.evaluate
        yield Tried(
            "evaluation",
            "An evaluation after every step.",
            ScriptChange(evaluation=True),
            why="" if evaluates else "give --evaluate, the script's own option",
            more=options.evaluate.split(),
        )
        yield Tried(
            "clipping", "Clipping to a norm of 1e9, and none.", ScriptChange(clip=1e9), base=ScriptChange(clip=0.0)
        )
        yield Tried("frozen", "One more module, which is not trained.", ScriptChange(frozen=True))
        yield Tried(
            "scale",
            f"The loss × {SCALE:g}, and the learning rate of SGD ÷ {SCALE:g}: the same updates.",
            ScriptChange(scale=SCALE),
        )
        yield Tried(
            "checkpointing",
            "Activation checkpointing switched.",
            ScriptChange(checkpointing=True),
            why=""
            if trainer == "transformers" or options.checkpointing
            else "give --checkpointing, the script's option",
            more=options.checkpointing.split(),
        )
        yield Tried("compile", "The model compiled (traced; kernels of the eager mode).", ScriptChange(compile=True))
        yield Tried("seed", "Other global seeds before the first forward pass.", ScriptChange(reseed=True))

    def resumed(self, at: int) -> Observed:
        """Runs `at` steps, and the others from the checkpoint of the trainer, or by the script's own options."""
        with TemporaryDirectory(dir=self._folder) as kept:
            if self.options.save:
                saves = self.options.save.format(steps=at, path=f"{kept}/checkpoint").split()
                self.run(ScriptChange(), more=saves)
                resumes = self.options.resume.format(path=f"{kept}/checkpoint", steps=self.steps).split()
                return self.run(ScriptChange(), steps=self.steps - at, more=resumes)
            self.run(ScriptChange(save=kept, save_at=at), steps=at + 1)
            if not any(Path(kept).iterdir()):
                raise UsageError("the trainer saved no checkpoint")
            return self.run(ScriptChange(resume=kept), steps=self.steps - at)
