"""Finds out, while ranks talk anyway, whether they have read the same samples from a stream."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ddpforge.data import MicroBatch
from ddpforge.errors import PluginError

__all__ = ["Fingerprint"]


class Fingerprint:
    """A fingerprint of what one rank has read from a stream, to compare with others; data with a length has none."""

    def __init__(self) -> None:
        self._read = 0  # what the newest micro-batch says has been read

    def note(self, micro: MicroBatch) -> None:
        """Takes note of the newest micro-batch."""
        self._read = micro.read

    def noted(self, micro_batches: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """The same micro-batches, of which each is noted when it is taken."""
        for micro in micro_batches:
            self.note(micro)
            yield micro

    def totals(self) -> dict[str, float]:
        """The totals to average over ranks: the mean of squares is the square of the mean if all agree.

        Squares of 20 bits add up exactly in float64, on up to 8,192 ranks.
        """
        if not self._read:
            return {}
        return {"?read1": self._read, "?read2": self._read**2}

    def refuse_another(self, means: dict[str, float], *, step: int) -> None:
        """Takes the means of `totals` out of `means`; raises PluginError where ranks have read different samples."""
        mean, square = means.pop("?read1", 0.0), means.pop("?read2", 0.0)
        if mean**2 != square:
            raise PluginError(
                f"ranks read different samples from the iterable dataset, by step {step}: some would be "
                "used twice and others never",
                hints=[
                    "it must yield the same samples in the same order on every rank: do not shard it by rank, and do "
                    "not order by set or hash",
                    "shuffle with python's, numpy's or torch's own generator (seeded alike before each pass), or one "
                    "seeded from the epoch that `set_epoch` is told",
                ],
            )
