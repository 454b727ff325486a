"""Muon for sharded weights: each matrix is orthogonalized by one rank, its owner."""

from collections.abc import Sequence
from math import sqrt
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.optim import Muon

__all__ = ["ShardedMuon"]


class ShardedMuon(Muon):
    """`torch.optim.Muon` that also supports weights whose rows are sharded. The results have the same bits.

    Each rank updates its own rows of the momentum and of the weights. Only the orthogonalization needs whole matrices,
    in bfloat16, as torch computes it. The ranks share this work: of each N matrices on N ranks, every rank receives the
    rows of one, orthogonalizes it, and returns to each rank its rows.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates unsharded matrices with torch's step, and then the sharded ones together."""
        groups = self.param_groups
        try:
            for group in groups:
                self.param_groups = [group | {"params": [p for p in group["params"] if not isinstance(p, DTensor)]}]
                super().step()  # type: ignore[no-untyped-call]
        finally:
            self.param_groups = groups
        sharded = [
            (group, parameter)
            for group in groups
            for parameter in group["params"]
            if isinstance(parameter, DTensor) and parameter.grad is not None
        ]
        # Equal matrices are neighbours, so that the owners of one batch have the same amount of work.
        sharded.sort(key=lambda one: tuple(one[1].shape), reverse=True)
        for mesh in {parameter.device_mesh: None for _, parameter in sharded}:
            here = [one for one in sharded if one[1].device_mesh == mesh]
            for start in range(0, len(here), mesh.size()):
                batch = here[start : start + mesh.size()]
                _update([(group, parameter, self._direction(parameter, group)) for group, parameter in batch], mesh)

    def _direction(self, parameter: DTensor, group: dict[str, Any]) -> Tensor:
        """Updates this rank's rows of the momentum, and returns its rows of the matrix to orthogonalize."""
        state, sharded = self.state[parameter], parameter.grad
        assert isinstance(sharded, DTensor)
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(sharded)
        gradient, momentum = (value.to_local() for value in (sharded, state["momentum_buffer"]))
        momentum.lerp_(gradient, 1 - group["momentum"])
        rows: Tensor = gradient.lerp(momentum, group["momentum"]) if group["nesterov"] else momentum
        return rows.to(parameter.device_mesh.device_type, torch.bfloat16)  # also if the weights are on the host


def _update(batch: Sequence[tuple[dict[str, Any], DTensor, Tensor]], mesh: DeviceMesh) -> None:
    """Updates at most one matrix for each rank of `mesh`, whose last dimension is that of the shards.

    Replicas divide the batch: each computes the results of its part, and sends them to the others.
    """
    size = mesh.size(-1)
    parts = [batch[start : start + size] for start in range(0, len(batch), size)]
    rows = [torch.cat([direction.flatten() for *_, direction in part]) for part in parts]
    replica = mesh.get_local_rank(0) if mesh.ndim > 1 else 0
    if replica < len(parts):
        _orthogonalize_part(parts[replica], rows[replica], mesh)
    for at, part in enumerate(parts):
        if mesh.ndim > 1:
            dist.broadcast(rows[at], group=mesh.get_group(0), group_src=at)
        updates = torch.split(rows[at], [direction.numel() for *_, direction in part])
        for (group, parameter, direction), update in zip(part, updates, strict=True):
            weight = parameter.to_local()
            weight.mul_(1 - group["lr"] * group["weight_decay"])
            rate = group["lr"] * _factor(group["adjust_lr_fn"], *parameter.shape)
            weight.add_(update.view_as(direction).to(weight.device), alpha=-rate)


def _orthogonalize_part(part: Sequence[tuple[dict[str, Any], DTensor, Tensor]], rows: Tensor, mesh: DeviceMesh) -> None:
    """Replaces each matrix of `part` by the orthogonalized one: of the ranks that share shards, rank i owns matrix i.

    Args:
        rows: bfloat16, flat: this rank's rows of the first matrix, then those of the second, and so on.
    """
    ranks, size, rank = mesh.get_group(-1), mesh.size(-1), mesh.get_local_rank(mesh.ndim - 1)
    mine = [direction.numel() for *_, direction in part] + [0] * (size - len(part))
    shape = part[rank][1].shape if rank < len(part) else torch.Size((0, 0))
    each = -(-shape[0] // size)  # rows of a shard; the last shards may have fewer
    theirs = [len(range(shape[0])[at * each :][:each]) * shape[1] for at in range(size)]
    whole = rows.new_empty(shape)
    dist.all_to_all_single(whole.flatten(), rows, theirs, mine, group=ranks)
    if rank < len(part):
        group = part[rank][0]
        whole = _orthogonalized(whole, group["ns_coefficients"], group["ns_steps"], group["eps"])
    dist.all_to_all_single(rows, whole.flatten(), mine, theirs, group=ranks)


def _orthogonalized(matrix: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float) -> Tensor:
    """Returns the matrix with singular values near 1, by the Newton-Schulz iteration of Jordan (2024).

    The order of operations is that of torch.optim.Muon, so that the results have the same bits.
    """
    tall = matrix.size(0) > matrix.size(1)
    found = matrix.T if tall else matrix
    found = found / found.norm().clamp(min=eps)
    linear, cubic, quintic = coefficients
    for _ in range(steps):
        gram = found @ found.T
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=cubic, alpha=quintic), found, beta=linear)
    return found.T if tall else found


def _factor(kind: str | None, rows: int, columns: int) -> float:
    """Returns the factor of the learning rate for a matrix of this shape."""
    return 0.2 * sqrt(max(rows, columns)) if kind == "match_rms_adamw" else sqrt(max(1, rows / columns))
