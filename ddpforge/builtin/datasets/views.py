"""Dataset of two random views of each image of another dataset."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Data

if TYPE_CHECKING:
    from torch import Tensor


class TwoViews:
    """Two views of each image of the dataset `of`: randomly shifted, with added noise.

    The first element of each sample must be an image [C, H, W]. The random numbers depend only on the recipe's seed,
    the epoch and the sample, as for all data.
    """

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset of images.")],
        shift: Annotated[int, Field(ge=0, le=1000, description="Maximum shift in each direction, in pixels.")] = 1,
        noise: Annotated[float, Field(ge=0, le=100, description="Standard deviation of the added noise.")] = 0.1,
    ) -> None:
        self.data: Any = of
        self.shift, self.noise = shift, noise
        self.forkable = getattr(of, "forkable", False)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image = self.data[index][0]
        return self._view(image), self._view(image)

    def _view(self, image: Tensor) -> Tensor:
        import torch
        import torch.nn.functional as F

        height, width = image.shape[-2:]
        top, left = torch.randint(2 * self.shift + 1, (2,)).tolist()
        moved = F.pad(image, (self.shift,) * 4)[..., top : top + height, left : left + width]
        return moved + self.noise * torch.randn(moved.shape)
