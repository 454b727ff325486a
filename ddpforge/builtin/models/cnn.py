"""A small convolutional network for images of 8 x 8 to 32 x 32 pixels."""

from typing import Annotated, ClassVar

from pydantic import Field
from torch import Tensor, nn

_Channels = Annotated[int, Field(ge=1, le=4096)]


class CNN(nn.Module):
    """Four 3 x 3 convolutions with BatchNorm, one halving of the image, the mean over pixels, a linear layer.

    Takes [B, channels_in, H, W], any H and W from 2 on, and gives logits [B, classes]. Initial weights are
    those of torch's layers.
    """

    pipeline: ClassVar = ("enter", "features", "classifier")

    def __init__(
        self,
        *,
        channels_in: Annotated[_Channels, Field(description="Channels of the images: 1 for grey, 3 for RGB.")] = 1,
        classes: Annotated[int, Field(ge=1, le=2**20, description="Number of classes.")] = 10,
        width: Annotated[
            _Channels, Field(description="Channels of the first stage; the second has twice as many.")
        ] = 32,
        dropout: Annotated[
            float, Field(ge=0, lt=1, description="Probability of zeroing a feature before the last layer.")
        ] = 0.0,
    ) -> None:
        super().__init__()
        self.channels_in, self.outputs = channels_in, classes

        self.features = nn.Sequential(
            *_convolution(channels_in, width),
            *_convolution(width, width),
            nn.MaxPool2d(2),
            *_convolution(width, 2 * width),
            *_convolution(2 * width, 2 * width),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
        )
        self.classifier = nn.Sequential(nn.Dropout(dropout), nn.Linear(2 * width, classes))

    def forward(self, images: Tensor) -> Tensor:
        """[B, C, H, W] → [B, classes]; raises ValueError when C is not `channels_in`."""
        logits: Tensor = self.classifier(self.features(self.enter(images)))
        return logits

    def enter(self, images: Tensor) -> Tensor:
        """The images as they are."""
        if images.ndim != 4 or images.shape[1] != self.channels_in:
            raise ValueError(
                f"CNN(channels_in = {self.channels_in}) got a batch of shape {list(images.shape)};"
                f" expected [batch, {self.channels_in}, height, width]"
            )
        return images


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """Convolution without a bias, which the BatchNorm behind it would cancel."""
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()
