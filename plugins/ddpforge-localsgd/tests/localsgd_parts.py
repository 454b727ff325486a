"""Components of the tests' recipes (`./localsgd_parts.py:…`); the tests also compute the expected values with them."""

import os
from typing import Any

import torch
import torch.nn.functional as F
from ddpforge.interfaces import Task
from torch import Tensor, nn


class Net(nn.Module):
    """Small network with the same initial weights on every rank."""

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
    """Dataset of triples (x, y, number of items); with `noted`, each rank writes the fetched indices to a file."""

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
    """Regression with samples weighted by their number of items, so that the ranks have different numbers of items."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, items = batch
        outputs = model(x)
        return (F.mse_loss(outputs, y, reduction="none").squeeze(1) * items).sum(), outputs

    def count(self, batch: Any) -> Tensor:
        total: Tensor = batch[2].sum()
        return total
