"""Handwritten digits, included in the package: real data for first runs and tests, without a download."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from ddpforge.builtin.datasets.files import InBatches

if TYPE_CHECKING:
    from torch import Tensor

_FILE = Path(__file__).with_name("digits.csv.gz")
_TRAIN = 1437  # of 1,797: four fifths
_LOOPS = (0, 6, 8, 9)


class Digits(InBatches):
    """Dataset of 1,797 gray images of 8 x 8 pixels in memory: float32 [1, 8, 8] in [0, 1], int64 label 0 to 9.

    The first 1,437 samples of `numpy.random.RandomState(0).permutation(1797)` are for training, the other 360 for
    testing; numpy guarantees that this permutation does not change. A batch is (images [B, 1, 8, 8], labels [B]).

    Source: E. Alpaydin and C. Kaynak, Optical Recognition of Handwritten Digits, UCI Machine Learning
    Repository, 1998, CC BY 4.0.
    """

    random = False

    def __init__(
        self,
        *,
        split: Annotated[Literal["train", "test"], Field(description="Split of the data.")],
        targets: Annotated[
            Literal["digit", "traits", "pixels"],
            Field(
                description='Target of a sample: its "digit"; "traits" [4]: 1 if the digit is odd, is prime, is more'
                ' than 4, has a loop; or "pixels" [8, 8]: the digit for each of its pixels, 10 for the background.'
            ),
        ] = "digit",
        samples: Annotated[
            int | None, Field(ge=1, le=_TRAIN, description="Only the first N samples of the split; absent: all.")
        ] = None,
    ) -> None:
        import numpy as np
        import torch

        table = np.loadtxt(_FILE, delimiter=",", dtype=np.uint8)  # 64 pixels from 0 to 16, then the label
        order = np.random.RandomState(0).permutation(len(table))
        part = torch.from_numpy(table[order[:_TRAIN] if split == "train" else order[_TRAIN:]][:samples])
        self.images = (part[:, :64].float() / 16).view(-1, 1, 8, 8)
        self.labels = self._targets(part[:, 64].long(), targets)
        self.classes = 11 if targets == "pixels" else 10

    def _targets(self, digits: Tensor, targets: str) -> Tensor:
        import torch

        if targets == "traits":
            prime, loop = (torch.isin(digits, torch.tensor(which)) for which in ((2, 3, 5, 7), _LOOPS))
            return torch.stack([digits % 2 == 1, prime, digits > 4, loop], dim=1).float()
        if targets == "pixels":
            return torch.where(self.images[:, 0] >= 0.5, digits[:, None, None], 10)
        return digits

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.images[index], self.labels[index]

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Returns the batch of these samples."""
        import numpy as np
        import torch

        rows = torch.from_numpy(np.array(ids))  # three times as fast as torch.tensor(ids)
        return self.images.index_select(0, rows), self.labels.index_select(0, rows)
