"""Knowledge distillation: classification with a teacher."""

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Batch, Classification
from ddpforge.builtin.tasks.forms import IgnoredClass, Metrics, one_tensor
from ddpforge.interfaces import AuxiliaryModule


class Distillation(Classification):
    """Classification with the true classes and the probabilities of a frozen teacher.

    The loss of a sample is `(1 - alpha)` times the cross-entropy of its class, plus `alpha * temperature²` times the
    divergence KL(teacher ‖ model). The probabilities of the divergence are computed from logits divided by
    `temperature`. Samples of the class `ignore_index` count in neither term. See Hinton et al., "Distilling the
    Knowledge in a Neural Network" (2015).
    """

    task_name = "distillation"

    def __init__(
        self,
        *,
        teacher: Annotated[nn.Module, Field(description="Model that returns logits of the same classes.")],
        weights: Annotated[
            str | None,
            Field(description="Weights of the teacher: a run, a checkpoint or a safetensors file; absent: initial."),
        ] = None,
        temperature: Annotated[float, Field(gt=0, le=1000, description="Divisor of the logits.")] = 4.0,
        alpha: Annotated[
            float, Field(ge=0, le=1, description="Weight of the teacher; the classes have 1 - alpha.")
        ] = 0.9,
        ignore_index: IgnoredClass = None,
        metrics: Metrics = (),
    ) -> None:
        super().__init__(ignore_index=ignore_index, metrics=metrics)
        self.teacher, self.weights = teacher, weights
        self.temperature, self.alpha = temperature, alpha

    def auxiliary_modules(self, model: nn.Module) -> Mapping[str, AuxiliaryModule]:
        """Returns the teacher."""
        return {"teacher": AuxiliaryModule(module=self.teacher, weights=self.weights)}

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        """Returns the weighted sum of both losses over the batch, and the model's logits."""
        true, logits = super().loss(model, batch)
        with torch.no_grad():
            wanted = one_tensor(self.teacher(batch[0]), "distillation")
        if wanted.shape != logits.shape:
            raise ValueError(
                f"the teacher returns {list(wanted.shape)} for a batch, but the model returns {list(logits.shape)}"
            )
        mine, theirs = (F.log_softmax(each.float() / self.temperature, dim=-1) for each in (logits, wanted))
        divergence = F.kl_div(mine, theirs, reduction="none", log_target=True)
        if self.ignore_index is not None:
            divergence = divergence.masked_fill((self.classes_of(batch) == self.ignore_index).unsqueeze(-1), 0)
        return (1 - self.alpha) * true + self.alpha * self.temperature**2 * divergence.sum(), logits
