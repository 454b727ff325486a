"""A case of the museum: what goes wrong in the field, how it is tried, and what is right."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from pkgutil import iter_modules
from typing import Any

from museum.training import Result, Training

__all__ = ["Case", "all_cases"]

Trial = Callable[[Path], Any]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A silent error of the field as an experiment with a known result.

    A case has either a `training`, which each trainer runs by its adapter, or `trials`, a function for each trainer.

    Attributes:
        name: in small words with hyphens.
        theme: title of its file; set when it is collected.
        wrong: what goes wrong, in one sentence.
        references: public reports, "project#number", or a page of a documentation.
        training: what is trained.
        checks: results that are compared: "weights", "losses", "rates", "norms", "evals"; "ranks" compares the weights
            of each rank with those of rank 0.
        same_as: a second training, whose result by the same trainer is right; absent: the oracle's is.
        measure: a number of the results of all ranks, which must be `expected`.
        oracle: computes the right result of `training`, if it is not `museum.oracle.train`.
        trainers: the trainers that are tried; absent: all but TRL.
        trials: functions of a folder by trainer, each in `ranks` processes; rank 0's answer counts.
        right: computes the right answer of the trials.
        tolerance: allowed difference, relative to values above 1 and absolute below.
        notes: what a reader must know about the verdict of a trainer, with a link to its documentation.
    """

    name: str
    wrong: str
    references: Sequence[str]
    theme: str = ""
    training: Training | None = None
    checks: Sequence[str] = ("weights",)
    same_as: Training | None = None
    oracle: Callable[[Training], Result] | None = None
    measure: Callable[[list[Any]], Any] | None = None
    expected: Any = None
    trainers: Sequence[str] | None = None
    trials: Mapping[str, Trial] = field(default_factory=dict)
    right: Callable[[], Any] | None = None
    ranks: int = 1
    tolerance: float = 1e-5
    seconds: float = 90.0
    notes: Mapping[str, str] = field(default_factory=dict)

    def tried_by(self) -> list[str]:
        """Returns the trainers for which the case makes sense."""
        if self.trials:
            return list(self.trials)
        return list(self.trainers or ("forge", "loop", "accelerated", "hf", "pl", "zero"))


@cache
def all_cases() -> dict[str, Case]:
    """Returns the cases of all files in their order, by name."""
    from dataclasses import replace

    import museum.cases

    found: dict[str, Case] = {}
    for module in sorted(iter_modules(museum.cases.__path__), key=lambda one: one.name):
        part = import_module(f"museum.cases.{module.name}")
        for case in part.CASES:
            if case.name in found:
                raise ValueError(f"two cases are named {case.name}")
            found[case.name] = replace(case, theme=part.THEME)
    return found
