"""Small convolutional network for images of 8 x 8 to 32 x 32 pixels."""

from typing import ClassVar

from torch import Tensor, nn


class CNN(nn.Module):
    """Model `cnn`; `builders.cnn` documents its options."""

    pipeline: ClassVar = ("enter", "features", "classifier")

    def __init__(self, *, channels_in: int = 1, classes: int = 10, width: int = 32, dropout: float = 0.0) -> None:
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
        """Maps [B, C, H, W] → [B, classes]; raises ValueError if C is not `channels_in`."""
        logits: Tensor = self.classifier(self.features(self.enter(images)))
        return logits

    def enter(self, images: Tensor) -> Tensor:
        """Returns the images unchanged; raises ValueError if their shape does not fit."""
        if images.ndim != 4 or images.shape[1] != self.channels_in:
            raise ValueError(
                f"CNN(channels_in = {self.channels_in}) got a batch of shape {list(images.shape)};"
                f" expected [batch, {self.channels_in}, height, width]"
                + (f"; set model.channels_in = {images.shape[1]}" if images.ndim == 4 else "")
            )
        return images


def _convolution(channels_in: int, channels_out: int) -> tuple[nn.Module, ...]:
    """Returns a convolution, BatchNorm and ReLU."""
    # No bias: the BatchNorm would cancel it.
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return convolution, nn.BatchNorm2d(channels_out), nn.ReLU()
