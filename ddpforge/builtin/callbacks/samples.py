"""Shows images that a diffusion model generates, at every evaluation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

from pydantic import Field

from ddpforge.builtin.tasks.diffusion import sample
from ddpforge.interfaces import Callback, RunContext

_Size = Annotated[int, Field(ge=1, le=4096)]


class DiffusionSamples(Callback):
    """Shows generated images as `samples`, for the task `diffusion`.

    Images are generated with the evaluated weights: with the averages if `ema` evaluates them. The initial noise is the
    same at every evaluation.
    """

    calls_model = True

    def __init__(
        self,
        shape: Annotated[
            Sequence[_Size], Field(min_length=3, max_length=3, description="Channels, height and width of an image.")
        ],
        images: Annotated[int, Field(ge=1, le=1024, description="Number of images.")] = 16,
        steps: Annotated[int, Field(ge=1, le=10_000, description="Steps from noise to an image.")] = 50,
    ) -> None:
        self._shape, self._steps = (images, *shape), steps

    def on_start(self, run: RunContext) -> None:
        """Stores the run."""
        self._run = run

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        """Generates images on every rank and shows those of the main rank; returns no metrics."""
        import torch

        # Every rank calls the model, because a strategy may need all ranks for a forward pass.

        noise = torch.randn(self._shape, device=self._run.world.device)
        with self._run.forward():
            images = sample(self._run.model, noise, self._steps)
        self._run.log_media("samples", images.clamp(0, 1), "image")
        return {}
