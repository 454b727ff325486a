"""Rounding of a computation, measured; relative differences of numbers and of tensors by name.

`perturb` changes weights by one unit in the last place, `Rounding` is the difference that this makes, and `excesses`
are the differences that are larger than it explains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any
from zlib import crc32

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = [
    "PERTURBED",
    "UPDATES",
    "Excess",
    "Rounding",
    "Values",
    "apart",
    "difference_norms",
    "excesses",
    "multiple_of",
    "norm_of",
    "perturb",
    "ratio",
    "relative",
    "resolution_of",
    "worst",
]

PERTURBED = 2
"""Number of perturbed computations that measure rounding: by chance, one may change a number by almost nothing."""
UPDATES = 10.0
"""Factor for updates: Adam enlarges the rounding of gradients that are nearly zero to steps of any sign."""
_FACTOR = 4.0
_LEAST = 1e-5
_LEAST_OF_TENSORS = 1e-4  # the sum of a gradient over many tokens may cancel: 1.5e-5 between two orders, in fp32
_EARLY = 3  # steps that are taken together: the difference of one number is small by chance at one step, not at three
_SHARE = 1e-6  # tensors smaller than this share of the largest are compared relative to that share
_PARALLEL = 1e-2  # part of a multiple that is not one
_WORST = 5  # names that a report has

Values = Mapping[str, "Tensor | float | None"]
"""Numbers or tensors of one step, by name, of one kind: gradients, updates, outputs of modules, or a loss."""


def perturb(tensors: Mapping[str, Tensor], dtype: torch.dtype | None = None, *, seed: int = 0) -> None:
    """Changes each element by one unit in the last place, up or down by chance.

    Args:
        tensors: are changed in place; those without floating-point numbers stay.
        dtype: dtype in which the computation uses them, e.g. of autocast; without it their own.
        seed: equal seeds and names give equal changes, whatever the other tensors are.
    """
    import torch

    with torch.no_grad():
        for name, one in tensors.items():
            if one.is_floating_point():
                generator = torch.Generator().manual_seed(crc32(f"{seed} {name}".encode()))
                signs = torch.randint(0, 2, one.shape, generator=generator).mul_(2).sub_(1).to(one)
                one.add_(one * signs * torch.finfo(dtype or one.dtype).eps)


@dataclass(frozen=True)
class Rounding:
    """Differences that one unit in the last place of the weights makes in a computation, at each step, by name.

    A difference is rounding up to `factor` times the measured one, the larger of its own and of the median over all
    names, and up to `least` in any case: 1e-5 for numbers, 1e-4 for tensors.

    The factors come from 216 computations and four others of each that are equal but for the order of their sums
    (samples reversed or given twice, two and four micro-batches; MLP, convolutions, GPT; fp32, bf16 and fp16; SGD and
    AdamW; 5 steps). With two perturbed computations as the measure, no gradient differed by more than 1.9 times it, no
    loss and no norm of all gradients by more than 1.7 times: the factor is 4. Norms of updates differed by up to 4.9
    times: the factor is 10. With one perturbed computation, gradients reached 46 times, next to a unit of ReLU that it
    did not switch. In fp32, such gradients differ by up to 1.5e-5, below 1e-4. In bf16, half a gradient differs by
    0.5, and the allowed difference at the first step was 0.07 in the GPT, 0.16 in the convolutions, 0.3 in the MLP.

    Attributes:
        together: Steps from the first one that have the largest difference of all of them.
    """

    spread: Sequence[Mapping[str, float]]
    factor: float = _FACTOR
    together: int = _EARLY
    least: float = _LEAST

    @classmethod
    def measured(
        cls,
        reference: Sequence[Values],
        *perturbed: Sequence[Values],
        factor: float = _FACTOR,
        resolution: Sequence[Mapping[str, float]] = (),
    ) -> Rounding:
        """Returns the largest differences of the perturbed computations, each with values for every step.

        `resolution` has relative differences that are rounding by themselves. An update is the difference of two
        weights: it is as precise as their dtype, see `resolution_of`.
        """
        found = [dict(one) for one in resolution] or [{} for _ in reference]
        for each in perturbed:
            for row, values, theirs in zip(found, each, reference, strict=False):
                for name, difference in apart(values, theirs).items():
                    row[name] = max(row.get(name, 0.0), difference)
        numbers = not any(_is_tensor(one) for values in reference[:1] for one in values.values())
        return cls(found, factor, _EARLY) if numbers else cls(found, factor, 1, _LEAST_OF_TENSORS)

    def allowed(self, step: int, name: str = "") -> float:
        """Returns the largest relative difference at `step`, from 1, that rounding explains; infinite if all are."""
        until = [row for row in self.spread[: max(step, self.together)] if row]
        own = max((row.get(name, 0.0) for row in until), default=0.0)
        return max(self.least, self.factor * max(own, max((median(row.values()) for row in until), default=0.0)))


def resolution_of(weights: Mapping[str, Tensor], norms: Mapping[str, float]) -> dict[str, float]:
    """Returns one unit in the last place of each weight, relative to the norm of its update."""
    import torch

    return {
        name: ratio(torch.finfo(weights[name].dtype).eps * norm_of([weights[name]]), norm)
        for name, norm in norms.items()
        if weights[name].is_floating_point()
    }


@dataclass(frozen=True)
class Excess:
    """Difference that rounding does not explain; `multiple` is the factor from the reference, None if there is none."""

    name: str
    difference: float
    allowed: float
    multiple: float | None


def excesses(values: Values, reference: Values, allowed: Callable[[str], float]) -> list[Excess]:
    """Returns the five largest differences that are above those `allowed` for their names, in proportion to these."""
    beyond = {name: one for name, one in apart(values, reference).items() if not one <= allowed(name)}
    order = sorted(beyond, key=lambda name: (-ratio(beyond[name], allowed(name)), -beyond[name]))
    return [
        Excess(name, beyond[name], allowed(name), multiple_of(values.get(name), reference.get(name)))
        for name in order[:_WORST]
    ]


def apart(values: Values, reference: Values) -> dict[str, float]:
    """Returns the difference of each name, relative to the norm of its reference; infinite if only one has it."""
    sizes = {name: _size(one) for name, one in reference.items()}
    least = _SHARE * max(filter(math.isfinite, sizes.values()), default=0.0)
    found = {}
    for name in {**reference, **values}:
        mine: Any = values.get(name)
        theirs: Any = reference.get(name)
        if _is_tensor(mine) or _is_tensor(theirs):
            distance = difference_norms({name: mine}, {name: theirs})[name]
            found[name] = ratio(distance, max(sizes.get(name, 0.0), least))
        else:
            found[name] = relative(mine, theirs, least)
    return found


def multiple_of(value: Any, reference: Any) -> float | None:
    """Returns the factor from `reference` to `value`, numbers or tensors; None if the two are not parallel."""
    if value is None or reference is None:
        return None
    if not (_is_tensor(value) and _is_tensor(reference)):
        return None if not reference else float(value / reference)
    a, b = reference.double().flatten(), value.double().flatten()
    square = float(a @ a) if a.shape == b.shape else 0.0
    if not square:
        return None
    factor = float(a @ b) / square
    return factor if float((b - factor * a).norm()) <= _PARALLEL * max(float(b.norm()), 1e-30) else None


def _is_tensor(value: object) -> bool:
    return hasattr(value, "shape")


def _size(value: Any) -> float:
    return norm_of([value]) if _is_tensor(value) else abs(value or 0.0)


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


# ---------------------------------------------------------------------------------------------- tensors
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
