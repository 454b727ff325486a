"""Sampler that replays the samples of a recorded script, and a dataset of its inputs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import Field

from ddpforge.errors import UsageError
from ddpforge.interfaces import BatchSampler

__all__ = ["RecordedInputs", "Replay"]


class RecordedInputs:
    """Inputs of the model of a script without a DataLoader; a sample is a row of the inputs of a forward pass."""

    def __init__(
        self, *, file: Annotated[str, Field(description="File of torch.save with a list of samples.")]
    ) -> None:
        self._rows: list[Any] = torch.load(file, weights_only=True)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Any:
        return self._rows[index]


class Replay(BatchSampler):
    """Samples of a file, a list of indices for each step; epochs are as long as those of the other samplers."""

    def __init__(
        self,
        data: Any,
        global_batch: int,
        drop_last: bool,
        *,
        indices: Annotated[str, Field(description="JSON file with a list of indices for each step.")],
    ) -> None:
        full, rest = divmod(len(data), global_batch)
        self.steps_per_epoch = max(1, full + (rest > 0 and not drop_last))
        self._steps: list[list[int]] = json.loads(Path(indices).read_text())
        if (largest := max(map(max, self._steps))) >= len(data):
            raise UsageError(
                f"the script draws sample {largest}, but [data.train] has only {len(data)} samples",
                hints=["make [data.train] the dataset of the script's DataLoader"],
                key="data.train",
            )

    def __call__(self, step: int) -> Sequence[int]:
        """Returns the samples of a step. After the last one it repeats them, for batches that are fetched ahead."""
        return self._steps[min(step, len(self._steps) - 1)]
