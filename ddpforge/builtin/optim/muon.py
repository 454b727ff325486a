"""Muon, for hidden layers' matrices, which may be sharded."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

if TYPE_CHECKING:
    from torch.optim import Muon

__all__ = ["muon"]


def muon(
    params: list[dict[str, Any]],
    *,
    lr: Annotated[
        float, Field(ge=1e-15, le=1000, description="Learning rate; the schedule multiplies it by its factor.")
    ],
    momentum: Annotated[float, Field(ge=0, lt=1, description="Momentum factor.")] = 0.95,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum.")] = True,
    weight_decay: Annotated[float, Field(ge=0, le=1000, description="Decoupled weight decay.")] = 0.1,
    ns_steps: Annotated[int, Field(ge=1, lt=100, description="Newton-Schulz iterations.")] = 5,
    adjust_lr: Annotated[
        Literal["original", "match_rms_adamw"],
        Field(description="How the rate depends on a matrix's shape; \"match_rms_adamw\" takes rates like AdamW's."),
    ] = "original",
) -> Muon:
    """torch's Muon (Jordan, 2024): updates are momentum, made orthogonal. `params` are parameter groups.

    For the matrices of hidden layers; use another optimizer for all else, embeddings and the last layer too. Under a
    strategy that shards weights, each rank gathers a matrix, its gradient and its momentum, computes the update of the
    whole and keeps its own rows: the same numbers as on one rank. Raises ValueError for what is no matrix.
    """
    from ddpforge.builtin.optim.whole_matrices import WholeMatrices

    for group in params:
        for name, parameter in zip(group.get("names", ()), group["params"], strict=False):
            if parameter.ndim != 2:
                raise ValueError(
                    f'Muon is for matrices, and `{name}` has the shape {list(parameter.shape)}; choose them by "2d"'
                )
    return WholeMatrices(
        params,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr,
    )
