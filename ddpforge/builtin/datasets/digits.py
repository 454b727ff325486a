"""Handwritten digits that come with the package: real data for first runs and tests, without a download."""

from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

_FILE = Path(__file__).with_name("digits.csv.gz")
_TRAIN = 1437  # of 1,797: four fifths


class Digits:
    """1,797 grey images of 8 x 8 pixels: float32 [1, 8, 8] in [0, 1] with an int64 label 0 to 9, in memory.

    The first 1,437 of `numpy.random.RandomState(0).permutation(1797)`, a stream that numpy keeps frozen, are
    for training and the other 360 for testing. A batch is (images [B, 1, 8, 8], labels [B]).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, CC BY 4.0.
    """

    classes = 10
    random = False

    def __init__(
        self, *, split: Annotated[Literal["train", "test"], Field(description="Which part of the samples.")]
    ) -> None:
        table = np.loadtxt(_FILE, delimiter=",", dtype=np.uint8)  # 64 pixels from 0 to 16, then the label
        order = np.random.RandomState(0).permutation(len(table))
        part = torch.from_numpy(table[order[:_TRAIN] if split == "train" else order[_TRAIN:]])
        self.images = (part[:, :64].float() / 16).view(-1, 1, 8, 8)
        self.labels = part[:, 64].long()

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """The whole batch at once."""
        rows = torch.from_numpy(np.array(ids))  # three times as fast as torch.tensor(ids)
        return self.images.index_select(0, rows), self.labels.index_select(0, rows)

    def collate(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns its argument: `__getitems__` makes batches already."""
        return batch
