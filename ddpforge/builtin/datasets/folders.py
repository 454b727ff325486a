"""Datasets of a user's own files: folders of images, and tables of numbers."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.datasets.files import IMAGE_FORMATS, InBatches, library
from ddpforge.errors import SetupError, UsageError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["CSVTable", "ImageFolder"]

_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


class ImageFolder:
    """Images in a folder per class, `path/CLASS/image.jpg`: float32 [3, size, size] in [0, 1] before normalization.

    The label is int64, the number of the class in the sorted names of the folders. The shorter side of an image is
    resized to `size`, and the middle is cut out. Needs Pillow, not torchvision.

    Raises SetupError if there is no image, or Pillow is not installed.
    """

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="Folder with a folder for each class.")],
        size: Annotated[int, Field(ge=1, le=8192, description="Height and width of the images.")],
        flip: Annotated[bool, Field(description="Mirror half of the images, for training.")] = False,
        mean: Annotated[
            Sequence[float] | None, Field(description="Means of the three channels, subtracted from pixels in [0, 1].")
        ] = None,
        std: Annotated[
            Sequence[Annotated[float, Field(gt=0)]] | None,
            Field(description="Standard deviations of the three channels, which divide the result."),
        ] = None,
    ) -> None:
        library("PIL", "images")
        if any(values is not None and len(values) != 3 for values in (mean, std)):
            raise ValueError("mean: mean and std have three values, for red, green and blue")
        if not path.is_dir():
            raise SetupError(f"path: there is no folder {path}", hints=[f"looked in {Path.cwd()}"])
        self.class_names = sorted(one.name for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))
        self.files = [
            (file, label)
            for label, name in enumerate(self.class_names)
            for file in sorted((path / name).rglob("*"))
            if file.suffix.lower() in _SUFFIXES
        ]
        if not self.files:
            hints = [f"put images into {path}/CLASS/", f"their names end in {', '.join(_SUFFIXES)}"]
            raise SetupError(f"path: {path} has no folder with images", hints=hints)
        self.classes, self.labels = len(self.class_names), [label for _, label in self.files]
        self.size, self.flip, self.mean, self.std = size, flip, mean or (0.0,) * 3, std or (1.0,) * 3
        self.random, self.forkable = flip, True

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        import torch

        file, label = self.files[index]
        image = torch.from_numpy(self._pixels(file)).permute(2, 0, 1).float() / 255
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        return (image - mean) / std, label

    def _pixels(self, file: Path) -> NDArray[np.uint8]:
        import numpy as np
        from PIL import Image, ImageOps, UnidentifiedImageError

        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                return np.array(ImageOps.fit(image.convert("RGB"), (self.size, self.size)))
        except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UsageError(f"{file} is not an image that Pillow can read: {error}", key="path") from error


class CSVTable(InBatches):
    """Rows of a CSV file with a header: inputs float32 [columns], and a target.

    A target of text, or with `target_kind = "class"`, is an int64 class, the number of its value in sorted order;
    otherwise it is float32 [1].

    Raises:
        SetupError: The file does not exist.
        UsageError: A column is missing, or a cell is not a number. The message has the line.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="The CSV file; its first line has the names of the columns.")],
        target: Annotated[str, Field(min_length=1, description="Column of the target.")],
        inputs: Annotated[
            Sequence[str] | None, Field(min_length=1, description="Columns of the inputs; absent: all others.")
        ] = None,
        target_kind: Annotated[
            Literal["auto", "class", "number"], Field(description='"auto": a class if a value is not a number.')
        ] = "auto",
        delimiter: Annotated[str, Field(min_length=1, max_length=1, description="Character between columns.")] = ",",
    ) -> None:
        import torch

        if not path.is_file():
            raise SetupError(f"path: there is no file {path}", hints=[f"looked in {Path.cwd()}"])
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, delimiter=delimiter)
            names = next(reader, [])
            rows = [(reader.line_num, row) for row in reader if row]
        if twice := next((name for name in names if names.count(name) > 1), None):
            raise UsageError(
                f"{path}:1 has several columns {twice!r}", hints=["give each a name of its own"], key="path"
            )
        inputs = inputs or [name for name in names if name != target]
        if missing := [name for name in (target, *inputs) if name not in names]:
            key = "target" if missing[0] == target else "inputs"
            hints = [f"{path} has {', '.join(names)}"]
            raise UsageError(f"{key}: there is no column {missing[0]!r}", hints=hints, key=key)
        if wrong := next((line for line, row in rows if len(row) != len(names)), None):
            raise UsageError(f"{path}:{wrong} has another number of cells than the {len(names)} columns", key="path")

        def column(name: str, *, needed: bool = True) -> list[float] | None:
            place = names.index(name)
            found = []
            for line, row in rows:
                try:
                    found.append(float(row[place]))
                except ValueError:
                    if not needed:
                        return None
                    message = f"{path}:{line}: {row[place]!r} in column {name!r} is not a number"
                    hints = ["leave the column out of `inputs`, or write numbers"]
                    raise UsageError(message, hints=hints, key="inputs") from None
            return found

        self.inputs = torch.tensor([column(name) for name in inputs], dtype=torch.float32).T.contiguous()
        numbers = None if target_kind == "class" else column(target, needed=target_kind == "number")
        if numbers is not None:
            self.targets = torch.tensor(numbers, dtype=torch.float32)[:, None]
            return
        texts = [row[names.index(target)] for _, row in rows]
        self.class_names = sorted(set(texts), key=_in_order)
        self.classes = len(self.class_names)
        number = {name: place for place, name in enumerate(self.class_names)}
        self.targets = torch.tensor([number[text] for text in texts])

    @property
    def labels(self) -> Tensor:
        """Returns the targets, for samplers that balance classes."""
        return self.targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitems__(self, indices: Sequence[int]) -> Any:
        places = list(indices)
        return self.inputs[places], self.targets[places]


def _in_order(text: str) -> tuple[bool, float, str]:
    """Returns a sort key: numbers by value, then texts."""
    try:
        return False, float(text), text
    except ValueError:
        return True, 0.0, text
