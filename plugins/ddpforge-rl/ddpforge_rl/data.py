"""Dataset of episodes: a sample is the seed of an episode."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

__all__ = ["Episodes"]


class Episodes:
    """Dataset of `count` episodes per epoch. A sample is a seed (int64) for the start of the episode and its actions.

    Before each sample ddpforge seeds torch's generator from the recipe's seed, the epoch and the sample's index. So
    epochs do not repeat episodes, and the rank does not matter. Seeds differ between the splits "train" and "eval".
    """

    def __init__(
        self,
        *,
        split: Annotated[Literal["train", "eval"], Field(description="Training or evaluation.")],
        count: Annotated[int, Field(ge=1, le=2**40, description="Episodes in an epoch.")] = 1024,
    ) -> None:
        self.split, self.count = split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.randint(2**31, (2,))[0 if self.split == "train" else 1]
