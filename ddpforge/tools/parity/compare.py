"""Finds where two runs come apart: which quantity, at which step, and by how much. Plain data in, plain data out."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["TOLERANCES", "Point", "Quantity", "Record", "Tolerances", "compare", "first_drift"]

_EXACT = 1e-12  # for learning rates, which are functions of the step
_INITIAL = 1e-6  # for initial weights, which the same seed draws
_FLOOR = 1e-3  # what is smaller than this share of the largest is compared with that share


@dataclass(frozen=True)
class Tolerances:
    """The largest relative differences that rounding explains, over tens of steps.

    Differences of weights are relative to how far training moved them. One number covers the whole model, because
    Adam makes steps as large as the learning rate out of rounding noise where a gradient is zero in theory, as that
    of an attention's key bias is: single parameters may differ by anything.
    """

    loss: float
    grad_norm: float
    weights: float
    metrics: float  # of an evaluation's metrics beside its loss

    def scaled(self, loss: float) -> Tolerances:
        """The same with another tolerance for the loss, and the others in proportion."""
        return Tolerances(**{name: value * loss / self.loss for name, value in asdict(self).items()})


_HALF = Tolerances(loss=2e-2, grad_norm=2e-1, weights=1e-1, metrics=1e-1)
TOLERANCES: Mapping[str, Tolerances] = {
    "fp32": Tolerances(loss=1e-5, grad_norm=1e-4, weights=1e-3, metrics=1e-3),
    "bf16": _HALF,
    "fp16": _HALF,
}
"""By `train.precision`. In fp32 at least ten times what one and two ranks were seen to differ by in 20 steps; in bf16
five times for the norm and twice for weights, more being too wide to find anything."""


@dataclass(frozen=True)
class Record:
    """The record of a run: a row of metrics per step, the weights it would have begun with, and its last ones.

    `averages` is that of the strategy's contract.
    """

    rows: Sequence[Mapping[str, Any]]
    initial: Mapping[str, Tensor]
    final: Mapping[str, Tensor]
    averages: str = "gradients"

    @property
    def steps(self) -> int:
        """The number of steps trained."""
        return len(self.rows)


@dataclass(frozen=True)
class Point:
    """A quantity at one step; `difference` is relative, and infinite where numbers cannot say it."""

    step: int
    difference: float
    value: float | None = None
    reference: float | None = None


@dataclass(frozen=True)
class Quantity:
    """One quantity of a run beside that of the reference; `where` is the tensor with most of the difference."""

    name: str
    tolerance: float
    points: tuple[Point, ...]
    where: str | None = None

    @property
    def largest(self) -> Point:
        """The point with the largest difference."""
        return max(self.points, key=lambda point: point.difference)

    @property
    def drift(self) -> Point | None:
        """The first point with a difference beyond the tolerance."""
        return next((point for point in self.points if point.difference > self.tolerance), None)


def compare(run: Record, reference: Record, tolerances: Tolerances) -> list[Quantity]:
    """Every quantity that the two runs have in common, in the order of cause and effect within a step."""
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
    """The first step at which one of them is beyond its tolerance, and which it is."""
    drifts = [(quantity, quantity.drift) for quantity in quantities]
    return min(((quantity, point) for quantity, point in drifts if point), key=lambda each: each[1].step, default=None)


# ---------------------------------------------------------------------------------------------- numbers
def _curve(key: str, run: Record, reference: Record, steps: int, tolerance: float, floor: float = _FLOOR) -> Quantity:
    """A column of both runs' rows; empty where neither has it."""
    pairs = [(mine.get(key), theirs.get(key)) for mine, theirs in zip(run.rows[:steps], reference.rows, strict=False)]
    if all(pair == (None, None) for pair in pairs):
        return Quantity(key, tolerance, ())
    known = [abs(theirs) for _, theirs in pairs if theirs is not None and math.isfinite(theirs)]
    least = floor * max(known, default=0.0)
    points = [Point(step, _relative(*pair, least), *pair) for step, pair in enumerate(pairs, start=1)]
    return Quantity(key, tolerance, tuple(points))


def _relative(value: float | None, reference: float | None, floor: float) -> float:
    if value == reference:
        return 0.0
    if value is None or reference is None:
        return math.inf
    if math.isnan(value) and math.isnan(reference):
        return 0.0
    return _ratio(abs(value - reference), max(abs(reference), floor)) if math.isfinite(value - reference) else math.inf


def _ratio(difference: float, scale: float) -> float:
    if not difference:
        return 0.0
    return difference / scale if scale and math.isfinite(difference) else math.inf


def _evaluation(run: Record, reference: Record, tolerances: Tolerances) -> list[Quantity]:
    """The metrics of the evaluation with which both runs ended."""
    last = {**reference.rows[-1], **run.rows[-1]}
    found = []
    for key in (key for key in last if key.startswith("eval/")):
        tolerance = tolerances.loss if key.endswith("/loss") else tolerances.metrics
        value, other = run.rows[-1].get(key), reference.rows[-1].get(key)
        found.append(Quantity(key, tolerance, (Point(run.steps, _relative(value, other, 0.0), value, other),)))
    return found


# ---------------------------------------------------------------------------------------------- tensors
def _initial(run: Record, reference: Record) -> Quantity:
    """Compares the weights that both strategies would have begun with, before the one took over the other's."""
    apart = _apart(run.initial, reference.initial)
    difference = _ratio(math.hypot(*apart.values()), _norm(reference.initial.values()))
    return Quantity("initial weights", _INITIAL, (Point(0, difference),), _most(apart))


def _weights(run: Record, reference: Record, tolerance: float) -> Quantity:
    """All trained weights as one vector, relative to how far the reference has moved it."""
    trained = reference.initial
    mine, theirs = ({name: each.final.get(name) for name in trained} for each in (run, reference))
    moved = math.hypot(*filter(math.isfinite, _apart(theirs, trained).values()))
    apart = _apart(mine, theirs)
    difference = _ratio(math.hypot(*apart.values()), max(moved, _FLOOR * _norm(theirs.values())))
    return Quantity("weights", tolerance, (Point(run.steps, difference),), _most(apart))


def _buffers(run: Record, reference: Record, tolerance: float) -> Quantity:
    """Compares the model's buffers in the last checkpoints; the worst tensor counts, relative to itself."""
    trained = reference.initial
    mine, theirs = ({name: x for name, x in each.final.items() if name not in trained} for each in (run, reference))
    apart = {name: _ratio(x, _norm([theirs.get(name)])) for name, x in _apart(mine, theirs).items()}
    points = (Point(run.steps, max(apart.values())),) if apart else ()
    return Quantity("buffers", tolerance, points, _most(apart))


def _apart(mine: Mapping[str, Tensor | None], theirs: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The distance between each two tensors of one name; infinite where one is missing or of another shape."""
    found = {}
    for name in {**theirs, **mine}:
        a, b = mine.get(name), theirs.get(name)
        found[name] = math.inf if a is None or b is None or a.shape != b.shape else _norm([_difference(a, b)])
    return found


def _difference(a: Tensor, b: Tensor) -> Tensor:
    a, b = a.double(), b.double()
    return (a - b).masked_fill((a == b) | (a.isnan() & b.isnan()), 0.0)  # inf - inf is nan


def _norm(tensors: Iterable[Tensor | None]) -> float:
    """Of all elements together; what is not a number counts as infinite."""
    norm = math.hypot(*(float(tensor.double().norm()) for tensor in tensors if tensor is not None))
    return math.inf if math.isnan(norm) else norm


def _most(apart: Mapping[str, float]) -> str | None:
    """The tensor with most of the difference, where there is any."""
    worst = max(apart, key=lambda name: apart[name], default=None)
    return worst if worst is not None and apart[worst] else None
