"""Several optimizers, each of its own parameters, which appear as one."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

__all__ = ["InTurns", "Several", "members"]


class Several(Optimizer):
    """The optimizers in `parts`, by name: their groups one after the other, the state of each parameter, one step.

    It has no `state_dict` of its own: whoever saves and restores does so for each of its `members`.
    """

    def __init__(self, parts: Mapping[str, Optimizer]) -> None:
        self.parts = dict(parts)
        self.defaults: dict[str, Any] = {}

    # Looked up each time: torch replaces the groups and the state of an optimizer when it loads one.
    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all parts."""
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> Mapping[Tensor, Any]:  # type: ignore[override]
        """The state of all parts, by parameter."""
        return {owner: entry for part in self.parts.values() for owner, entry in part.state.items()}

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Steps every part."""
        for part in self.parts.values():
            part.step()


class InTurns(Several):
    """Optimizers that take turns: in each step the parts are stepped one after the other, each by itself.

    `clip_norms` are the largest norms of each part's gradient; None stands for that of the recipe's [train].
    """

    def __init__(self, parts: Mapping[str, Optimizer], clip_norms: Mapping[str, float | None]) -> None:
        super().__init__(parts)
        self.clip_norms = clip_norms


def members(optimizer: Optimizer) -> Iterator[tuple[str, Optimizer]]:
    """The optimizers that `optimizer` is made of, each with its name, as "generator"; itself, as "", if it is one."""
    if not isinstance(optimizer, Several):
        yield "", optimizer
        return
    for name, part in optimizer.parts.items():
        for inner, member in members(part):
            yield "/".join(filter(None, (name, inner))), member
