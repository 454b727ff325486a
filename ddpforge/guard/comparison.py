"""Compares two computations that must agree: numbers, tensors by name, and the curves and weights of two runs.

Plain data in, plain data out. The first difference is named by its quantity, its step and the tensor with most of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "TOLERANCES",
    "Point",
    "Quantity",
    "Record",
    "Tolerances",
    "compare",
    "difference_norms",
    "drift_text",
    "first_drift",
    "norm_of",
    "ratio",
    "relative",
    "worst",
]

_EXACT = 1e-12  # for learning rates, which are functions of the step
_INITIAL = 1e-6  # for initial weights, which the same seed draws
_FLOOR = 1e-3  # values smaller than this share of the largest are compared relative to that share


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
"""By `train.precision`. In fp32 at least ten times the measured difference between one and two ranks after 20 steps. In
bf16 five times for the norm and twice for weights: wider tolerances would detect nothing."""


@dataclass(frozen=True)
class Record:
    """Record of a run: a row of metrics per step, the strategy's own initial weights, and the final weights.

    `averages` is the value in the strategy's contract.
    """

    rows: Sequence[Mapping[str, Any]]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    averages: str = "gradients"

    @property
    def steps(self) -> int:
        """Returns the number of steps trained."""
        return len(self.rows)


@dataclass(frozen=True)
class Point:
    """Quantity at one step; `difference` is relative, and infinite if it has no finite value."""

    step: int
    difference: float
    value: float | None = None
    reference: float | None = None


@dataclass(frozen=True)
class Quantity:
    """One quantity of a run, compared with the reference; `where` is the tensor with the largest difference."""

    name: str
    tolerance: float
    points: tuple[Point, ...]
    where: str | None = None

    @property
    def largest(self) -> Point:
        """Returns the point with the largest difference."""
        return max(self.points, key=lambda point: point.difference)

    @property
    def drift(self) -> Point | None:
        """Returns the first point with a difference above the tolerance, if any."""
        return next((point for point in self.points if point.difference > self.tolerance), None)


def compare(run: Record, reference: Record, tolerances: Tolerances) -> list[Quantity]:
    """Compares every quantity that both runs have, in the order of cause and effect within a step."""
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
def relative(value: float | None, reference: float | None, floor: float = 0.0) -> float:
    """Returns the difference of two numbers, relative to the reference, or to `floor` if that is larger.

    It is infinite if one number is absent or not finite and the other differs. Two NaNs are equal.
    """
    if value == reference:
        return 0.0
    if value is None or reference is None:
        return math.inf
    if math.isnan(value) and math.isnan(reference):
        return 0.0
    return ratio(abs(value - reference), max(abs(reference), floor)) if math.isfinite(value - reference) else math.inf


def ratio(difference: float, scale: float) -> float:
    """Returns `difference / scale`; 0 without a difference, infinite for a scale of 0 or an infinite difference."""
    if not difference:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf


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
        tolerance = tolerances.loss if key.endswith("/loss") else tolerances.metrics
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


def difference_norms(mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Returns the distance between the two tensors of each name; infinite if one is missing or the shapes differ."""
    found = {}
    for name in {**theirs, **mine}:
        a, b = mine.get(name), theirs.get(name)
        found[name] = math.inf if a is None or b is None or a.shape != b.shape else norm_of([_difference(a, b)])
    return found


def _difference(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)  # inf - inf is nan


def norm_of(tensors: Iterable[Tensor | None]) -> float:
    """Returns the norm of all elements together; infinite if one is NaN."""
    norm = math.hypot(*(float(tensor.double().norm()) for tensor in tensors if tensor is not None))
    return math.inf if math.isnan(norm) else norm


def worst(differences: Mapping[str, float]) -> str | None:
    """Returns the name with the largest difference; None if there is no difference."""
    name = max(differences, key=lambda one: differences[one], default=None)
    return name if name is not None and differences[name] else None
