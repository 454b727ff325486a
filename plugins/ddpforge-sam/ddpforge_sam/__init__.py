"""Sharpness-aware minimisation: any optimizer, with the gradient at the worst point nearby.

Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR
2021), https://arxiv.org/abs/2010.01412. Each step first moves the weights w by e = rho * g / |g|, where g is the
gradient of the step's batch at w and |g| the norm of all of it; then the optimizer updates w with the gradient at
w + e.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import entry_points
from inspect import signature
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import Field
from torch import Tensor
from torch.optim import Optimizer

__all__ = ["SharpnessAware", "sam"]

ddpforge_plugin_api = 3

_TINY = 1e-12  # a gradient of zeros has no direction


if TYPE_CHECKING:
    _Base = Optimizer
else:
    _Base = object


class SharpnessAware(_Base):
    """What `sam` adds to an optimizer: the protocol `ddpforge.interfaces.MultiPassOptimizer`."""

    passes = 2
    rho: float
    _before: dict[Tensor, Tensor]

    @torch.no_grad()
    def perturb(self, norm: float) -> None:
        """Moves the weights by `rho` in the direction of their gradient; whole or in shards."""
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not weights:  # a rank may hold none of them
            return
        # Subtracting later what is added here would not give the same weights back, so they are kept.
        self._before.update((weight, weight.clone()) for weight in weights if weight not in self._before)
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=self.rho / (norm + _TINY))

    @torch.no_grad()
    def restore(self) -> None:
        """The weights as they were."""
        for weight, value in self._before.items():
            weight.copy_(value)
        self._before.clear()


def sam(
    params: list[dict[str, Any]],
    *,
    rho: Annotated[float, Field(gt=0, le=10, description="How far away the worst point nearby is looked for.")] = 0.05,
    base: Annotated[
        str, Field(description='The optimizer that updates: a name as in a recipe, or its class: "torch.optim:NAdam".')
    ] = "sgd",
    **options: Any,
) -> Optimizer:
    """Sharpness-aware minimisation around the optimizer `base`, to which all other options go.

    Raises ValueError for a `base` that there is not, that needs a closure, or that explores by itself.
    """
    make = _named(base)
    try:
        signature(make).bind(params=params, **options)
    except TypeError as error:
        raise ValueError(
            f"sam hands its other options to the base `{base}`, which does not take them: {error}"
        ) from None
    optimizer = make(params=params, **options)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"base: `{base}` makes a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if getattr(optimizer, "passes", 1) != 1:
        raise ValueError(f"base: `{base}` makes several passes itself")
    # A subclass of the optimizer's class rather than a wrapper around it: groups, state and hooks stay what they are.
    kind = type(optimizer)
    optimizer.__class__ = type(f"SAM{kind.__name__}", (SharpnessAware, kind), {"__doc__": kind.__doc__})
    vars(optimizer).update(rho=rho, _before={})
    return optimizer


def _named(base: str) -> Callable[..., Any]:
    """The optimizer that a recipe would mean by this name, if it is installed."""
    module, colon, name = base.partition(":")
    if not colon:
        known = {point.name: point for point in entry_points(group="ddpforge.optimizer") if point.name != "sam"}
        if base not in known:
            raise ValueError(f"base: there is no optimizer `{base}`; known are {', '.join(sorted(known))}")
        found: Any = known[base].load()
        return found  # type: ignore[no-any-return]
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"base: `{base}` cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"base: `{base}` is not an optimizer")
    return found  # type: ignore[no-any-return]
