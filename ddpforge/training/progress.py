"""Position of a run: its step, samples and time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddpforge.checkpoint.schema import position_flaw
from ddpforge.checkpoint.state import CheckpointMetadata
from ddpforge.errors import CheckpointError

__all__ = ["Progress"]


@dataclass
class Progress:
    """Position of a run. With the recipe's seed it determines the data order and all random numbers."""

    step: int = 0
    samples: int = 0
    seconds: float = 0.0  # wall time, over all attempts
    nonfinite_steps: int = 0  # steps whose gradient was not finite
    skipped_steps: set[int] = field(default_factory=set)  # steps that rollbacks excluded from training

    def to_json(self) -> dict[str, Any]:
        """Returns the position as a checkpoint stores it, without step and samples."""
        return {"seconds": self.seconds, "skipped": self.nonfinite_steps, "left_out": sorted(self.skipped_steps)}

    @classmethod
    def of(cls, facts: CheckpointMetadata) -> Progress:
        """Returns the position at which a checkpoint was saved; raises CheckpointError if it is invalid."""
        stored: dict[str, Any] = dict(facts.position)
        flaw = position_flaw(stored)
        if flaw is None and stored.keys() != cls().to_json().keys():
            flaw = f"position has the keys {', '.join(map(str, stored)) or 'none'}"
        if flaw:
            raise CheckpointError(f"cannot resume from the checkpoint of step {facts.step}: {flaw}")
        return cls(
            facts.step,
            facts.samples,
            seconds=stored["seconds"],
            nonfinite_steps=stored["skipped"],
            skipped_steps=set(stored["left_out"]),
        )
