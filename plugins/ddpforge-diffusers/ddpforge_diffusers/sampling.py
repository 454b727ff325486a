"""Generation of samples with the schedulers of diffusers, and pictures of them at evaluations."""

from collections.abc import Callable, Mapping
from typing import Annotated, Any

import torch
from ddpforge.interfaces import Callback, RunContext, SampleRNG
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from ddpforge_diffusers.models import denoise

__all__ = ["Samples", "SamplesOptions", "sample"]


class SamplesOptions(BaseModel):
    """Options of the pictures that a task shows at every evaluation."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    images: Annotated[int, Field(ge=1, le=1024, description="Number of pictures; their classes take turns.")] = 16
    steps: Annotated[int, Field(ge=1, le=1000, description="Steps of the scheduler from noise to a picture.")] = 25
    guidance: Annotated[
        float,
        Field(ge=0, le=100, description="Scale of classifier-free guidance; 1: no guidance. Needs label_dropout."),
    ] = 1.0


@torch.no_grad()
def sample(
    model: nn.Module,
    scheduler: Any,
    noise: Tensor,
    *,
    steps: int,
    labels: Tensor | None = None,
    null: int | None = None,
    guidance: float = 1.0,
) -> Tensor:
    """Generates samples from `noise` [N, C, H, W] by `steps` steps of a scheduler of diffusers; float32.

    `labels` [N] are classes. With `guidance` other than 1 each step is u + guidance * (c - u), with the predictions c
    for the labels and u for the label `null`. See Ho and Salimans, "Classifier-Free Diffusion Guidance" (2022).
    """
    scheduler.set_timesteps(steps, device=noise.device)
    x = noise * scheduler.init_noise_sigma if hasattr(scheduler, "init_noise_sigma") else noise
    guided = labels is not None and guidance != 1
    if guided and null is None:
        raise ValueError("guidance needs the label `null` for samples without a class")
    for time in scheduler.timesteps:
        times = time.expand(len(x))
        if labels is None or not guided:
            found = denoise(model, x, times, {} if labels is None else {"class_labels": labels})
        else:
            both = torch.cat([torch.full_like(labels, int(null or 0)), labels])
            without, within = denoise(model, x.repeat(2, 1, 1, 1), times.repeat(2), {"class_labels": both}).chunk(2)
            found = without + guidance * (within - without)
        x = scheduler.step(found, time, x, return_dict=False)[0]
    return x


class Samples(Callback):
    """Shows generated pictures as `samples`, with the evaluated weights: the averages, if `ema` evaluates them.

    The noise is the same at every evaluation. `setting` returns the shape of a sample, the number of classes (0: no
    classes) and the label for samples without a class.
    """

    calls_model = True

    def __init__(
        self,
        options: SamplesOptions,
        scheduler: Callable[[], Any],
        setting: Callable[[], tuple[tuple[int, ...], int, int | None]],
    ) -> None:
        self._options, self._scheduler, self._setting = options, scheduler, setting

    def on_start(self, run: RunContext) -> None:
        """Stores the run."""
        self._run = run

    def while_evaluating(self, step: int) -> Mapping[str, float]:
        """Generates pictures on every rank and shows those of the main rank; returns no metrics."""
        # Every rank calls the model, because a strategy may need all ranks for a forward pass.
        shape, classes, null = self._setting()
        count, device = self._options.images, self._run.world.device
        noise = SampleRNG(range(count)).randn(count, *shape, device=device)
        labels = torch.arange(count, device=device) % classes if classes else None
        with self._run.forward():
            found = sample(
                self._run.model,
                self._scheduler(),
                noise,
                steps=self._options.steps,
                labels=labels,
                null=null,
                guidance=self._options.guidance,
            )
        self._run.log_media("samples", ((found + 1) / 2).clamp(0, 1).float(), "image")
        return {}
