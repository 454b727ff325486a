"""Several optimizers, each for its own parameters, with the interface of one optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["AlternatingOptimizer", "CompositeOptimizer", "constructor_of", "member_optimizers", "remember_constructor"]

_Groups = list[dict[str, Any]]
_makers: WeakKeyDictionary[Optimizer, Callable[[_Groups], Optimizer]] = WeakKeyDictionary()


class CompositeOptimizer(Optimizer):
    """Optimizers in `parts`, by name, as one: all groups in order, the state of each parameter, and one `step`.

    It has no `state_dict` of its own: save and restore each of its `members`.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        self.defaults: dict[str, Any] = {}

    # Collected at each access: torch replaces the groups and the state of an optimizer when it loads a state dict.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Returns the groups of all parts."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """Returns the state of all parts, by parameter."""
        return {owner: entry for part in self.parts.values() for owner, entry in part.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps every part."""
        for part in self.parts.values():
            part.step()


class AlternatingOptimizer(CompositeOptimizer):
    """Optimizers for alternating updates: each step of a run updates the parts in order, each with its own backward.

    `clip_norms`: the largest gradient norm of each part; None for the recipe's `train.clip_norm`.
    """

    def __init__(self, parts: Mapping[str, Optimizer], clip_norms: Mapping[str, float | None]) -> None:
        super().__init__(parts)
        self.clip_norms = clip_norms


def member_optimizers(optimizer: Optimizer) -> Sequence[tuple[str, Optimizer]]:
    """Returns the name and the optimizer of each part, e.g. "generator"; for a single optimizer, "" and itself."""
    if not isinstance(optimizer, CompositeOptimizer):
        return [("", optimizer)]
    return [
        ("/".join(filter(None, (name, inner))), member)
        for name, part in optimizer.parts.items()
        for inner, member in member_optimizers(part)
    ]


def remember_constructor(optimizer: Optimizer, make: Callable[[_Groups], Optimizer]) -> None:
    """Records `make`, which builds another optimizer like `optimizer` from parameter groups."""
    _makers[optimizer] = make


def constructor_of(optimizer: Optimizer) -> Callable[[_Groups], Optimizer] | None:
    """Returns the function that `remember_constructor` has recorded; None for an optimizer that no recipe builds."""
    return _makers.get(optimizer)
