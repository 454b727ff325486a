"""Context parallelism: neighbouring ranks hold parts of the same sequences; attention gathers keys and values."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.bias import causal_lower_right

from ddpforge import compat
from ddpforge.compat import tree_map_only
from ddpforge.errors import UsageError
from ddpforge.interfaces import AttentionContext, Compute, ExpertDispatch, Pass, Ranks, Task, active_kind
from ddpforge.interfaces.seeds import mix
from ddpforge.ranks.collectives import CollectiveRanks
from ddpforge.strategies.fsdp.replica import FSDPReplica

__all__ = ["ContextParallel", "ContextReplica", "check_context", "check_length"]


class ContextParallel(AttentionContext):
    """This rank's part of every sequence: two of 2·N equal chunks over N ranks, one from the front, one from the back.

    See Li et al., "Sequence Parallelism" (2021), and the all-gather of keys and values in "The Llama 3 Herd of Models"
    (2024), section 3.3.2.
    """

    # Under a causal mask, a later position attends to more positions. With chunks r and 2·N - 1 - r, all ranks compute
    # the same amount.

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = cast(CollectiveRanks, ranks)
        self.size, self._front, self._back = ranks.size, ranks.rank, 2 * ranks.size - 1 - ranks.rank

    def give(self, model: nn.Module) -> None:
        """Sets this object as the `context` of all modules of a model that have a context."""
        for module in modules_with_context(model):
            module.context = self

    # -- calls of the model
    def length(self, tokens: int) -> int:
        """Returns the length of the whole sequence, over all ranks."""
        return self.size * tokens

    def positions(self, tokens: int, device: torch.device) -> Tensor:
        """Returns the positions of this rank's two chunks."""
        chunk = tokens // 2
        return torch.cat([torch.arange(n * chunk, (n + 1) * chunk, device=device) for n in (self._front, self._back)])

    def attention(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, dropout: float = 0.0) -> Tensor:
        """Computes attention of this rank's queries to the keys and values of all ranks, with one all-gather."""
        k, v = self._whole(torch.stack([k, v]))
        if not causal:
            return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout)
        front, back = q.chunk(2, dim=2)
        chunk = front.shape[2]
        mixed = []
        for queries, number in ((front, self._front), (back, self._back)):
            seen = (number + 1) * chunk
            with compat.without_modes():  # the mode that checks the first passes would convert the mask
                mask: Any = causal_lower_right(chunk, seen)
            keys, values = k[:, :, :seen], v[:, :, :seen]
            mixed.append(F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, dropout_p=dropout))
        return torch.cat(mixed, dim=2)

    def _whole(self, mine: Tensor) -> Tensor:
        """Gathers the chunks of all ranks, in sequence order: [2, B, heads, tokens, …] → [2, B, heads, T, …]."""
        ranks: Any = self._ranks.all_gather_equal_autograd(mine)
        ranks = ranks.unflatten(0, (self.size, 2))  # [ranks, keys and values, …]
        fronts, backs = ranks.unflatten(4, (2, -1)).unbind(4)
        return torch.cat([*fronts, *reversed(backs)], dim=3)

    # -- calls of the replica
    def local_batch(self, batch: Any) -> Any:
        """Returns this rank's positions of all tensors [B, T, …] in a batch; raises UsageError for other shapes."""
        lengths = set[int]()
        found = tree_map_only(Tensor, partial(self._own, lengths), batch)
        if len(lengths) > 1:
            raise UsageError(
                f"strategy.context = {self.size} cuts sequences, but a batch has tensors of {len(lengths)} lengths: "
                f"{', '.join(map(str, sorted(lengths)))}",
                hints=["give every tensor of a sample the same first dimension T"],
            )
        return found

    def _own(self, lengths: set[int], tensor: Tensor) -> Tensor:
        if tensor.ndim < 2:
            raise UsageError(
                f"strategy.context = {self.size} cuts sequences, but a batch has a tensor of shape "
                f"{list(tensor.shape)}, not [B, T, …]",
                hints=["remove strategy.context"],
            )
        lengths.add(length := tensor.shape[1])
        check_length(length, self.size)
        chunks = tensor.chunk(2 * self.size, dim=1)
        return torch.cat([chunks[self._front], chunks[self._back]], dim=1)

    def seed(self, one: Pass) -> None:
        """Seeds a pass differently on each rank that computes positions of the same sequences."""
        one.seed()
        if self._front:
            other = mix(torch.initial_seed(), self._front)
            torch.default_generator.manual_seed(other)
            if kind := active_kind():
                kind.seed(other, torch.device(kind.type, kind.current() or 0))


class ContextReplica(FSDPReplica):
    """Replica with shards of a model; this rank computes some positions of every sequence."""

    def __init__(self, cut: ContextParallel, *parts: Any) -> None:
        super().__init__(*parts)
        self._cut = cut

    def local_batch(self, batch: Any) -> Any:
        """Returns this rank's positions."""
        return self._cut.local_batch(batch)

    def run_microbatches(
        self, passes: Iterable[Pass], compute: Compute, *, trains: bool
    ) -> Iterator[tuple[Tensor, Any] | None]:
        """Runs the passes with the loss of this rank's positions times the number of `context` ranks."""
        # Each of these ranks divides by the items of whole sequences, and gradients are averaged over them.

        def share(module: nn.Module, one: Pass) -> tuple[Tensor, Any]:
            loss, outputs = compute(module, one)
            return loss * self._cut.size, outputs

        apart = (replace(one, seed=partial(self._cut.seed, one)) for one in passes)
        return super().run_microbatches(apart, share, trains=trains)


# ---------------------------------------------------------------------------------------------- checks
def modules_with_context(model: nn.Module) -> list[Any]:
    """Returns the modules of a model that have a `context`."""
    return [module for module in model.modules() if isinstance(getattr(module, "context", None), AttentionContext)]


def check_context(size: int, model: nn.Module, task: Task) -> None:
    """Raises UsageError if the model or the task does not allow sequences to be cut over `size` ranks."""
    if not modules_with_context(model):
        raise UsageError(
            f"strategy.context = {size} cuts sequences over ranks, but the attention of {type(model).__name__} does "
            "not support that",
            hints=[
                "give the modules that compute attention or positions a "
                "`context = ddpforge.interfaces.AttentionContext()`, "
                "and use its methods, as the built-in gpt does",
                "or remove strategy.context",
            ],
        )
    if any(isinstance(getattr(module, "experts", None), ExpertDispatch) for module in model.modules()):
        raise UsageError(
            f"strategy.context = {size} cuts sequences over ranks, but the experts of {type(model).__name__} need "
            "whole sequences",
            hints=["remove strategy.context"],
        )
    if not task.by_position:
        raise UsageError(
            f"strategy.context = {size} cuts sequences over ranks, but {type(task).__name__} does not declare that its "
            "loss is a sum over positions",
            hints=["set `by_position = True` on the task if it is", "or remove strategy.context"],
        )


def check_length(length: int, size: int) -> None:
    """Raises UsageError if a sequence cannot be cut into two equal chunks per rank."""
    if length % (2 * size):
        multiple = 2 * size * max(1, round(length / (2 * size)))
        raise UsageError(
            f"strategy.context = {size} cuts a sequence into {2 * size} chunks, which does not divide its length, "
            f"{length}",
            hints=[f"give sequences {multiple} tokens, or another multiple of {2 * size}"],
        )
