"""Fingerprint of the samples that ranks read from a stream, compared over ranks in every step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError

__all__ = ["Fingerprint"]


class Fingerprint:
    """Fingerprint of the samples that a rank has read from a stream; data with a length has none."""

    def __init__(self) -> None:
        self._read = 0  # `read` of the newest micro-batch

    def note(self, micro: MicroBatch) -> None:
        """Records the newest micro-batch."""
        self._read = micro.read

    def noted(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields the same micro-batches, and records each."""
        for micro in micro_batches:
            self.note(micro)
            yield micro

    def totals(self) -> dict[str, float]:
        """Returns the totals to average over ranks; empty without a stream."""
        if not self._read:
            return {}
        # If all ranks agree, the mean of the squares is the square of the mean. Squares of 20-bit numbers add up
        # exactly in float64, on up to 8,192 ranks.
        return {"?read1": self._read, "?read2": self._read**2}

    def check_same(self, means: dict[str, float], *, step: int) -> None:
        """Removes the means of `totals` from `means`; raises PluginError if ranks have read different samples."""
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
