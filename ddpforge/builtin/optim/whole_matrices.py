"""Muon for sharded weights."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Muon

__all__ = ["WholeMatrices"]


class WholeMatrices(Muon):
    """`torch.optim.Muon` that also supports sharded weights: it orthogonalizes the whole matrix."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all unsharded matrices together, then the sharded ones one after the other."""
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
        """Updates an all-gathered copy of the matrix with torch's step, and copies this rank's rows back."""
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
    """Returns the rows of `whole` that this rank has in `like`, as a DTensor; without communication."""
    mesh = like.device_mesh
    rows = -(-len(whole) // mesh.size(-1))
    mine = whole[mesh.get_local_rank(mesh.ndim - 1) * rows :][:rows].clone()
    return DTensor.from_local(mine, mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride())
