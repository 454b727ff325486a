"""Contrastive learning: InfoNCE over all samples of a step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

from pydantic import Field

from ddpforge.builtin.tasks.forms import one_tensor, pair, parts_of
from ddpforge.interfaces import Task, Total, World

if TYPE_CHECKING:
    from torch import Tensor, nn

Batch: TypeAlias = "tuple[Tensor, Tensor]"


class Contrastive(Task):
    """InfoNCE loss: each view must identify the other view of its sample among the samples of a step on all ranks.

    A batch is two views (first [B, ...], second [B, ...]). The model embeds both: [2 B, ...] → [2 B, D]. The loss is
    the mean of both directions, as in CLIP. `accuracy` is the fraction of first views that identify their second view.
    van den Oord et al. 2018, arXiv:1807.03748.
    """

    whole_batch = True

    def __init__(
        self,
        *,
        temperature: Annotated[float, Field(gt=0, le=100, description="Divisor of similarities.")] = 0.1,
    ) -> None:
        self.temperature = temperature

    def start(self, model: nn.Module, world: World) -> None:
        """Stores the data-parallel process group."""
        self._ranks = world.dp_ranks

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Returns the summed loss of this rank's samples, and the similarities of first views with their targets."""
        import torch
        import torch.nn.functional as F

        first, second = pair(batch, "contrastive", "(one view, another view)")
        embedded = F.normalize(one_tensor(model(torch.cat([first, second])), "contrastive").float(), dim=-1)
        views = torch.stack(embedded.chunk(2), dim=1)
        everyones, begin = self._ranks.all_gather(views)

        similar = [views[:, i] @ everyones[:, 1 - i].T / self.temperature for i in (0, 1)]
        places = torch.arange(begin, begin + len(views), device=views.device)
        there, back = (F.cross_entropy(one, places, reduction="sum") for one in similar)
        return (there + back) / 2, (similar[0], places)

    def predict(self, model: nn.Module, batch: Any) -> Mapping[str, Tensor]:
        """Returns the `embedding` [D] of the first view, normalized to length 1."""
        import torch.nn.functional as F

        first, _ = parts_of(batch)
        return {"embedding": F.normalize(one_tensor(model(first), "contrastive").float(), dim=-1)}

    def metrics(self, outputs: tuple[Tensor, Tensor], batch: Batch) -> Mapping[str, Total]:
        """Returns the fraction of first views that identify their second view."""
        similar, places = outputs
        return {"accuracy": Total((similar.argmax(dim=-1) == places).sum(), len(places))}
