"""Small convolutional network that predicts the noise in small images, for diffusion."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Denoiser(nn.Module):
    """Model `denoiser`; `builders.denoiser` documents its options."""

    def __init__(self, *, channels: int = 1, width: int = 32, layers: int = 3) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(width, width), nn.SiLU(), nn.Linear(width, width), nn.SiLU())
        self.first = nn.Conv2d(channels, width, 3, padding=1)
        self.blocks = nn.ModuleList(_Block(width) for _ in range(layers))
        self.last = nn.Sequential(nn.GroupNorm(8, width), nn.SiLU(), nn.Conv2d(width, channels, 3, padding=1))

    def forward(self, images: Tensor, times: Tensor) -> Tensor:
        """Returns the predicted noise."""
        when = self.time(_waves(times, self.first.out_channels))
        x = self.first(images)
        for block in self.blocks:
            x = block(x, when)
        found: Tensor = self.last(x)
        return found


class _Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(8, width) for _ in range(2))
        self.layers = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor, when: Tensor) -> Tensor:
        scale, shift = self.time(when)[..., None, None].chunk(2, dim=1)
        y = self.layers[0](F.silu(self.norms[0](x)))
        # After the norm, because the norm would cancel a shift of whole channels.
        out: Tensor = x + self.layers[1](F.silu(self.norms[1](y) * (1 + scale) + shift))
        return out


def _waves(times: Tensor, width: int) -> Tensor:
    """Returns sines and cosines of the times, [B, width], with angular frequencies from 1 to 1000."""
    rates = torch.exp(torch.linspace(0, math.log(1000), width // 2, device=times.device))
    angles = times[:, None] * rates
    return torch.cat([angles.sin(), angles.cos()], dim=1)
