"""Micro-batches of at most a number of tokens: divides the samples of a step by their lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ddpforge.data import is_stream
from ddpforge.errors import UsageError
from ddpforge.interfaces.columns import numbers
from ddpforge.training.features import Feature
from ddpforge.training.stages import Chosen

__all__ = ["MicroBatchesByTokens", "TokenLimit"]

Places = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class TokenLimit:
    """Limit of the tokens of a micro-batch with padding: its number of samples times the length of the longest.

    `lengths` has the number of tokens of every sample, int64.
    """

    max_tokens: int
    lengths: Places

    @classmethod
    def of(cls, data: Any, by: str, max_tokens: int) -> TokenLimit:
        """Reads the lengths of the samples: from the attribute or method `by` of `data`, or from the file `by`.

        Raises UsageError without one length of 1 or more per sample, and for samples longer than `max_tokens`.
        """
        lengths = np.ceil(numbers(data, by, least=1, option="data.lengths")).astype(np.int64)
        if (longer := np.flatnonzero(lengths > max_tokens)).size:
            raise UsageError(
                f"train.max_tokens is {max_tokens}, but sample {longer[0]} has {lengths[longer[0]]} tokens; samples "
                f"that are too long: {longer.size} of {len(lengths)}",
                hints=[f"set train.max_tokens = {lengths.max()} or more, or cut the samples in the dataset"],
                key="train.max_tokens",
            )
        return cls(max_tokens, lengths)

    def divide(self, ids: NDArray[Any], mine: range, shards: int, *, most: int) -> list[tuple[Places, int]]:
        """Returns the micro-batches of a step with the samples `ids`: places in the step, and their number.

        Only those of the shards `mine`, of `shards` shards; each has at most `most` samples. The samples are sorted by
        length and divided into as few micro-batches as fit, the same number for every shard. At each turn the
        micro-batches of all shards have similar sizes. If samples are too few, a micro-batch has the shortest sample as
        padding, and the number 0.
        """
        # The same number, because with a sharded model each forward pass is collective.
        lengths = self.lengths[ids]
        order = np.argsort(-lengths, kind="stable")
        groups = self._filled(order, lengths, most)
        while len(groups) % shards:
            largest = max(range(len(groups)), key=lambda one: _padded(lengths, groups[one]) * (len(groups[one]) > 1))
            half = len(groups[largest]) // 2  # 0 if all groups have one sample: a group without samples is added
            groups[largest : largest + 1] = [groups[largest][half:], groups[largest][:half]]
        groups.sort(key=lambda group: -_padded(lengths, group))
        found = []
        for shard in mine:
            for turn in range(len(groups) // shards):
                # Every second turn goes backwards, so that no shard always has the largest.
                group = groups[turn * shards + (shard if turn % 2 == 0 else shards - 1 - shard)]
                found.append((group, len(group)) if len(group) else (order[-1:], 0))
        return found

    def _filled(self, order: Places, lengths: Places, samples: int) -> list[Places]:
        """Cuts `order`, places by falling length, into groups of at most `samples` samples that are as full as fits."""
        groups, start = [], 0
        while start < len(order):
            size = min(self.max_tokens // int(lengths[order[start]]), samples)
            groups.append(order[start : start + size])
            start += size
        return groups


def _padded(lengths: Places, group: Places) -> int:
    return len(group) * int(lengths[group[0]]) if len(group) else 0


class MicroBatchesByTokens(Feature):
    """Micro-batches of at most `train.max_tokens` tokens."""

    @staticmethod
    def divider(chosen: Chosen, data: Any) -> TokenLimit | None:
        """Returns the limit of tokens that the recipe sets; raises UsageError if lengths of samples are not known."""
        recipe = chosen.recipe
        if recipe.train.max_tokens is None:
            return None
        if is_stream(data):
            raise UsageError(
                f"train.max_tokens needs the length of every sample in advance, but {type(data).__name__} is an "
                "iterable dataset",
                hints=["use a dataset with __len__ and __getitem__", "or set train.micro_batch instead"],
                key="train.max_tokens",
            )
        return TokenLimit.of(data, recipe.data.lengths or "lengths", recipe.train.max_tokens)
