"""Random numbers that differ between ranks where these compute different things, and are the same elsewhere."""

from __future__ import annotations

import torch

__all__ = ["OwnNumbers"]

_GOLDEN = 0x9E3779B97F4A7C15  # spreads ranks' seeds


class OwnNumbers:
    """Between `begin` and `end`, random numbers of this rank's own; behind them, those that all ranks would have drawn.

    They follow from the numbers that all ranks draw, so a block that is recomputed draws the same again.
    """

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank = rank
        self._generators = [torch.default_generator]
        if device.type == "cuda":
            self._generators.append(torch.cuda.default_generators[device.index or 0])
        self._outside: list[torch.Tensor] | None = None

    def forget(self) -> None:
        """Is outside, whatever became of what was begun: a recomputation ends in the middle."""
        self._outside = None

    def begin(self) -> None:
        """Goes inside; nothing happens there."""
        if self._outside is not None:
            return
        seed = int(torch.randint(2**62, (), device="cpu"))
        self._outside = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed((seed + (self._rank + 1) * _GOLDEN) % 2**63)

    def end(self) -> None:
        """Goes outside."""
        if self._outside is None:
            return
        for generator, state in zip(self._generators, self._outside, strict=True):
            generator.set_state(state)
        self._outside = None
