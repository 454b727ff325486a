"""Communication of activations between ranks that share layers; each backward pass is the adjoint operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from ddpforge.ranks.collectives import CollectiveRanks
from ddpforge.strategies.tensor.split_spec import share

__all__ = ["ActivationCollectives"]

Move = Callable[[Tensor], Tensor]


class _Move(torch.autograd.Function):
    """Collective `there` in forward, and its adjoint `back` in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Move, back: Move) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(gradient), None, None


class ActivationCollectives:
    """Operations of Shoeybi et al., "Megatron-LM" (2019), and along the sequence of Korthikanti et al. (2022).

    A "whole" tensor is equal on all ranks. The sum of "summands" over ranks is the whole tensor. A "slice" is a part
    of the whole tensor along one dimension.
    """

    def __init__(self, ranks: CollectiveRanks) -> None:
        self.ranks = ranks

    def enter(self, x: Tensor) -> Tensor:
        """Returns the whole tensor, for ranks that compute different shares from it: gradients are summed."""
        return self._moved(x, _same, self._sum)

    def leave(self, x: Tensor) -> Tensor:
        """Sums over ranks: summand → whole."""
        return self._moved(x, self._sum, _same)

    def cut(self, x: Tensor, dim: int) -> Tensor:
        """Returns this rank's slice: whole → slice."""
        return self._moved(x, partial(self._cut, dim=dim), partial(self._join, dim=dim, total=x.shape[dim]))

    def join(self, x: Tensor, dim: int, total: int) -> Tensor:
        """Gathers slices into a whole of length `total`, for ranks that all compute the same from it."""
        return self._moved(x, partial(self._join, dim=dim, total=total), partial(self._cut, dim=dim))

    def enter_cut(self, x: Tensor, dim: int) -> Tensor:
        """Gathers slices of equal length, for ranks that compute different shares from it: gradients are summed."""
        total = x.shape[dim] * self.ranks.size
        return self._moved(x, partial(self._join, dim=dim, total=total), partial(self._sum_cut, dim=dim))

    def leave_cut(self, x: Tensor, dim: int) -> Tensor:
        """Sums over ranks and returns this rank's slice: summand → slice; slices have equal length."""
        return self._moved(x, partial(self._sum_cut, dim=dim), partial(self._join, dim=dim, total=x.shape[dim]))

    def _moved(self, x: Tensor, there: Move, back: Move) -> Tensor:
        return cast(Tensor, _Move.apply(x, there, back))

    def _sum(self, x: Tensor) -> Tensor:
        return self.ranks.all_reduce_sum(x.contiguous())

    def _cut(self, x: Tensor, dim: int) -> Tensor:
        start, stop = share(x.shape[dim], self.ranks.rank, self.ranks.size)
        return x.narrow(dim, start, stop - start).contiguous()

    def _join(self, x: Tensor, dim: int, total: int) -> Tensor:
        each = -(-total // self.ranks.size)
        rows = x.movedim(dim, 0)
        if len(rows) < each:
            rows = torch.cat([rows, rows.new_zeros(each - len(rows), *rows.shape[1:])])
        return self.ranks.all_gather_equal(rows.contiguous())[:total].movedim(0, dim).contiguous()

    def _sum_cut(self, x: Tensor, dim: int) -> Tensor:
        return self.ranks.reduce_scatter_sum(x.movedim(dim, 0).contiguous()).movedim(0, dim).contiguous()


def _same(x: Tensor) -> Tensor:
    return x.view_as(x)
