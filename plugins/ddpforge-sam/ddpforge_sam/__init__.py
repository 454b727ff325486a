"""Sharpness-aware minimisation (SAM): any optimizer, with the gradient at the nearby point of highest loss.

Foret, Kleiner, Mobahi and Neyshabur, "Sharpness-Aware Minimization for Efficiently Improving Generalization" (ICLR
2021), https://arxiv.org/abs/2010.01412. Each step first moves the weights w by e = rho * g / |g|; g is the gradient of
the global batch at w, and |g| its norm over all parameters. Then the optimizer updates w with the gradient at w + e.
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
    """Methods that `sam` adds to an optimizer (protocol `ddpforge.interfaces.MultiPassOptimizer`)."""

    passes = 2
    rho: float
    _before: dict[Tensor, Tensor]

    @torch.no_grad()
    def perturb(self, norm: float) -> None:
        """Moves the weights, whole or sharded, by `rho * gradient / norm`; `norm` is that of all gradients."""
        weights = [weight for group in self.param_groups for weight in group["params"] if weight.grad is not None]
        if not weights:  # a rank may hold no shard of them
            return
        # Subtracting the step later would not restore the same bits, so the weights are copied.
        self._before.update((weight, weight.clone()) for weight in weights if weight not in self._before)
        torch._foreach_add_(weights, [weight.grad for weight in weights], alpha=self.rho / (norm + _TINY))

    @torch.no_grad()
    def restore(self) -> None:
        """Restores the weights to their values before `perturb`."""
        for weight, value in self._before.items():
            weight.copy_(value)
        self._before.clear()


def sam(
    params: list[dict[str, Any]],
    *,
    rho: Annotated[float, Field(gt=0, le=10, description="Distance of the perturbed weights (L2 norm).")] = 0.05,
    base: Annotated[
        str, Field(description='The optimizer that updates: a name as in a recipe, or its class: "torch.optim:NAdam".')
    ] = "sgd",
    **options: Any,
) -> Optimizer:
    """Builds sharpness-aware minimisation around the optimizer `base`, which receives all other options.

    Raises ValueError if `base` does not exist, does not accept the options, or is itself a multi-pass optimizer.
    """
    make = _named(base)
    try:
        signature(make).bind(params=params, **options)
    except TypeError as error:
        raise ValueError(
            f"sam passes its other options to the base `{base}`, which does not accept them: {error}"
        ) from None
    optimizer = make(params=params, **options)
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"base: `{base}` returns a {type(optimizer).__name__}, not a torch.optim.Optimizer")
    if getattr(optimizer, "passes", 1) != 1:
        raise ValueError(f"base: `{base}` is itself a multi-pass optimizer")
    # A subclass of the optimizer's class, not a wrapper: so groups, state and hooks stay the same.
    kind = type(optimizer)
    optimizer.__class__ = type(f"SAM{kind.__name__}", (SharpnessAware, kind), {"__doc__": kind.__doc__})
    vars(optimizer).update(rho=rho, _before={})
    return optimizer


def _named(base: str) -> Callable[..., Any]:
    """Returns the optimizer of this name, as in a recipe, or 'module:Name'; raises ValueError if there is none."""
    module, colon, name = base.partition(":")
    if not colon:
        known = {point.name: point for point in entry_points(group="ddpforge.optimizer") if point.name != "sam"}
        if base not in known:
            raise ValueError(f"base: there is no optimizer `{base}`; known: {', '.join(sorted(known))}")
        found: Any = known[base].load()
        return found  # type: ignore[no-any-return]
    try:
        found = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"base: `{base}` cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"base: `{base}` is not an optimizer")
    return found  # type: ignore[no-any-return]
