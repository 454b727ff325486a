"""Searches for what fits into memory and is fastest by the estimate."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from ddpforge.components.building import build
from ddpforge.components.registry import Registry
from ddpforge.errors import ForgeError
from ddpforge.parity.specs import Spec
from ddpforge.recipe import load_recipe
from ddpforge.simulation.devices import Device
from ddpforge.simulation.forecast import Forecast, forecast
from ddpforge.trials.batch_size import fitting, sizes

__all__ = ["Choice", "best", "choices"]


@dataclass(frozen=True)
class Choice:
    """The largest micro-batch that fits under a strategy, with or without activation checkpointing; None: none does."""

    spec: Spec
    checkpointing: bool
    micro_batch: int | None
    forecast: Forecast  # with that micro-batch, or the smallest

    @property
    def sets(self) -> dict[str, str]:
        """The recipe's keys that make it so."""
        return {
            **{key: value for key, _, value in (one.partition("=") for one in self.spec.sets)},
            "train.micro_batch": str(self.micro_batch),
            "train.activation_checkpointing": str(self.checkpointing).lower(),
        }


def choices(
    recipe: str,
    specs: Sequence[Spec],
    *,
    registry: Registry,
    budget: int,
    sets: Sequence[str] = (),
    device: Device | None = None,
    told: Callable[[Forecast], None] = lambda one: None,
) -> list[Choice]:
    """One for each strategy, without and (where the model has blocks) with activation checkpointing.

    All are within `budget` bytes a rank. `told` hears of every forecast. Raises RecipeError for a recipe that cannot
    train.
    """
    found = []
    for spec in specs:
        asked = (registry, budget, sets, device, told)
        found.append(_largest(recipe, spec, False, *asked))
        with suppress(ForgeError):  # of a model without blocks
            found.append(_largest(recipe, spec, True, *asked))
    return found


def _largest(
    recipe: str,
    spec: Spec,
    checkpointing: bool,
    registry: Registry,
    budget: int,
    sets: Sequence[str],
    device: Device | None,
    told: Callable[[Forecast], None],
) -> Choice:
    sets = [*sets, f"train.activation_checkpointing={str(checkpointing).lower()}"]
    found: dict[int, Forecast] = {}

    def fits(size: int) -> bool:
        with_size = [*sets, f"train.micro_batch={size}"]
        found[size] = one = forecast(
            recipe, spec, ranks=spec.ranks, registry=registry, sets=with_size, device=device, budget=budget
        )
        told(one)
        return bool(one.fits)

    known = load_recipe(recipe, sets=[*sets, *spec.sets], registry=registry).recipe
    shards = known.train.elastic_shards or build(registry, "strategy", known.strategy).data_ranks(spec.ranks)
    micro = fitting(sizes(known.train.global_batch // shards), fits)
    return Choice(spec, checkpointing, micro, found[micro if micro else min(found)])


def best(found: Sequence[Choice]) -> Choice | None:
    """The choice that fits and trains most items a second by the estimate; without one, that computes least."""
    fitting = [one for one in found if one.micro_batch is not None]
    return min(fitting, key=_cost, default=None)


def _cost(one: Choice) -> tuple[float, int]:
    known = one.forecast
    return (known.seconds.most if known.seconds else float(known.flops or 0), -(one.micro_batch or 0))
