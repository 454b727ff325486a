"""Datasets made of another dataset: two random views of each image, a part of the samples."""

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


class Part:
    """A part of another dataset: a share of its samples in a fixed random order, or with `rest` all others.

    Two tables with the same `of` and `share`, one with `rest`, divide a dataset into training and evaluation data, the
    same in every run, for every `train.seed`, and on any ranks. Attributes are those of the dataset; a list, array or
    tensor with one value per sample, such as `labels`, has the values of the part.
    """

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset with a length, not a stream.")],
        share: Annotated[str, Field(pattern=r"^\d+(\.\d+)?%$", description='Share of the samples, e.g. "90%".')],
        rest: Annotated[bool, Field(description="Take the samples that are not in the share.")] = False,
        shuffle: Annotated[
            bool, Field(description="Draw the share at random; otherwise take the first samples.")
        ] = True,
        seed: Annotated[int, Field(ge=0, lt=2**32, description="Another seed gives another random share.")] = 0,
    ) -> None:
        import numpy as np

        if not (hasattr(of, "__len__") and hasattr(of, "__getitem__")):
            raise ValueError(f"of: {type(of).__name__} is a stream, which has no parts; use other files for evaluation")
        self.data: Any = of
        count, fraction = len(self.data), float(share[:-1]) / 100
        taken = round(count * fraction)
        order = np.random.default_rng(seed).permutation(count) if shuffle else np.arange(count)
        self.places = np.sort(order[taken:] if rest else order[:taken])
        if not len(self.places):
            whose = f"the rest of {share}" if rest else share
            raise ValueError(f"share: {whose} of {count} samples has no sample")

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> Any:
        return self.data[int(self.places[index])]

    def __getattr__(self, name: str) -> Any:
        if name in ("data", "places"):  # while the object is unpickled in a loader process
            raise AttributeError(name)
        found = getattr(self.data, name)
        if name == "__getitems__":
            return lambda ids: found([int(self.places[index]) for index in ids])
        if callable(found) or isinstance(found, str | bytes) or not hasattr(found, "__len__"):
            return found
        if len(found) != len(self.data):
            return found
        return [found[place] for place in self.places] if isinstance(found, list | tuple) else found[self.places]
