"""Tensors in memory that look like those of a checkpoint."""

from dataclasses import dataclass

import torch
from torch import Tensor

from ddpforge.interfaces.regions import FlatRange, Region, copy


@dataclass(frozen=True)
class Saved:
    """A `SavedTensor`."""

    tensor: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    def read(self) -> Tensor:
        return self.tensor.clone()

    def read_into(self, region: Region, target: Tensor) -> None:
        assert target.dtype == self.dtype
        flat = target.view(-1) if isinstance(region, FlatRange) else target
        copy(self.shape, FlatRange(0, self.tensor.numel()), self.tensor.reshape(-1), region, flat)
