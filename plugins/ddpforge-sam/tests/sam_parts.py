"""Components of the tests' recipes (`./sam_parts.py:…`); the tests also compute the expected values with them."""

import torch
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
    """Dataset of pairs (x, y). Their order does not matter if each step contains all of them."""

    random = False

    def __init__(self, samples: int = 16, draw: int = 1) -> None:
        self.x = torch.randn(samples, 4, generator=torch.Generator().manual_seed(draw))
        self.y = self.x.sum(1, keepdim=True).sin()

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]
