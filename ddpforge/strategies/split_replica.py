"""The replica of strategies that compute on several devices in one process."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.compat import tree_map_only
from ddpforge.errors import StrategyError
from ddpforge.interfaces import Compute, Pass, Strategy
from ddpforge.strategies.torch_replica import WholeReplica

__all__ = ["SplitReplica", "move_inputs", "move_outputs"]


class SplitReplica(WholeReplica):
    """A model on several devices of one process, each with random numbers of its own."""

    def __init__(self, strategy: Strategy, *parts: Any, devices: Sequence[torch.device], **options: Any) -> None:
        super().__init__(strategy, *parts, **options)
        self._others = devices[1:]

    def passes(self, passes: Iterable[Pass], compute: Compute, *, trains: bool) -> Iterator[tuple[Tensor, Any] | None]:
        """Also seeds the other devices: from one seed all would draw the same numbers."""
        seeded = (replace(one, seed=partial(self._seed, one)) for one in passes)
        return super().passes(seeded, compute, trains=trains)

    def _seed(self, one: Pass) -> None:
        one.seed()
        for number, device in enumerate(self._others, 1):
            if device.type == "cuda" and device != self.world.device:
                torch.cuda.default_generators[device.index].manual_seed(torch.initial_seed() + number)

    @contextmanager
    def autocast(self) -> Iterator[None]:
        """Also says in the recipe's words what torch says of tensors on different devices."""
        try:
            with super().autocast():
                yield
        except RuntimeError as error:
            if "on the same device" not in str(error):
                raise
            raise StrategyError(
                f"between its blocks the model computes with tensors of different devices: {error}",
                hints=["name larger classes in train.blocks, which hold all that is computed together"],
            ) from error


def move_inputs(device: torch.device, _: nn.Module, args: Any, kwargs: Any) -> Any:
    """A hook that gives a module its inputs on a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), (args, kwargs))


def move_outputs(device: torch.device, _: nn.Module, args: Any, outputs: Any) -> Any:
    """A hook that gives a module's outputs on to a device."""
    return tree_map_only(Tensor, lambda tensor: tensor.to(device), outputs)
