"""Layouts of a recipe: by strategy, with accumulation and checkpointing."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product, zip_longest
from typing import Any, Literal

from ddpforge.api import Problems, check_chosen, check_cut, choose, contract_of, load_recipe
from ddpforge.components.registry import Registry, build
from ddpforge.errors import PluginError, UsageError
from ddpforge.interfaces import Strategy
from ddpforge.recipe.toml import toml_value
from ddpforge.tools.parity.specs import Spec

__all__ = ["Layout", "declared", "settings_of", "shuffled"]

_ACCUMULATIONS = (1, 2, 4, 8)
_KINDS: Mapping[bool | Literal["selective"], str] = {
    False: "",
    True: ", checkpointing",
    "selective": ", selective checkpointing",
}


@dataclass(frozen=True)
class Layout:
    """Strategy with its options on a number of ranks, and how its ranks compute a step.

    Attributes:
        accumulation: number of micro-batches of a step on each rank; None if the recipe's virtual ranks determine it.
        checkpointing: value of `train.activation_checkpointing`.
    """

    spec: Spec
    accumulation: int | None
    checkpointing: bool | Literal["selective"]

    @property
    def text(self) -> str:
        """Returns the layout as it is shown, and as its row is found again."""
        many = f", {self.accumulation} micro-batches" if (self.accumulation or 1) > 1 else ""
        return f"{self.spec.text}{many}{_KINDS[self.checkpointing]}"


def declared(
    registry: Registry, *, most: int, strategies: Sequence[str] = (), accumulates: bool = True
) -> list[Layout]:
    """Returns the layouts on 1 to `most` ranks that `strategies` declare, by default all that are installed.

    Raises UsageError for a strategy that does not exist.
    """
    return [
        Layout(_spec(name, options, ranks), accumulation, kind)
        for name, ranks in product(strategies or registry.names("strategy"), range(1, most + 1))
        for options in _layouts(registry, name, ranks)
        for accumulation, kind in product(_ACCUMULATIONS if accumulates else [None], _KINDS)
    ]


def _layouts(registry: Registry, name: str, ranks: int) -> Iterable[Mapping[str, Any]]:
    """Returns the layouts of a class; of a function that returns strategies, only the one without options."""
    try:
        strategy = registry.load("strategy", name)
    except PluginError as error:
        raise UsageError(error.message, hints=error.hints) from error
    return strategy.layouts(ranks) if isinstance(strategy, type) and issubclass(strategy, Strategy) else ({},)


def _spec(name: str, options: Mapping[str, Any], ranks: int) -> Spec:
    assignments = tuple(f"{key}={toml_value(value)}" for key, value in options.items())
    return Spec(":".join([name, *assignments]).replace('"', "") + f"@{ranks}", name, assignments, ranks)


def shuffled(layouts: Sequence[Layout], seed: int) -> list[Layout]:
    """Returns the layouts in a random order: each of a strategy's own layouts once, then their further settings.

    Strategies take turns, so that the first ones are of all strategies.
    """
    generator = random.Random(seed)
    own: dict[str, dict[str, list[Layout]]] = defaultdict(lambda: defaultdict(list))
    for one in layouts:
        own[one.spec.use][one.spec.text].append(one)
    by_strategy = [list(several.values()) for several in own.values()]
    for several in by_strategy:
        generator.shuffle(several)
        for settings in several:
            generator.shuffle(settings)
    in_turns = [settings for turn in zip_longest(*by_strategy) for settings in turn if settings]
    return [one for turn in zip_longest(*in_turns) for one in turn if one]


def settings_of(layout: Layout, recipe: str, registry: Registry, sets: Sequence[str] = ()) -> list[str]:
    """Returns the `--set` arguments for the layout; raises ForgeError if its checks before a run refuse it.

    BatchNorm depends on the samples of a forward pass: `train.virtual_ranks` keep these the same on all ranks.
    """
    sets = [*sets, *layout.spec.sets, f"train.activation_checkpointing={json.dumps(layout.checkpointing)}"]
    train = (known := load_recipe(recipe, sets=sets, registry=registry).recipe).train
    strategy = build(registry, "strategy", known.strategy)
    if layout.accumulation is not None:
        parts = strategy.data_ranks(layout.spec.ranks) * layout.accumulation
        if train.global_batch % parts:
            raise UsageError(f"train.global_batch = {train.global_batch} is not a multiple of {parts} micro-batches")
        sets.append(f"train.micro_batch={train.global_batch // parts}")
    loaded = load_recipe(recipe, sets=sets, registry=registry)
    problems = Problems(loaded)
    chosen = choose(loaded, registry, problems, ranks=layout.spec.ranks)
    check_chosen(chosen, problems)
    if contract_of(chosen.strategy).averages == "weights":
        raise UsageError("its ranks average weights, and differ from one process by design")
    check_cut(chosen, problems)
    problems.raise_if_any()
    return sets
