"""Datasets made of another dataset: two random views of each image, mixed samples, a part of the samples."""

from __future__ import annotations

import inspect
import math
import random
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.interfaces import Data, class_names_of

if TYPE_CHECKING:
    from torch import Tensor


class _Derived:
    """Other samples of a dataset, in its order: attributes and methods are those of the dataset, such as `labels`."""

    data: Any
    random = True

    def __getattr__(self, name: str) -> Any:
        # Samples have another form than the dataset's own, which it collates or fetches together.
        if name.startswith("__") or name in ("data", "collate"):
            raise AttributeError(f"{type(self).__name__} has no attribute {name}")
        return getattr(self.data, name)


class TwoViews(_Derived):
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
        self.class_names = class_names_of(of)
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


_Alpha = Annotated[float, Field(ge=0, le=1000)]


class Mixed(_Derived):
    """Samples of the dataset `of`, each mixed with another one by mixup or CutMix.

    A sample (image, class) becomes (image, probabilities of the classes). Mixup (Zhang et al., 2018) adds two images
    with the weights m and 1 - m. CutMix (Yun et al., 2019) fills a rectangle of 1 - m of the area from the other image.
    The number m has a Beta(alpha, alpha) distribution. The task `classification` takes these targets. The random
    numbers depend only on the recipe's seed, the epoch and the sample, so that results do not depend on batches and
    ranks. Each sample fetches two.
    """

    def __init__(
        self,
        *,
        of: Annotated[Data, Field(description="Dataset of pairs (image [C, H, W], class).")],
        mixup_alpha: Annotated[_Alpha, Field(description="Alpha of mixup; 0: no mixup.")] = 0.2,
        cutmix_alpha: Annotated[_Alpha, Field(description="Alpha of CutMix; 0: no CutMix.")] = 0.0,
        switch_prob: Annotated[
            float, Field(ge=0, le=1, description="Probability of CutMix for a mixed sample, if both are on.")
        ] = 0.5,
        prob: Annotated[float, Field(gt=0, le=1, description="Probability that a sample is mixed.")] = 1.0,
        classes: Annotated[
            int | None, Field(ge=2, le=2**24, description="Number of classes; absent: that of the dataset.")
        ] = None,
    ) -> None:
        if not (mixup_alpha or cutmix_alpha):
            raise ValueError("mixup_alpha and cutmix_alpha are 0, so nothing would be mixed; set one of them")
        if not (hasattr(of, "__len__") and hasattr(of, "__getitem__")):
            raise ValueError(f"of: {type(of).__name__} is a stream, which cannot be mixed")
        self.data: Any = of
        self.class_names = class_names_of(of)
        self.mixup_alpha, self.cutmix_alpha, self.prob = mixup_alpha, cutmix_alpha, prob
        self.switch_prob = 0.0 if not cutmix_alpha else 1.0 if not mixup_alpha else switch_prob
        self.classes = classes or len(self.class_names) or getattr(of, "classes", None)
        if self.classes is None:
            raise ValueError(f"classes: {type(of).__name__} has no attribute `classes`; set the number")
        self.forkable = getattr(of, "forkable", False)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        image, label = self.data[index]
        target = self._one_hot(label)
        if random.random() >= self.prob:
            return image, target
        cut = random.random() < self.switch_prob
        kept = random.betavariate(alpha := self.cutmix_alpha if cut else self.mixup_alpha, alpha)
        other, other_label = self.data[random.randrange(len(self.data))]
        self._check(image, other)
        if cut:
            image, kept = _with_rectangle(image, other, kept)
        else:
            image = kept * image + (1 - kept) * other
        return image, kept * target + (1 - kept) * self._one_hot(other_label)

    def _check(self, image: Any, other: Any) -> None:
        from torch import Tensor

        if not (isinstance(image, Tensor) and image.is_floating_point()):
            kind = str(image.dtype) if isinstance(image, Tensor) else type(image).__name__
            raise ValueError(f"only float tensors can be mixed, but {type(self.data).__name__} gives {kind}")
        if other.shape != image.shape:
            raise ValueError(f"images of the shapes {list(image.shape)} and {list(other.shape)} cannot be mixed")

    def _one_hot(self, label: Any) -> Tensor:
        import torch

        number = int(label)
        if not 0 <= number < (self.classes or 0):
            raise ValueError(f"a sample has the class {number}, but there are {self.classes} classes")
        return torch.zeros(self.classes or 0).index_fill_(0, torch.tensor(number), 1.0)


def _with_rectangle(image: Tensor, other: Tensor, kept: float) -> tuple[Tensor, float]:
    """Returns `image` [C, H, W] with a random rectangle of `other`, and the share of `image` that is left.

    The rectangle has 1 - `kept` of the area, without its part outside of the image, as in the paper.
    """
    height, width = image.shape[-2:]
    ratio = 0.5 * math.sqrt(1 - kept)
    y, x = random.randrange(height), random.randrange(width)
    half_height, half_width = int(ratio * height), int(ratio * width)
    rows = slice(max(0, y - half_height), min(height, y + half_height))
    columns = slice(max(0, x - half_width), min(width, x + half_width))
    mixed = image.clone()
    mixed[..., rows, columns] = other[..., rows, columns]
    area = (rows.stop - rows.start) * (columns.stop - columns.start)
    return mixed, 1 - area / (height * width)


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
        self.class_names = class_names_of(of)  # not one value per sample, even if there are as many
        count, fraction = len(self.data), float(share[:-1]) / 100
        if not 0 < fraction <= 1:
            raise ValueError(f"share: {share} is not more than 0% and at most 100%")
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
        if inspect.ismethod(found):
            return partial(self._call, name)  # can be sent to loader processes
        return found if callable(found) or name == "input_names" else self._of_part(found)

    def _call(self, name: str, *given: Any, **named: Any) -> Any:
        found = getattr(self.data, name)(*given, **named)
        return found if given or named else self._of_part(found)

    def _of_part(self, found: Any) -> Any:
        """Returns the values of the part, if `found` has one value per sample of the dataset; else `found` itself."""
        if isinstance(found, str | bytes | Mapping) or not hasattr(found, "__len__") or len(found) != len(self.data):
            return found
        if isinstance(found, list | tuple):
            return [found[place] for place in self.places]
        return found[self.places] if hasattr(found, "__getitem__") else found
