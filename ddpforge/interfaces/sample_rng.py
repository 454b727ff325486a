"""RNG of a loss: random numbers for the samples of a batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ddpforge.interfaces.seeds import mix

if TYPE_CHECKING:
    import torch
    from torch import Tensor

__all__ = ["SampleRNG"]


class SampleRNG:
    """RNG that returns one row per sample of the batch; the first size of `shape` is the number of samples.

    In training, torch's generator draws the numbers. In evaluation, the row of a sample depends only on the recipe's
    seed and the sample's index in its dataset, so metrics do not depend on ranks and batches. For this ddpforge passes
    `seeds`, one per sample.
    """

    def __init__(self, seeds: Sequence[int] = ()) -> None:
        self._seeds, self._calls = seeds, 0

    def rand(self, *shape: int, device: torch.device | None = None) -> Tensor:
        """Returns uniform random numbers in [0, 1), float32."""
        import torch

        return self._rows(torch.rand, shape, device)

    def randn(self, *shape: int, device: torch.device | None = None) -> Tensor:
        """Returns standard normal random numbers, float32."""
        import torch

        return self._rows(torch.randn, shape, device)

    def _rows(self, draw: Callable[..., Tensor], shape: tuple[int, ...], device: torch.device | None) -> Tensor:
        import torch

        if not self._seeds:
            return draw(shape, device=device)
        if shape[0] != len(self._seeds):
            raise ValueError(
                f"random numbers for {shape[0]} samples in a batch of {len(self._seeds)}: the first size must be "
                "the batch size"
            )
        self._calls += 1
        rows = [
            draw(shape[1:], generator=torch.Generator().manual_seed(mix(seed, self._calls))) for seed in self._seeds
        ]
        return torch.stack(rows).to(device)
