"""Adversarial training of a generator and a discriminator (GAN)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class Adversarial(Task):
    """Alternating updates of discriminator and generator (Goodfellow et al., 2014, non-saturating loss).

    A batch is images, or a pair that begins with them. The model is called as `model("generator", noise [B, latent])`
    and `model("discriminator", images)`. A positive score means that the discriminator takes an image for real. The
    accuracy of the discriminator is reported as `accuracy/discriminator`.
    """

    updates = ("discriminator", "generator")

    def __init__(
        self, *, latent: Annotated[int, Field(ge=1, le=2**24, description="Number of noise values per image.")] = 32
    ) -> None:
        self.latent = latent

    def loss(self, model: nn.Module, batch: Any, update: str = "") -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """Returns the summed loss of the update; for the discriminator also the scores of real and generated images."""
        import torch
        from torch.nn.functional import softplus

        images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
        noise = self.rng.randn(len(images), self.latent, device=images.device)
        if update == "generator":
            return softplus(-model("discriminator", model("generator", noise)).float()).sum(), None
        with torch.no_grad():
            generated = model("generator", noise)
        scores = model("discriminator", torch.cat([images, generated.to(images.dtype)])).float()
        real, fake = scores[: len(images)], scores[len(images) :]
        return softplus(-real).sum() + softplus(fake).sum(), (real, fake)

    def metrics(self, outputs: tuple[Tensor, Tensor] | None, batch: Any) -> Mapping[str, Total]:
        """Returns the discriminator's accuracy, which is one half for guessing."""
        if outputs is None:
            return {}
        real, fake = outputs
        return {"accuracy": Total((real > 0).sum() + (fake <= 0).sum(), len(real) + len(fake))}

    def predict(self, model: nn.Module, batch: Any) -> NoReturn:
        """Raises UsageError: this task has no predictions for samples."""
        draw = f'ddpforge.load(RUN).model()("generator", torch.randn(16, {self.latent}))'
        raise UsageError(
            "task gan generates images from noise, and cannot predict anything for the images in the data",
            hints=[f"generate images in Python: `{draw}`", "or write a task with a `predict` of your own"],
        )

    def check(self, model: nn.Module, data: Any) -> None:
        """Raises ValueError if the model has another `latent`."""
        if getattr(model, "latent", self.latent) != self.latent:
            raise ValueError(f"the model takes {model.latent} noise values; set task.latent = {model.latent}")
