"""Data and model of these scripts: points in the plane, and a small network. Imports nothing from ddpforge."""

import torch
from torch import Tensor, nn


class Rings(torch.utils.data.Dataset):
    """Points in the plane; class 1 is inside the ring."""

    def __init__(self, *, split: str, samples: int = 2000) -> None:
        generator = torch.Generator().manual_seed(len(split))
        self.points = 2 * torch.rand(samples, 2, generator=generator) - 1
        self.labels = ((self.points.norm(dim=1) - 0.6).abs() < 0.2).long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.points[index], self.labels[index]


class Net(nn.Module):
    def __init__(self, *, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU())
        self.head = nn.Linear(width, 2)

    def forward(self, points: Tensor) -> Tensor:
        return self.head(self.layers(points))
