"""Generating what cannot be told from the data: a generator and a discriminator against each other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import Task, Total

if TYPE_CHECKING:
    from torch import Tensor, nn


class Adversarial(Task):
    """The discriminator's update, then the generator's against it (Goodfellow et al., 2014, non-saturating loss).

    A batch is images, or a pair that begins with them. The model is called as `model("generator", noise [B, latent])`
    and `model("discriminator", images)`; more is said to come from the data the higher its score. Reported is how
    often the discriminator is right, `accuracy/discriminator`.
    """

    turns = ("discriminator", "generator")

    def __init__(
        self, *, latent: Annotated[int, Field(ge=1, le=2**24, description="Values of noise for an image.")] = 32
    ) -> None:
        self.latent = latent

    def loss(self, model: nn.Module, batch: Any, turn: str = "") -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The turn's summed loss and, of the discriminator, the scores of images and of what was generated."""
        import torch
        from torch.nn.functional import softplus

        images: Tensor = batch[0] if isinstance(batch, tuple | list) else batch
        noise = self.draws.randn(len(images), self.latent, device=images.device)
        if turn == "generator":
            return softplus(-model("discriminator", model("generator", noise)).float()).sum(), None
        with torch.no_grad():
            generated = model("generator", noise)
        scores = model("discriminator", torch.cat([images, generated.to(images.dtype)])).float()
        real, fake = scores[: len(images)], scores[len(images) :]
        return softplus(-real).sum() + softplus(fake).sum(), (real, fake)

    def metrics(self, outputs: tuple[Tensor, Tensor] | None, batch: Any) -> Mapping[str, Total]:
        """The discriminator's accuracy: one half if it can only guess."""
        if outputs is None:
            return {}
        real, fake = outputs
        return {"accuracy": Total((real > 0).sum() + (fake <= 0).sum(), len(real) + len(fake))}

    def predict(self, model: nn.Module, batch: Any) -> NoReturn:
        """Raises UsageError."""
        draw = f'ddpforge.load(RUN).model()("generator", torch.randn(16, {self.latent}))'
        raise UsageError(
            "task gan makes images out of noise, and has nothing to predict of those in the data",
            hints=[f"in Python `{draw}` makes some", "or write a `predict` in a task of your own"],
        )

    def check(self, model: nn.Module, data: Any) -> None:
        """Compares `latent` with the model's, where it has one."""
        if getattr(model, "latent", self.latent) != self.latent:
            raise ValueError(f"the model takes {model.latent} values of noise; set task.latent = {model.latent}")
