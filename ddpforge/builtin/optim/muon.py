"""Muon optimizer for the matrices of hidden layers, which may be sharded."""

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
        float,
        Field(
            ge=1e-15, le=1000, examples=[0.01], description="Learning rate; the schedule multiplies it by its factor."
        ),
    ],
    momentum: Annotated[float, Field(ge=0, lt=1, description="Momentum factor.")] = 0.95,
    nesterov: Annotated[bool, Field(description="Nesterov's momentum.")] = True,
    weight_decay: Annotated[float, Field(ge=0, le=1000, description="Decoupled weight decay.")] = 0.1,
    ns_steps: Annotated[int, Field(ge=1, lt=100, description="Newton-Schulz iterations.")] = 5,
    adjust_lr: Annotated[
        Literal["original", "match_rms_adamw"],
        Field(description="Scaling of the rate by the matrix's shape; \"match_rms_adamw\" allows AdamW's rates."),
    ] = "original",
) -> Muon:
    """Returns `torch.optim.Muon` (Jordan, 2024), which orthogonalizes the momentum. `params` are parameter groups.

    Use it for the matrices of hidden layers, and another optimizer for all other parameters, including embeddings and
    the last layer. With sharded weights, each matrix is orthogonalized by one rank, and the ranks share this work.
    The result is the same as on one rank.

    Raises:
        ValueError: A parameter is not a matrix.
    """
    from ddpforge.builtin.optim.sharded_muon import ShardedMuon

    for group in params:
        for name, parameter in zip(group.get("names", ()), group["params"], strict=False):
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon is for matrices, but `{name}` has the shape {list(parameter.shape)}; "
                    'select the matrices with "2d"'
                )
    return ShardedMuon(
        params,
        lr=lr,
        weight_decay=weight_decay,
        momentum=momentum,
        nesterov=nesterov,
        ns_steps=ns_steps,
        adjust_lr_fn=adjust_lr,
    )
