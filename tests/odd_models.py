"""Models that a strategy may have trouble with; recipes in tests name them as `./odd_models.py:Name`.

All take [B, 4] and give [B, 1].
"""

import os

import torch
from torch import Tensor, nn


class _Block(nn.Module):
    def __init__(self, weight: nn.Parameter | None = None) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)
        if weight is not None:
            self.inner.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class TiedBlocks(nn.Module):
    """Two blocks have one weight."""

    def __init__(self) -> None:
        super().__init__()
        first = _Block()
        self.blocks = nn.ModuleList([first, _Block(first.inner.weight)])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class TiedNames(nn.Module):
    """One parameter has two names, and its module another parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x)))


class Uninitialised(nn.Module):
    """A parameter that nothing initialises but the constructor."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * x)


class Half(nn.Module):
    """Weights in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 1, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.bfloat16()).float()


class Scalar(nn.Module):
    """A parameter without dimensions."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * self.head(x)


class BySample(nn.Module):
    """The first sample of a batch decides which of two layers all of it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if x[0, 0] > 0 else self.b(x)


class Uneven(nn.Module):
    """Two branches of different sizes, of which rank 0 uses one and all others the other."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 1)
        self.b = nn.Sequential(nn.Linear(4, 16), nn.Linear(16, 1))
        self.first = os.environ.get("RANK", "0") == "0"

    def forward(self, x: Tensor) -> Tensor:
        return self.a(x) if self.first else self.b(x)


class _Normed(nn.Module):
    """Forward changes what it keeps: running statistics, a power iteration, a buffer that is a new tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.second = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        x = self.second(self.norm(self.first(x)).relu())
        if self.training:
            self.largest = torch.maximum(0.9 * self.largest, x.detach().abs().max())
        return x / (1 + self.largest)


class NormedBlocks(nn.Module):
    """Two blocks that change their buffers; the second is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([_Normed(), _Normed()])
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 1):
            x = x + self.blocks[number](x=x)
        return self.head(x)


class OwnSeed(nn.Module):
    """Every rank draws other weights."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        self.head = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x)
