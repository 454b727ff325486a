"""Image datasets of torchvision by name, with a pipeline of its transforms (v2)."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from inspect import isclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.datasets.images import open_image, pixels
from ddpforge.errors import SetupError

if TYPE_CHECKING:
    from torch import Tensor
    from torch.utils.data import Dataset, TensorDataset
    from torchvision import datasets
    from torchvision.transforms import v2

_Name = Literal["CIFAR10", "CIFAR100", "MNIST", "FashionMNIST", "ImageFolder", "FakeData"]


def torchvision_dataset(
    *,
    name: Annotated[_Name, Field(description="Dataset of `torchvision.datasets`.")],
    split: Annotated[
        Literal["train", "val", "test"],
        Field(description='Split of the data; "val" only for ImageFolder.'),
    ],
    root: Annotated[
        Path | None,
        Field(description="Folder with the files; required for all datasets except FakeData."),
    ] = None,
    transforms: Annotated[
        Sequence[str | Mapping[str, Any]],
        Field(
            description="Transforms of `torchvision.transforms.v2` in order, by name or with options, e.g."
            ' ["RandomHorizontalFlip", { use = "RandomCrop", size = 32, padding = 4 }].'
        ),
    ] = (),
    mean: Annotated[
        Sequence[Annotated[float, Field(ge=-1e6, le=1e6)]],
        Field(description="Means per channel, subtracted from pixels in [0, 1]; requires `std`."),
    ] = (),
    std: Annotated[
        Sequence[Annotated[float, Field(gt=0, le=1e6)]],
        Field(description="Standard deviations per channel, which divide the result; requires `mean`."),
    ] = (),
    download: Annotated[
        bool, Field(description="Download missing files; only in a run of one process, and not for ImageFolder.")
    ] = False,
) -> Images:
    """Builds a dataset of labeled images: float32 [C, H, W] in [0, 1] before normalization, and an int64 label.

    The pipeline is ToImage, `transforms`, ToDtype(float32, scale), Normalize; it is tested on the first image.
    ImageFolder reads `root/<split>/<class>/<image>`. FakeData is 1,000 random images, 3 x 224 x 224, in 10 classes. The
    other datasets are in memory and, without transforms, fetched a batch at a time.

    Raises:
        SetupError: Files are missing.
        ValueError: Options contradict each other, a transform is unknown, or the pipeline does not return images.
    """
    from torch.utils.data import TensorDataset

    if bool(mean) != bool(std):
        raise ValueError("mean and std require each other: set both or neither")

    source, class_names = _open(name, split, root, download)
    prepared = pipeline(transforms, mean, std, source[0][0])
    in_memory = isinstance(source, TensorDataset)
    return (ImageBatches if in_memory and not transforms else Images)(source, class_names, prepared)


class Images:
    """Dataset of images and labels, fetched one at a time."""

    random = True  # transforms may be random
    forkable = True

    def __init__(self, source: Dataset[Any], class_names: Sequence[str], pipeline: v2.Compose) -> None:
        self.source, self.class_names, self.pipeline = source, class_names, pipeline
        self.classes = len(class_names)

    def __len__(self) -> int:
        return len(self.source)  # type: ignore[arg-type]  # Dataset does not declare its length

    @property
    def labels(self) -> Any:
        """Returns the class of every sample, for orders; FakeData has none."""
        from torch.utils.data import TensorDataset

        return self.source.tensors[1] if isinstance(self.source, TensorDataset) else self.source.targets  # type: ignore[attr-defined]

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        import torch

        image, label = self.source[index]
        return self.pipeline(image), torch.as_tensor(label)


class ImageBatches(Images):
    """Dataset of images in memory without transforms: a whole batch is read by indexing a tensor."""

    random = False

    def __getitems__(self, ids: list[int]) -> tuple[Tensor, Tensor]:
        """Returns images [B, C, H, W] and labels [B]."""
        import torch

        images, labels = self.source[torch.tensor(ids)]
        return self.pipeline(images), labels

    def collate(self, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """Returns its argument, because `__getitems__` already returns batches."""
        return batch


# ---------------------------------------------------------------------------------------------- files
def _open(name: str, split: str, root: Path | None, download: bool) -> tuple[Dataset[Any], list[str]]:
    """Opens a dataset; returns samples (uint8 or PIL image, label), and the names of the classes."""
    from torchvision import datasets

    if download and name in ("ImageFolder", "FakeData"):
        raise ValueError(f"{name} cannot be downloaded; remove `download`")
    if split == "val" and name != "ImageFolder":
        raise ValueError(f'{name} has no split "val"; it has "train" and "test"')

    if name == "FakeData":
        if root is not None:
            raise ValueError("FakeData is generated, not read; remove `root`")
        return datasets.FakeData(random_offset=0 if split == "train" else 10**6), [str(number) for number in range(10)]
    if root is None:
        raise ValueError(f"{name} needs `root`, the folder with its files")
    if name == "ImageFolder":
        return _image_folder(root, split)
    return _in_memory(name, split, root, download)


def _image_folder(root: Path, split: str) -> tuple[Dataset[Any], list[str]]:
    from torchvision import datasets

    try:
        source = datasets.ImageFolder(root / split, loader=_image)
        expected = datasets.folder.find_classes(root / "train")[0] if split != "train" else source.classes
    except FileNotFoundError as error:
        raise SetupError(
            f"ImageFolder cannot read {root.absolute()}: {error}",
            hints=[f"put images into {root}/{split}/<class>/, with a folder for every class of {root}/train"],
        ) from error

    # A label is the index of a folder among the sorted folders: a missing folder would shift the labels after it.
    if source.classes != expected:
        differing = sorted(set(source.classes) ^ set(expected))
        raise ValueError(f"{root}/{split} and {root}/train have different classes: {', '.join(differing[:5])}")
    return source, expected


def _image(path: str) -> Any:
    """Reads an image in one of the safe formats: a PIL image, or a tensor in [0, 1] of one with more than 8 bits."""
    image = open_image(Path(path), name=path, key="root")
    return pixels(image) if image.mode == "F" else image


def _in_memory(name: str, split: str, root: Path, download: bool) -> tuple[TensorDataset, list[str]]:
    import torch
    from torch.utils.data import TensorDataset

    data = _stored(name, split, root, download)
    images, labels = torch.as_tensor(data.data), torch.as_tensor(data.targets)
    images = images.unsqueeze(1) if images.ndim == 3 else images.permute(0, 3, 1, 2).contiguous()
    return TensorDataset(images, labels), list(data.classes)


def _stored(name: str, split: str, root: Path, download: bool) -> datasets.VisionDataset:
    """Opens torchvision's dataset, which checks its files; downloads missing files if requested.

    Raises SetupError if files are missing, damaged (CIFAR) or cannot be downloaded.
    """
    from torchvision import datasets

    dataset, train = getattr(datasets, name), split == "train"
    try:
        return dataset(root, train=train)
    except RuntimeError as error:
        alone = int(os.environ.get("WORLD_SIZE", "1")) == 1  # several processes would write the same files
        if not (download and alone):
            fetch = f"from torchvision.datasets import {name}; {name}({str(root)!r}, download=True)"
            raise SetupError(
                f"{name} is missing or incomplete in {root.absolute()}",
                hints=[
                    f'several processes cannot download at once; download it first: python -c "{fetch}"'
                    if download
                    else "download it in one process: --set data.train.download=true --set data.eval.download=true"
                ],
            ) from error

    try:
        return dataset(root, train=train, download=True)
    except (OSError, RuntimeError) as error:
        raise SetupError(f"{name} could not be downloaded to {root.absolute()}: {error}") from error


# ---------------------------------------------------------------------------------------------- transforms
def pipeline(
    transforms: Sequence[str | Mapping[str, Any]], mean: Sequence[float], std: Sequence[float], image: object
) -> v2.Compose:
    """Builds the pipeline and tests it on `image`; raises ValueError if it does not return an image."""
    import torch
    from torch import Tensor
    from torchvision.transforms import v2

    steps = [
        v2.ToImage(),
        *map(_transform, transforms),
        v2.ToDtype(torch.float32, scale=True),
        v2.ToPureTensor(),
    ]
    try:
        with torch.random.fork_rng(devices=[]):
            tried = v2.Compose(steps)(image)
    except Exception as error:
        raise ValueError(f"the transforms fail on the first image: {type(error).__name__}: {error}") from error

    if not isinstance(tried, Tensor) or tried.ndim != 3 or not tried.is_floating_point():
        raise ValueError(f"the transforms return {type(tried).__name__}, not one image [channels, height, width]")
    if mean and not len(mean) == len(std) == len(tried):
        raise ValueError(
            f"the images have {len(tried)} channels, but mean has {len(mean)} values and std has {len(std)} values"
        )
    return v2.Compose([*steps, v2.Normalize(mean, std)] if mean else steps)


@cache
def _known() -> dict[str, type[v2.Transform]]:
    from torchvision.transforms import v2

    return {
        name: value
        for name, value in vars(v2).items()
        if isclass(value) and issubclass(value, v2.Transform) and value.__module__ != v2.Compose.__module__
    }


def _transform(spec: str | Mapping[str, Any]) -> v2.Transform:
    options = {"use": spec} if isinstance(spec, str) else dict(spec)
    name = options.pop("use", None)
    if name not in _known():
        near = get_close_matches(str(name), _known(), n=1)
        raise ValueError(
            f"torchvision.transforms.v2 has no transform `{name}` that a recipe can name"
            + (f"; did you mean `{near[0]}`?" if near else "")
        )
    try:
        return _known()[name](**options)
    except (TypeError, ValueError) as error:
        raise ValueError(f"the transform {name} does not accept {options}: {error}") from error
