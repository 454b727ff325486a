"""The random numbers that a loss draws for the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddpforge.interfaces.seeds import mix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["Draws"]


class Draws:
    """Random numbers, a row for each sample of the batch: the first of `shape` is their number.

    In training they come from torch's generator. In evaluation those of a sample are functions of the recipe's seed and
    the sample's place in its dataset, so that metrics do not depend on ranks and batches: ddpforge gives the task
    `seeds`, one for each sample.
    """

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self._seeds, self._calls = seeds, 0

    def rand(self, *shape: int, device: torch.device | None = None) -> Tensor:
        """Uniform from 0 to 1, float32."""
        import torch

        return self._rows(torch.rand, shape, device)

    def randn(self, *shape: int, device: torch.device | None = None) -> Tensor:
        """Normal with mean 0 and variance 1, float32."""
        import torch

        return self._rows(torch.randn, shape, device)

    def _rows(self, draw: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device | None) -> Tensor:
        import torch

        if not self._seeds:
            return draw(shape, device=device)
        if shape[0] != len(self._seeds):
            raise ValueError(f"draws for {shape[0]} samples in a batch of {len(self._seeds)}: the first size is theirs")
        self._calls += 1
        rows = [
            draw(shape[1:], generator=torch.Generator().manual_seed(mix(seed, self._calls))) for seed in self._seeds
        ]
        return torch.stack(rows).to(device)
