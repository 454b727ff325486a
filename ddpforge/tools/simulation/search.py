"""Searches for settings that fit into memory and are fastest by the estimate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from ddpforge.api import contract_of
from ddpforge.components.registry import Registry, build
from ddpforge.errors import ForgeError
from ddpforge.recipe import load_recipe
from ddpforge.recipe.schema import TrainSection
from ddpforge.tools.parity.specs import Spec
from ddpforge.tools.simulation.devices import Device
from ddpforge.tools.simulation.forecast import Forecast, forecast
from ddpforge.tools.trials.batch_size import fitting, sizes

__all__ = ["Choice", "Remedy", "best", "choices", "remedies"]

_FEW = 3


@dataclass(frozen=True)
class Choice:
    """Largest micro-batch that fits under a strategy and kind of activation checkpointing; None if none fits."""

    spec: Spec
    checkpointing: bool | Literal["selective"]
    micro_batch: int | None
    forecast: Forecast  # with that micro-batch, or the smallest one tried

    @property
    def sets(self) -> dict[str, str]:
        """Returns the settings of a recipe for this choice."""
        return {
            **{key: value for key, _, value in (one.partition("=") for one in self.spec.sets)},
            "train.micro_batch": str(self.micro_batch),
            "train.activation_checkpointing": json.dumps(self.checkpointing),
        }


def choices(
    recipe: str,
    specs: Sequence[Spec],
    *,
    registry: Registry,
    budget: int,
    sets: Sequence[str] = (),
    device: Device | None = None,
    on_result: Callable[[Forecast], None] = lambda one: None,
) -> list[Choice]:
    """Returns a choice for each strategy, without and (if the model has blocks) with each kind of checkpointing.

    All are within `budget` bytes per rank. `on_result` is called with every forecast. Raises RecipeError if the recipe
    cannot train.
    """
    found = []
    for spec in specs:
        asked = (registry, budget, sets, device, on_result)
        found.append(_largest(recipe, spec, False, *asked))
        with suppress(ForgeError):  # raised for a model without blocks
            found.append(_largest(recipe, spec, "selective", *asked))
            found.append(_largest(recipe, spec, True, *asked))
    return found


@dataclass(frozen=True)
class Remedy:
    """Changes to a recipe with which it fits, and its forecast with them."""

    sets: Mapping[str, str]
    forecast: Forecast


def remedies(
    recipe: str,
    ranks: int,
    *,
    registry: Registry,
    budget: int,
    sets: Sequence[str] = (),
    device: Device | None = None,
) -> list[Remedy]:
    """Returns up to three changes that make a recipe fit into `budget` bytes per rank, the fastest by estimate first.

    Tried are a smaller micro-batch, activation checkpointing and both. If the recipe's strategy shards nothing, the
    same is tried under FSDP. If fewer than three of these fit, bf16 is tried; it changes the numbers. Raises
    RecipeError if the recipe cannot train.
    """
    known = load_recipe(recipe, sets=sets, registry=registry).recipe
    train, own = known.train, Spec(known.strategy.use, known.strategy.use, (), ranks)
    shards = contract_of(build(registry, "strategy", known.strategy)).shards
    specs = [own, Spec("fsdp", "fsdp", (), ranks)] if ranks > 1 and not shards else [own]
    asked = (registry, budget, sets, device, lambda _: None)
    found: list[Remedy] = []
    for spec in specs:
        for checkpointing in {train.activation_checkpointing, True}:
            with suppress(ForgeError):  # raised for a model without blocks, or that cannot be sharded
                choice = _largest(recipe, spec, checkpointing, *asked)
                if choice.micro_batch:
                    found.append(Remedy(_changes(choice, own, train, ranks), choice.forecast))
    found.sort(key=lambda one: _cost(one.forecast))
    if len(found) < _FEW and train.precision == "fp32":
        half = "train.precision", '"bf16"'
        with suppress(ForgeError):
            one = forecast(
                recipe, None, ranks=ranks, registry=registry, sets=[*sets, "=".join(half)], device=device, budget=budget
            )
            found += [Remedy(dict([half]), one)] if one.fits else []
    return found[:_FEW]


def _changes(choice: Choice, own: Spec, train: TrainSection, ranks: int) -> dict[str, str]:
    """Returns the settings of a choice that differ from the recipe."""
    batch = choice.forecast.batch
    before = {
        "strategy.use": json.dumps(own.use),
        "train.micro_batch": str(train.per_pass(batch["data_ranks"])),
        "train.activation_checkpointing": json.dumps(train.activation_checkpointing),
    }
    return {key: value for key, value in choice.sets.items() if before.get(key) != value}


def _largest(
    recipe: str,
    spec: Spec,
    checkpointing: bool | Literal["selective"],
    registry: Registry,
    budget: int,
    sets: Sequence[str],
    device: Device | None,
    on_result: Callable[[Forecast], None],
) -> Choice:
    sets = [*sets, f"train.activation_checkpointing={json.dumps(checkpointing)}"]
    found: dict[int, Forecast] = {}

    def fits(size: int) -> bool:
        with_size = [*sets, f"train.micro_batch={size}"]
        found[size] = one = forecast(
            recipe, spec, ranks=spec.ranks, registry=registry, sets=with_size, device=device, budget=budget
        )
        on_result(one)
        return bool(one.fits)

    known = load_recipe(recipe, sets=[*sets, *spec.sets], registry=registry).recipe
    shards = known.train.virtual_ranks or build(registry, "strategy", known.strategy).data_ranks(spec.ranks)
    micro = fitting(sizes(known.train.global_batch // shards), fits)
    return Choice(spec, checkpointing, micro, found[micro if micro else min(found)])


def best(found: Sequence[Choice]) -> Choice | None:
    """Returns the choice that fits with the least time of a step by the estimate; without a device, the least work."""
    fitting = [one for one in found if one.micro_batch is not None]
    return min(fitting, key=lambda one: _cost(one.forecast), default=None)


def _cost(one: Forecast) -> tuple[float, ...]:
    """Returns the seconds of a step; without a device its operations, then bytes sent, then forward passes."""
    if one.seconds:
        return (one.seconds.most,)
    return one.flops or 0, sum((one.wire or {}).values()), -one.batch["micro_batch"]
