"""GAN for small images: generator and discriminator with two hidden layers each."""

from collections.abc import Sequence
from math import prod
from typing import Literal

from torch import Tensor, nn


class GAN(nn.Module):
    """Model `gan`; `builders.gan` documents its options."""

    def __init__(self, *, shape: Sequence[int], latent: int = 32, width: int = 256, dropout: float = 0.5) -> None:
        super().__init__()
        self.latent, values = latent, prod(shape)
        self.generator = nn.Sequential(
            *(nn.Linear(latent, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            *(nn.Linear(width, values), nn.Sigmoid(), nn.Unflatten(1, tuple(shape))),
        )
        self.discriminator = nn.Sequential(
            *(nn.Flatten(), nn.Linear(values, width), nn.LeakyReLU(0.2), nn.Dropout(dropout)),
            *(nn.Linear(width, width), nn.LeakyReLU(0.2), nn.Dropout(dropout), nn.Linear(width, 1)),
        )

    def forward(self, part: Literal["generator", "discriminator"], x: Tensor) -> Tensor:
        """Maps noise [B, latent] → images [B, *shape] (generator), or images → scores [B, 1] (discriminator)."""
        found: Tensor = (self.generator if part == "generator" else self.discriminator)(x)
        return found
