"""Denoising diffusion: generates images from noise with a model that predicts the noise in an image."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NoReturn

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task

if TYPE_CHECKING:
    from torch import Tensor, nn

__all__ = ["Diffusion", "sample"]


class Diffusion(Task):
    """Prediction of the noise in images [B, C, H, W] with values 0 to 1, at random times; a batch begins with images.
    The model takes noisy images and times [B], and returns the noise. The noisy image at time t in (0, 1) is
    √a·x + √(1 - a)·noise with a = cos²(πt / 2), for an image x that is scaled to -1 to 1. See Ho et al., "Denoising
    Diffusion Probabilistic Models" (2020); the schedule is that of Nichol and Dhariwal (2021) in continuous time. The
    loss of an image is the mean squared error over its values.
    """

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the summed loss, and the predicted noise."""
        import torch.nn.functional as F

        images = batch[0] if isinstance(batch, tuple | list) else batch
        time = self.rng.rand(len(images), device=images.device)
        noise = self.rng.randn(*images.shape, device=images.device)
        signal = _signal(time).view(-1, 1, 1, 1)
        found = model(signal.sqrt() * (2 * images - 1) + (1 - signal).sqrt() * noise, time)
        return F.mse_loss(found.float(), noise, reduction="none").flatten(1).mean(1).sum(), found

    def predict(self, model: nn.Module, batch: Any) -> NoReturn:
        """Raises UsageError: this task has no predictions for samples."""
        raise UsageError(
            "task diffusion generates images from noise, and cannot predict anything for the images in the data",
            hints=[
                f"generate images in Python: `sample(ddpforge.load(RUN).model(), noise, 50)` of {__name__}",
                "or show images at every evaluation with the callback diffusion_samples",
                "or write a task with a `predict` of your own",
            ],
        )


def _signal(time: Tensor) -> Tensor:
    """Returns the fraction of the variance that comes from the image."""
    import torch

    return torch.cos(time * math.pi / 2).square().clamp(1e-4, 1 - 1e-4)


def sample(model: nn.Module, noise: Tensor, steps: int) -> Tensor:
    """Generates images with values 0 to 1 from `noise` [N, C, H, W], in `steps` steps of the ancestral sampler."""
    import torch

    with torch.no_grad():
        times = torch.linspace(1, 0, steps + 1, device=noise.device)
        x = noise
        for now, then in zip(_signal(times[:-1]), _signal(times[1:]), strict=True):
            time = torch.acos(now.sqrt()) * 2 / math.pi
            predicted = model(x, time.expand(len(x))).float()
            image = ((x - (1 - now).sqrt() * predicted) / now.sqrt()).clamp(-1, 1)
            kept, spread = now / then, (1 - then) / (1 - now)
            x = kept.sqrt() * spread * x + then.sqrt() * (1 - kept) / (1 - now) * image
            x = x + ((1 - kept) * spread).sqrt() * torch.randn_like(x) if then < 0.999 else image
    return (x + 1) / 2
