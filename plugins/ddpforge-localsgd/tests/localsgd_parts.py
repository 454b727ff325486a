"""What the recipes of the tests name as `./localsgd_parts.py:…`; the tests use the same to work out what is right."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from ddpforge.interfaces import Task
from torch import Tensor, nn


class Net(nn.Module):
    """A small network that begins with the same weights wherever it is built."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 9), nn.Tanh(), nn.Linear(9, 1))
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


class Points:
    """Triples (x, y, how much the sample counts); each rank notes which samples it was given, if it is asked to."""

    random = False

    def __init__(self, samples: int = 32, draw: int = 1, nan: int = -1, noted: bool = False) -> None:
        generator = torch.Generator().manual_seed(draw)
        self.x = torch.randn(samples, 4, generator=generator)
        self.y = self.x.sum(1, keepdim=True).sin()
        self.items = torch.randint(1, 9, (samples,), generator=generator)
        self.noted = noted
        if nan >= 0:
            self.x[nan] = torch.nan

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        if self.noted:
            with open(f"samples-{os.environ.get('RANK', '0')}.txt", "a") as file:
                print(index, file=file)
        return self.x[index], self.y[index], self.items[index]


class Weighted(Task):
    """A sample weighs as much as it has items, so that ranks have different numbers of them."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, items = batch
        outputs = model(x)
        return (F.mse_loss(outputs, y, reduction="none").squeeze(1) * items).sum(), outputs

    def count(self, batch: Any) -> Tensor:
        total: Tensor = batch[2].sum()
        return total
