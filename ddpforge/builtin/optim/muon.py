"""Muon, for hidden layers' matrices, which may be sharded."""

from typing import Annotated, Any, Literal

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

__all__ = ["WholeMatrices", "muon"]


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


class WholeMatrices(Muon):
    """torch's Muon, also for sharded weights: what is made orthogonal is the whole matrix."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates matrices that are whole at once, and those that are sharded one after the other."""
        groups = self.param_groups
        try:
            for group in groups:
                sharded = [p for p in group["params"] if isinstance(p, DTensor)]
                self.param_groups = [group | {"params": [p for p in group["params"] if not isinstance(p, DTensor)]}]
                super().step()  # type: ignore[no-untyped-call]
                for parameter in sharded:
                    if parameter.grad is not None:
                        self._step(parameter, group)
        finally:
            self.param_groups = groups

    def _step(self, parameter: DTensor, group: dict[str, Any]) -> None:
        """Lets torch's own step update a whole copy of the matrix, of which this rank's rows are taken back."""
        whole = nn.Parameter(parameter.full_tensor())
        whole.grad = _full(parameter.grad)
        state: Any = self.state
        kept = state.pop(parameter, {})
        state[whole] = {key: _full(value) for key, value in kept.items()}
        self.param_groups = [group | {"params": [whole]}]
        super().step()  # type: ignore[no-untyped-call]
        parameter.to_local().copy_(_rows(whole.detach(), parameter).to_local())
        state[parameter] = {key: _rows(value, parameter) for key, value in state.pop(whole).items()}


def _full(value: Any) -> Tensor:
    found: Tensor = value.full_tensor() if isinstance(value, DTensor) else value
    return found


def _rows(whole: Tensor, like: DTensor) -> DTensor:
    """The rows of `whole` that this rank has of `like`; without communication."""
    mesh = like.device_mesh
    rows = -(-len(whole) // mesh.size(-1))
    mine = whole[mesh.get_local_rank(mesh.ndim - 1) * rows :][:rows].clone()
    return DTensor.from_local(mine, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
