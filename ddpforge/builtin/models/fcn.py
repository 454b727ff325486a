"""A small fully convolutional network: logits for each pixel."""

from itertools import pairwise
from typing import Annotated

from pydantic import Field
from torch import Tensor, nn

_Size = Annotated[int, Field(ge=1, le=4096)]


class FCN(nn.Module):
    """3 x 3 convolutions with GroupNorm, each reaching twice as far as the one before: a pixel sees all around it.

    Takes [B, channels_in, H, W] and gives logits [B, classes, H, W]. Yu and Koltun 2016, arXiv:1511.07122.
    """

    def __init__(
        self,
        *,
        classes: Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")],
        channels_in: Annotated[_Size, Field(description="Channels of the images: 1 for grey, 3 for RGB.")] = 1,
        width: Annotated[_Size, Field(description="Channels of the layers between.")] = 32,
        layers: Annotated[int, Field(ge=1, le=12, description="Convolutions before the last, 1 x 1.")] = 4,
    ) -> None:
        super().__init__()
        self.outputs = classes
        channels = [channels_in, *[width] * layers]
        spread: list[nn.Module] = []
        for number, (before, after) in enumerate(pairwise(channels)):
            reach = 2**number
            spread.append(nn.Conv2d(before, after, kernel_size=3, padding=reach, dilation=reach, bias=False))
            spread += [nn.GroupNorm(1, after), nn.ReLU()]  # not BatchNorm: the same on any number of ranks
        self.layers = nn.Sequential(*spread, nn.Conv2d(width, classes, kernel_size=1))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] → [B, classes, H, W]."""
        logits: Tensor = self.layers(images)
        return logits
