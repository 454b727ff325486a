"""Trains on a few batches again and again: if a model cannot learn even these, something is wrong in it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from ddpforge.api import Batches, Dealt, restored_backend_flags
from ddpforge.errors import Diverged, StoppedBeforeStart
from ddpforge.ranks import process_exit
from ddpforge.tools.trials.ephemeral_run import RepeatedBatches, open_ephemeral, without_the_rest

__all__ = ["Overfitted", "overfit"]

_LINES = 10  # lines of losses
_LEARNT, _HALF = 0.1, 0.5  # shares of the first loss


@dataclass(frozen=True)
class Overfitted:
    """Training loss after each step, on `batches` global batches."""

    batches: int
    losses: Sequence[float]
    is_rank_zero: bool

    @property
    def share(self) -> float:
        """Returns the mean of the last losses, one per batch, divided by the mean of the first ones."""
        first, last = self.losses[: self.batches], self.losses[-self.batches :]
        return (sum(last) / len(last)) / (sum(first) / len(first))

    def as_dict(self) -> dict[str, Any]:
        """Returns the result for JSON; a loss that is not finite becomes null."""
        losses = [loss if math.isfinite(loss) else None for loss in self.losses]
        return {"batches": self.batches, "losses": losses, "share": self.share if math.isfinite(self.share) else None}

    def lines(self) -> Iterator[str]:
        """Yields the result as lines of text, with a verdict."""
        batches = "batch" if self.batches == 1 else f"{self.batches} batches"
        yield f"{len(self.losses)} steps on the first {batches}; nothing was kept"
        every = max(1, len(self.losses) // _LINES)
        for step in sorted({*range(1, len(self.losses) + 1, every), len(self.losses)}):
            yield f"  step {step:>6,}  loss {self.losses[step - 1]:.4g}"
        yield f"  {self._verdict()}"

    def _verdict(self) -> str:
        if not math.isfinite(self.share):
            return "the loss is not finite: lower optimizer.lr, and look at the samples with `ddpforge data show`"
        if self.share <= _LEARNT:
            return "learnt: model, loss and optimizer work together"
        if self.share <= _HALF:
            return "still learning: try more steps (--dry-run 1000), or another optimizer.lr"
        return (
            "hardly learnt: look at the samples and their targets with `ddpforge data show`, try another optimizer.lr, "
            "and check whether dropout, weight decay or augmentation prevent it"
        )


@process_exit.forbid_sys_exit()
@restored_backend_flags()
def overfit(source: str | Path, batches: int, *, steps: int = 200, sets: Sequence[str] = ()) -> Overfitted:
    """Trains `steps` steps on the first `batches` global batches of a recipe; called on every rank.

    The learning rate is constant, as in the recipe. Schedule, callbacks and evaluations are skipped, and samples are
    fetched once. Raises ForgeError as a run does.
    """

    def change(dealt: Dealt) -> Dealt:
        alone = without_the_rest(dealt, lambda step: 1.0)
        return replace(alone, training=cast(Batches, RepeatedBatches(dealt.training, batches)))

    losses: list[float] = []
    with open_ephemeral(source, sets=[*sets, "track.every=1st"], change=change) as trial:
        trial.trainer.end = steps
        try:
            losses += (info.metrics["train/loss"] for info in trial.steps(steps))
        except Diverged:
            losses.append(math.nan)
    if not losses:
        raise StoppedBeforeStart("a stop was requested before the first step", hints=["a trial keeps nothing"])
    return Overfitted(batches, losses, trial.world.is_rank_zero)
