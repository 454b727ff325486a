"""InfoNCE over all ranks, as in CLIP: matches the upper and lower halves of scans."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddpforge.interfaces import Task, World


class Halves(nn.Module):
    """Two encoders, one for upper and one for lower halves: [B, 1, 8, 8] → unit vectors [B, 2, width]."""

    def __init__(self, *, width: int = 32) -> None:
        super().__init__()
        self.upper, self.lower = (
            nn.Sequential(nn.Flatten(), nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, width)) for _ in range(2)
        )

    def forward(self, images: Tensor) -> Tensor:
        above, below = images.chunk(2, dim=2)
        return F.normalize(torch.stack([self.upper(above), self.lower(below)], dim=1), dim=-1)


class Match(Task):
    whole_batch = True

    def start(self, model: nn.Module, world: World) -> None:
        self.ranks = world.dp_ranks

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        mine = model(batch[0]).float()
        everyones, begin = self.ranks.all_gather(mine)
        places = torch.arange(begin, begin + len(mine), device=mine.device)
        there = F.cross_entropy(mine[:, 0] @ everyones[:, 1].T / 0.1, places, reduction="sum")
        back = F.cross_entropy(mine[:, 1] @ everyones[:, 0].T / 0.1, places, reduction="sum")
        return (there + back) / 2, None
