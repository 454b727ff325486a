"""GAN with a hinge loss (Lim and Ye, 2017). The critic is updated twice for each update of the generator."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ddpforge.interfaces import Task, Total


class Nets(nn.Module):
    """Generator, noise [B, 16] → images, and critic, images → scores [B]."""

    def __init__(self, *, width: int = 128) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(16, width), nn.ReLU(), nn.Linear(width, 64), nn.Sigmoid(), nn.Unflatten(1, (1, 8, 8))
        )
        self.critic = nn.Sequential(nn.Flatten(), nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1))

    def forward(self, images: Tensor | None, noise: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the scores of the images (0 if there are none) and of the images generated from `noise`."""
        fake = self.generator(noise)
        if images is None:
            return torch.zeros(()), self.critic(fake).float().flatten()
        scores = self.critic(torch.cat([images, fake.detach()])).float().flatten()
        return scores[: len(images)], scores[len(images) :]


class Hinge(Task):
    """Hinge loss. Critic: real images above 1, generated images below -1. Generator: raises the scores of these."""

    updates = ("critic", "generator")

    def loss(self, model: nn.Module, batch: Any, turn: str = "") -> tuple[Tensor, Any]:
        images = batch[0]
        noise = torch.randn(len(images), 16, device=images.device)
        real, fake = model(images if turn == "critic" else None, noise)
        if turn == "generator":
            return -fake.sum(), None
        margins = torch.relu(1 - real) + torch.relu(1 + fake)
        return (margins + 1e-3 * real.square()).sum(), (real, fake)

    def metrics(self, outputs: Any, batch: Any) -> Mapping[str, Total]:
        if outputs is None:
            return {}
        real, fake = outputs
        return {"gap": Total((real - fake).sum(), len(real))}
