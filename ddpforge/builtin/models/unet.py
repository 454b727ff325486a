"""Small U-Net: logits for each pixel of an image."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UNet(nn.Module):
    """Model `unet`; `builders.unet` documents its options."""

    def __init__(self, *, classes: int, channels_in: int = 1, width: int = 16, depth: int = 2) -> None:
        super().__init__()
        self.outputs, self.channels_in, self.depth = classes, channels_in, depth
        stages = [width * 2**stage for stage in range(depth + 1)]
        self.first = nn.Conv2d(channels_in, width, kernel_size=3, padding=1)
        self.down = nn.ModuleList(nn.Conv2d(a, b, kernel_size=4, stride=2, padding=1) for a, b in pairwise(stages))
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, kernel_size=2, stride=2) for a, b in pairwise(stages))
        self.mix = nn.ModuleList(nn.Conv2d(2 * a, a, kernel_size=3, padding=1) for a in stages[:-1])
        self.last = nn.Conv2d(width, classes, kernel_size=1)

    def forward(self, images: Tensor) -> Tensor:
        """Maps [B, C, H, W] → [B, classes, H, W]; raises ValueError if C, H or W do not fit."""
        if images.ndim != 4 or images.shape[1] != self.channels_in or any(n % 2**self.depth for n in images.shape[2:]):
            raise ValueError(
                f"UNet(channels_in = {self.channels_in}, depth = {self.depth}) got a batch of shape {[*images.shape]}; "
                f"expected [batch, {self.channels_in}, height, width], both divisible by {2**self.depth}"
            )
        stages = [F.relu(self.first(images))]
        for down in self.down:
            stages.append(F.relu(down(stages[-1])))
        features = stages.pop()
        for up, mix in zip(reversed(self.up), reversed(self.mix), strict=True):
            features = F.relu(mix(torch.cat([up(features), stages.pop()], dim=1)))
        logits: Tensor = self.last(features)
        return logits
