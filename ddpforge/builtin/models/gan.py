"""A generator and a discriminator of two layers each, for small images."""

from collections.abc import Sequence
from math import prod
from typing import Annotated, Literal

from pydantic import Field
from torch import Tensor, nn

_Size = Annotated[int, Field(ge=1, le=2**24)]


class GAN(nn.Module):
    """Two networks in one model, `generator` and `discriminator`: a forward pass says which of them it is of."""

    def __init__(
        self,
        *,
        shape: Annotated[Sequence[_Size], Field(min_length=1, description="Shape of an image, with values 0 to 1.")],
        latent: Annotated[_Size, Field(description="Values of noise that an image is made of.")] = 32,
        width: Annotated[_Size, Field(description="Width of the hidden layers.")] = 256,
        dropout: Annotated[float, Field(ge=0, lt=1, description="Dropout of the discriminator's hidden layers.")] = 0.5,
    ) -> None:
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
        """Noise [B, latent] → images [B, *shape] for the generator; images → scores [B, 1] for the discriminator."""
        found: Tensor = (self.generator if part == "generator" else self.discriminator)(x)
        return found
