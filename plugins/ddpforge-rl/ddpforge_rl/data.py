"""Which episodes are played: seeds, dealt out like any samples."""

from typing import Annotated, Literal

import torch
from pydantic import Field
from torch import Tensor

__all__ = ["Episodes"]


class Episodes:
    """`count` episodes a pass, each of them a seed (int64), from which its start and its actions follow.

    ddpforge seeds torch's generator from the recipe's seed, the epoch and the sample before each, so no two epochs
    repeat an episode, and it does not matter which rank plays one. Those of "eval" are others than those of "train".
    """

    def __init__(
        self,
        *,
        split: Annotated[Literal["train", "eval"], Field(description="For training or for evaluation.")],
        count: Annotated[int, Field(ge=1, le=2**40, description="Episodes in an epoch.")] = 1024,
    ) -> None:
        self.split, self.count = split, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if not 0 <= index < self.count:
            raise IndexError(index)
        return torch.randint(2**31, (2,))[0 if self.split == "train" else 1]
