"""Compares the curves and the weights of two runs that must agree.

Plain data in, plain data out. The first difference is named by its quantity, its step and the tensor with most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

from ddpforge.guard.rounding import (
    UPDATES,
    Excess,
    Rounding,
    Values,
    apart,
    difference_norms,
    excesses,
    norm_of,
    ratio,
    relative,
    resolution_of,
    worst,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TOLERANCES",
    "VISIBLE",
    "Point",
    "Quantity",
    "Record",
    "Tolerances",
    "compare",
    "drift_text",
    "first_drift",
]


_EXACT = 1e-12  # for learning rates, which are functions of the step
_INITIAL = 1e-6  # for initial weights, which the same seed draws
_FIXED = ("initial weights", "lr", "steps")  # quantities that a perturbation of the weights does not change
_FLOOR = 1e-3  # values smaller than this share of the largest are compared relative to that share


# ---------------------------------------------------------------------------------------------- two runs
@dataclass(frozen=True)
class Tolerances:
    """Largest relative differences that rounding explains, over tens of steps.

    Differences of weights are relative to the distance that training moved them, as one vector for the whole model.
    """

    loss: float
    grad_norm: float
    # One number for all weights: single ones may differ by anything. If a gradient is zero in theory (e.g. of the bias
    # of an attention's keys), Adam turns its rounding noise into steps as large as the learning rate.
    weights: float
    metrics: float  # metrics of an evaluation, except its loss

    def scaled(self, loss: float) -> Tolerances:
        """Returns tolerances with `loss` for the loss, and the others in proportion."""
        return Tolerances(**{name: value * loss / self.loss for name, value in asdict(self).items()})


_HALF = Tolerances(loss=2e-2, grad_norm=2e-1, weights=1e-1, metrics=1e-1)
TOLERANCES: Mapping[str, Tolerances] = {
    "fp32": Tolerances(loss=1e-5, grad_norm=1e-4, weights=1e-3, metrics=1e-3),
    "bf16": _HALF,
    "fp16": _HALF,
}
"""By `train.precision`, for comparisons that measure no rounding. In fp32 at least ten times the measured difference
between one and two ranks after 20 steps. In bf16 five times for the norm and twice for weights: wider tolerances would
detect nothing."""
VISIBLE = _HALF
"""Upper limits of measured tolerances in every dtype: a user sees larger differences in the curves of two runs."""


@dataclass(frozen=True)
class Record:
    """Record of a run: a row of metrics per step, the strategy's own initial weights, and the final weights.

    `averages` is the value in the strategy's contract. `gradients` are those of the first step, if the strategy has
    them.
    """

    rows: Sequence[Mapping[str, Any]]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    averages: str = "gradients"
    gradients: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def steps(self) -> int:
        """Returns the number of steps trained."""
        return len(self.rows)


@dataclass(frozen=True)
class Point:
    """Quantity at one step; `difference` is relative, and infinite if it has no finite value.

    `allowed` is the largest difference that measured rounding explains, if it was measured.
    """

    step: int
    difference: float
    value: float | None = None
    reference: float | None = None
    allowed: float | None = None


@dataclass(frozen=True)
class Quantity:
    """One quantity of a run, compared with the reference; `where` is the tensor with the largest difference.

    `worst` are tensors that differ by more than rounding explains, the worst five.
    """

    name: str
    tolerance: float  # the largest one of all points
    points: tuple[Point, ...]
    where: str | None = None
    worst: tuple[Excess, ...] = ()

    @property
    def largest(self) -> Point:
        """Returns the point with the largest difference."""
        return max(self.points, key=lambda point: point.difference)

    @property
    def drift(self) -> Point | None:
        """Returns the first point with a difference above the tolerance, if any."""
        return next((point for point in self.points if point.difference > self._allowed(point)), None)

    def _allowed(self, point: Point) -> float:
        return self.tolerance if point.allowed is None else point.allowed


def compare(run: Record, reference: Record, tolerances: Tolerances, perturbed: Sequence[Record] = ()) -> list[Quantity]:
    """Compares every quantity that both runs have, in the order of cause and effect within a step.

    With `perturbed`, the reference from perturbed initial weights, rounding is measured: `tolerances` are then upper
    limits for quantities of the whole model, and gradients and updates are compared one by one.
    """
    found = _quantities(run, reference, tolerances)
    if perturbed:
        perturbed = [_aligned(one, reference) for one in perturbed]
        near = [{one.name: one for one in _quantities(each, reference, tolerances)} for each in perturbed]
        found = [_measured(one, [each[one.name] for each in near if one.name in each]) for one in found]
        found += _tensors(run, reference, perturbed)
    return found


def _quantities(run: Record, reference: Record, tolerances: Tolerances) -> list[Quantity]:
    shared = min(run.steps, reference.steps)
    found = [
        _initial(run, reference),
        _curve("lr", run, reference, shared, _EXACT, floor=0.0),
        _curve("train/loss", run, reference, shared, tolerances.loss),
    ]
    if run.averages == reference.averages == "gradients":
        found.append(_curve("train/grad_norm", run, reference, shared, tolerances.grad_norm))
    if run.steps != reference.steps:
        point = Point(shared + 1, math.inf, run.steps, reference.steps)
        found.append(Quantity("steps", 0.0, (point,)))
    elif shared:
        found += [_weights(run, reference, tolerances.weights), _buffers(run, reference, tolerances.weights)]
        found += _evaluation(run, reference, tolerances)
    return [quantity for quantity in found if quantity.points]


def _aligned(perturbed: Record, reference: Record) -> Record:
    """Returns the record as if training had begun from the reference's weights: the perturbation is not rounding."""
    begins = reference.initial
    moved = {
        name: one.double() - perturbed.initial[name].double() + begins[name].double()
        for name, one in perturbed.final.items()
        if name in perturbed.initial and name in begins and one.shape == begins[name].shape
    }
    return replace(perturbed, final={**perturbed.final, **moved})


def _measured(quantity: Quantity, near: Sequence[Quantity]) -> Quantity:
    """Returns the quantity with the tolerances that its differences in perturbed references give."""
    if quantity.name in _FIXED or not near:
        return quantity
    steps = zip(*(one.points for one in near), strict=False)
    rounding = Rounding([{quantity.name: max(one.difference for one in points)} for points in steps])
    # A metric counts samples: by chance, no perturbed run has another prediction.
    least = TOLERANCES["fp32"].metrics if _is_metric(quantity.name) else 0.0
    points = [
        replace(point, allowed=min(quantity.tolerance, max(least, rounding.allowed(number, quantity.name))))
        for number, point in enumerate(quantity.points, start=1)
    ]
    return replace(quantity, tolerance=max(one.allowed or 0.0 for one in points), points=tuple(points))


def _is_metric(name: str) -> bool:
    return name.startswith("eval/") and not name.endswith("/loss")


def _tensors(run: Record, reference: Record, perturbed: Sequence[Record]) -> list[Quantity]:
    """Compares each gradient of the first step, and the norm of the change of each weight in training."""
    found = []
    if run.gradients and reference.gradients and run.averages == reference.averages == "gradients":
        gradients = Rounding.measured([reference.gradients], *([one.gradients] for one in perturbed))
        found.append(_each("gradients", 1, run.gradients, reference.gradients, gradients))
    if run.steps == reference.steps and run.steps and (moved := _moved(reference, reference)):
        least = [resolution_of(reference.initial, moved)]
        norms = [[_moved(one, reference)] for one in perturbed]
        rounding = Rounding.measured([moved], *norms, factor=UPDATES, resolution=least)
        found.append(_each("updates", run.steps, _moved(run, reference), moved, rounding))
    return found


def _moved(run: Record, reference: Record) -> dict[str, float]:
    """Returns the norm of the change of each weight: single elements of it may differ by anything, see Tolerances."""
    changes = difference_norms(run.final, reference.initial)
    return {name: changes[name] for name in reference.initial if math.isfinite(changes[name])}


def _each(name: str, step: int, mine: Values, theirs: Values, rounding: Rounding) -> Quantity:
    """Returns the quantity with the tensor that differs most in proportion to its own tolerance."""
    differences = apart(mine, theirs)
    allowed = {one: rounding.allowed(1, one) for one in differences}
    where = max(differences, key=lambda one: ratio(differences[one], allowed[one]))
    point = Point(step, differences[where], allowed=allowed[where])
    worst = tuple(excesses(mine, theirs, allowed.__getitem__))
    return Quantity(name, allowed[where], (point,), where if differences[where] else None, worst)


def first_drift(quantities: Iterable[Quantity]) -> tuple[Quantity, Point] | None:
    """Returns the quantity that is first above its tolerance, and the point; None if all are within."""
    drifts = [(quantity, quantity.drift) for quantity in quantities]
    return min(((quantity, point) for quantity, point in drifts if point), key=lambda each: each[1].step, default=None)


def drift_text(quantity: Quantity, point: Point) -> str:
    """Describes a difference: the quantity, the step, and the size."""
    text = f"{quantity.name} differs at step {point.step} by {point.difference:.1e}"
    if point.value is not None and point.reference is not None:
        text += f" ({point.value:.6g} instead of {point.reference:.6g})"
    return text + (f", most of it in `{quantity.where}`" if quantity.where else "")


# ---------------------------------------------------------------------------------------------- numbers
def _curve(key: str, run: Record, reference: Record, steps: int, tolerance: float, floor: float = _FLOOR) -> Quantity:
    """Compares a column of both runs' rows; returns no points if neither run has it."""
    pairs = [(mine.get(key), theirs.get(key)) for mine, theirs in zip(run.rows[:steps], reference.rows, strict=False)]
    if all(pair == (None, None) for pair in pairs):
        return Quantity(key, tolerance, ())
    known = [abs(theirs) for _, theirs in pairs if theirs is not None and math.isfinite(theirs)]
    least = floor * max(known, default=0.0)
    points = [Point(step, relative(*pair, least), *pair) for step, pair in enumerate(pairs, start=1)]
    return Quantity(key, tolerance, tuple(points))


def _evaluation(run: Record, reference: Record, tolerances: Tolerances) -> list[Quantity]:
    """Compares the metrics of the last evaluation of both runs."""
    last = {**reference.rows[-1], **run.rows[-1]}
    found = []
    for key in (key for key in last if key.startswith("eval/")):
        tolerance = tolerances.metrics if _is_metric(key) else tolerances.loss
        value, other = run.rows[-1].get(key), reference.rows[-1].get(key)
        found.append(Quantity(key, tolerance, (Point(run.steps, relative(value, other, 0.0), value, other),)))
    return found


# ---------------------------------------------------------------------------------------------- tensors
def _initial(run: Record, reference: Record) -> Quantity:
    """Compares the initial weights of both strategies, before one run loaded those of the other."""
    apart = difference_norms(run.initial, reference.initial)
    difference = ratio(math.hypot(*apart.values()), norm_of(reference.initial.values()))
    return Quantity("initial weights", _INITIAL, (Point(0, difference),), worst(apart))


def _weights(run: Record, reference: Record, tolerance: float) -> Quantity:
    """Compares all trained weights as one vector, relative to the distance that the reference moved it."""
    trained = reference.initial
    mine, theirs = ({name: each.final.get(name) for name in trained} for each in (run, reference))
    moved = math.hypot(*filter(math.isfinite, difference_norms(theirs, trained).values()))
    apart = difference_norms(mine, theirs)
    difference = ratio(math.hypot(*apart.values()), max(moved, _FLOOR * norm_of(theirs.values())))
    return Quantity("weights", tolerance, (Point(run.steps, difference),), worst(apart))


def _buffers(run: Record, reference: Record, tolerance: float) -> Quantity:
    """Compares the model's buffers in the last checkpoints; the largest difference counts, relative to its buffer."""
    trained = reference.initial
    mine, theirs = ({name: x for name, x in each.final.items() if name not in trained} for each in (run, reference))
    apart = {name: ratio(x, norm_of([theirs.get(name)])) for name, x in difference_norms(mine, theirs).items()}
    points = (Point(run.steps, max(apart.values())),) if apart else ()
    return Quantity("buffers", tolerance, points, worst(apart))
