"""Sequences of bytes for a causal language model of Transformers: `{"input_ids", "labels"}`."""

from typing import Any

import torch
from torch.utils.data import Dataset


class RandomWalk(Dataset[dict[str, Any]]):
    """Sequences whose tokens go up or down by one: a little can be learned in a few steps."""

    def __init__(self, *, samples: int = 2048, length: int = 64, vocabulary: int = 256) -> None:
        self.samples, self.length, self.vocabulary = samples, length, vocabulary

    def __len__(self) -> int:
        """Returns the number of sequences."""
        return self.samples

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Returns a sequence; the same for the same index."""
        generator = torch.Generator().manual_seed(index)
        steps = torch.randint(0, 2, (self.length,), generator=generator) * 2 - 1
        tokens = (torch.randint(0, self.vocabulary, (1,), generator=generator) + steps.cumsum(0)) % self.vocabulary
        return {"input_ids": tokens, "labels": tokens}
