"""The position of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpforge.checkpoint.contents import Facts
from ddpforge.checkpoint.schema import position_flaw
from ddpforge.errors import CheckpointError

__all__ = ["Progress"]


@dataclass
class Progress:
    """The position of a run. With the recipe's seed this is the whole state of data order and randomness."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # wall time, over all attempts
    skipped: int = 0  # steps whose gradient was not finite
    left_out: set[int] = field(default_factory=set)  # steps that a rollback decided not to train on

    def to_json(self) -> dict[str, Any]:
        """The position as a checkpoint stores it, beside step and samples."""
        return {"seconds": self.seconds, "skipped": self.skipped, "left_out": sorted(self.left_out)}

    @classmethod
    def of(cls, facts: Facts) -> Progress:
        """The position at which a checkpoint was saved; raises CheckpointError for one that no run has."""
        stored: dict[str, Any] = dict(facts.position)
        flaw = position_flaw(stored)
        if flaw is None and stored.keys() != cls().to_json().keys():
            flaw = f"position has the keys {', '.join(map(str, stored)) or 'none'}"
        if flaw:
            raise CheckpointError(f"the checkpoint of step {facts.step} cannot be resumed from: {flaw}")
        return cls(facts.step, facts.samples, left_out=set(stored.pop("left_out")), **stored)
