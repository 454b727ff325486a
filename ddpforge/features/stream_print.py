"""Iterable datasets: chooses their readers, and checks that all ranks read the same samples."""

from __future__ import annotations

from typing import Any, Self

from typing_extensions import override

from ddpforge.data import MicroBatch, is_stream
from ddpforge.data.fetching import Reader
from ddpforge.errors import PluginError
from ddpforge.features.shard_reader import ShardedStream, check_parts
from ddpforge.features.sources import ShardedSources
from ddpforge.features.streams import Stream, reject_loader
from ddpforge.interfaces import ShardedDataset
from ddpforge.training.features import Assembled, Feature

__all__ = ["Streams"]


class Streams(Feature):
    """Iterable datasets: their readers, and a fingerprint of the samples that a rank has read, which ranks compare."""

    _read = 0  # fingerprint of the samples up to the newest micro-batch; 0 if it comes from data with a length

    @staticmethod
    def reader(data: Any) -> Reader | None:
        """Returns the reader of an iterable dataset; raises PluginError for a loader, and for parts without sizes."""
        if is_stream(data):
            reject_loader(data)
        if isinstance(data, ShardedDataset):
            check_parts(data)
        if isinstance(data, ShardedDataset | ShardedSources):
            return ShardedStream
        return Stream if is_stream(data) else None

    @classmethod
    def of(cls, run: Assembled) -> Self | None:
        """Returns the feature if a dataset is a stream."""
        return cls() if any(map(is_stream, run.parts.data.values())) else None

    @override
    def after_draw(self, first: MicroBatch) -> None:
        self._read = first.read

    @override
    def totals(self) -> dict[str, float]:
        if not self._read:
            return {}
        # If all ranks agree, the mean of the squares is the square of the mean. Squares of 20-bit numbers add up
        # exactly in float64, on up to 8,192 ranks.
        return {"?read1": self._read, "?read2": self._read**2}

    def take(self, means: dict[str, float], step: int) -> None:
        """Raises PluginError if ranks have read different samples."""
        self._read = 0
        mean, square = means.pop("?read1", 0.0), means.pop("?read2", 0.0)
        if mean**2 != square:
            raise PluginError(
                f"ranks read different samples from the iterable dataset, by step {step}: some samples would be "
                "used twice and others never",
                hints=[
                    "it must yield the same samples in the same order on every rank: do not shard it by rank, and do "
                    "not order by set or hash",
                    "shuffle with the global generator of python, numpy or torch (seeded equally on all ranks before "
                    "each pass), or with one seeded from the epoch that `set_epoch` receives",
                ],
            )
