"""Datasets of a user's own files: folders of images, and tables of numbers."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.datasets.csv_rows import Rows, is_number, not_a_number, numbers
from ddpforge.builtin.datasets.files import ClassNames, InBatches, Labeled, unknown_class
from ddpforge.builtin.datasets.images import open_image, pixels
from ddpforge.builtin.datasets.listing import BINARY, LeftOut, files_below, is_leftover
from ddpforge.errors import SetupError, UsageError, library, not_there

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CSVTable", "ImageFolder"]

_LARGEST = 3.4028234e38  # of float32
_SPLITS = {"train", "training", "test", "testing", "val", "valid", "validation", "dev", "eval"}
_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".ppm")


class ImageFolder:
    """Images in a folder per class, `path/CLASS/image.jpg`: float32 [3, size, size] in [0, 1] before normalization.

    The label is int64, the number of the class in `class_names`, by default the sorted names of the folders. Images are
    turned as their EXIF orientation requires. The shorter side of an image is resized to `size`, and the middle is cut
    out. Needs Pillow, not torchvision.

    Raises SetupError if there is no image, or Pillow is not installed; UsageError for a class that is not in
    `class_names`, and for a file that is not an image.
    """

    target_kind = "class"

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
        class_names: ClassNames = None,
        labeled: Labeled = True,
    ) -> None:
        library("PIL", "images")
        if any(values is not None and len(values) != 3 for values in (mean, std)):
            raise ValueError("mean: mean and std have three values, for red, green and blue")
        if mean and max(map(abs, mean)) > 1 and (not std or max(std) > 1):
            raise ValueError("mean: mean and std are of pixels in [0, 1]: divide them by 255")
        if not path.is_dir():
            raise SetupError(
                f"path: there is no folder {path}",
                hints=["unpack it first"] if path.suffix in BINARY and path.is_file() else not_there(path),
            )
        self.labeled, left = labeled, LeftOut(path)
        own = _class_folders(path, left) if labeled else []
        if own and _SPLITS.issuperset(one.lower() for one in own):
            raise UsageError(
                f"path: the folders of {path} are splits, not classes: {', '.join(own)}",
                hints=[f'name one for each dataset: path = "{path / own[0]}"'],
                key="path",
            )
        self.class_names = list(class_names or own)
        number = {name: place for place, name in enumerate(self.class_names)}
        if unknown := next((name for name in own if name not in number), None):
            raise UsageError(f"{path / unknown}: {unknown_class(unknown, self.class_names)}", key="path")
        folders = [(path / name, number[name]) for name in own] or [(path, 0)] * (not labeled)
        self.files = [(file, label) for folder, label in folders for file in files_below(folder, _SUFFIXES, left=left)]
        left.warn()
        empty = set(own) - {self.class_names[label] for _, label in self.files if own}
        if self.files and empty and not class_names:
            raise UsageError(
                f"path: {path / min(empty)} has no image, so its class could not be learned",
                hints=["put images into it, or remove the folder", "or set `class_names`, if it is meant"],
                key="path",
            )
        if not self.files:
            hints = [f"put images into {path}/{'CLASS/' * labeled}", f"their names end in {', '.join(_SUFFIXES)}"]
            if labeled and files_below(path, _SUFFIXES, left=LeftOut(path), deep=False):
                hints.append("images without classes can be predicted: labeled = false")
            raise SetupError(f"path: {path} has no folder with images", hints=hints)
        self.classes = len(self.class_names) or None
        self.size, self.flip, self.mean, self.std = size, flip, mean or (0.0,) * 3, std or (1.0,) * 3
        self.random, self.forkable = flip, True

    @property
    def labels(self) -> list[int]:
        """Returns the class of each image; raises AttributeError without classes."""
        if not self.labeled:
            raise AttributeError("labels")
        return [label for _, label in self.files]

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> Any:
        import torch
        from PIL import ImageOps

        file, label = self.files[index]
        image = pixels(ImageOps.fit(open_image(file, name=file, key="path"), (self.size, self.size)))
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (self.mean, self.std))
        image = (image - mean) / std
        return (image, label) if self.labeled else image


def _class_folders(path: Path, left: LeftOut) -> list[str]:
    """Returns the names of the folders of classes, sorted; all else directly in `path` is left out."""
    folders = []
    for entry in path.iterdir():
        if is_leftover(entry.name):
            left.add("hidden or left behind by a program", entry)
        elif entry.is_dir():
            folders.append(entry.name)
        else:
            left.add("not in the folder of a class", entry)
    return sorted(folders)


class CSVTable(InBatches):
    """Rows of a CSV file with a header: inputs float32 [columns], and a target.

    A target of text, or with `target_kind = "class"`, is an int64 class, the number of its value in `class_names`,
    which are by default its sorted values; otherwise it is float32 [1]. A column with numbers and other values is
    refused, unless `target_kind` sets its meaning. The file is read row by row, so that memory holds the numbers only.

    Raises:
        SetupError: The file does not exist.
        UsageError: The file is not CSV in UTF-8, a column is missing, a cell is not a finite number, or a class is not
            in `class_names`. The message has the line, the column and the value.
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
            Literal["auto", "class", "number"],
            Field(description='"auto": numbers if all values are numbers, classes if none is.'),
        ] = "auto",
        delimiter: Annotated[
            str, Field(min_length=1, max_length=1, description='Character between columns, e.g. ";" or "\\t".')
        ] = ",",
        class_names: ClassNames = None,
        labeled: Labeled = True,
    ) -> None:
        import numpy as np
        import torch

        rows = Rows.of(path, delimiter)
        self.input_names = list(inputs or [name for name in rows.names if name != target])
        if not inputs and any(not name.strip() for name in self.input_names):
            raise UsageError(
                f"inputs: a column of {path}:1 has no name, such as the row numbers that pandas writes",
                hints=["write the file without them: to_csv(…, index=False)", "or set `inputs` to the columns to use"],
                key="inputs",
            )
        if target in self.input_names:
            raise UsageError(f"inputs: {target!r} is the target: the model would be given the answer", key="inputs")
        aim = rows.place(target, "target") if labeled else None
        places = [rows.place(name, "inputs") for name in self.input_names]
        if not places:
            raise UsageError(f"inputs: {path} has no column besides the target {target!r}", key="inputs")
        values, lines, cells = array("f"), array("q"), dict[str, str]()
        targets: list[str] = []
        for line, row in rows.read(places if aim is None else [*places, aim]):
            found = numbers(chosen := [row[place] for place in places])
            if found is None:
                place = next(n for n, cell in enumerate(chosen) if numbers([cell]) is None)
                hints = ["fill the cell in, remove the row, or leave the column out of `inputs`"]
                raise not_a_number(rows, line, places[place], chosen[place], key="inputs", hints=hints)
            values.extend(found)
            lines.append(line)
            if aim is not None:
                targets.append(cells.setdefault(row[aim], row[aim]))  # equal texts are kept once
        if not lines:
            raise UsageError(f"{path} has a header and no rows", key="path")
        self.inputs = torch.from_numpy(np.frombuffer(values, dtype=np.float32).copy()).view(len(lines), len(places))
        if not self.inputs.isfinite().all():
            row, number = self.inputs.isfinite().logical_not().nonzero()[0].tolist()
            cell = next(cells[places[number]] for line, cells in rows.read(places) if line == lines[row])
            raise not_a_number(rows, lines[row], places[number], cell, key="inputs", hints=["scale the column"])
        self.targets: Tensor | None = None
        self.target_kind = "class" if class_names else target_kind
        if class_names:
            self.class_names, self.classes = list(class_names), len(class_names)
        if aim is not None:
            self._read_targets(_Targets(rows, aim, lines, targets), class_names)

    def _read_targets(self, targets: _Targets, class_names: Sequence[str] | None) -> None:
        import torch

        if self.target_kind == "auto":
            self.target_kind = targets.kind()
        if self.target_kind == "number":
            self.targets = torch.tensor(targets.numbers(), dtype=torch.float32)[:, None]
            return
        self.class_names = list(class_names or targets.names())
        self.classes = len(self.class_names)
        self.targets = torch.tensor(targets.classes(self.class_names))

    @property
    def labels(self) -> Tensor:
        """Returns the targets, for samplers that balance classes; raises AttributeError without targets."""
        if self.targets is None:
            raise AttributeError("labels")
        return self.targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> Any:
        return self.inputs[index] if self.targets is None else (self.inputs[index], self.targets[index])

    def __getitems__(self, indices: Sequence[int]) -> Any:
        places = list(indices)
        return self.inputs[places] if self.targets is None else (self.inputs[places], self.targets[places])


@dataclass(frozen=True)
class _Targets:
    """Texts in the column of the targets."""

    rows: Rows
    place: int
    lines: Sequence[int]
    texts: Sequence[str]

    def kind(self) -> Literal["number", "class"]:
        """Returns "number" if all texts are numbers, "class" if none is; raises UsageError for a mixture."""
        number = {text: is_number(text) for text in set(self.texts)}
        if all(number.values()):
            return "number"
        if not any(number.values()):
            return "class"
        count = sum(number[text] for text in self.texts)
        odd = next(n for n, text in enumerate(self.texts) if not number[text])
        raise self._not_a_number(
            odd,
            f"{count:,} of {len(self.texts):,} values of the column are numbers: mend or remove the row",
            'or set target_kind = "class", if each value is the name of a class',
        )

    def numbers(self) -> list[float]:
        """Returns the numbers; raises UsageError for a text that is none, or too large for float32."""
        found = []
        for n, text in enumerate(self.texts):
            value = numbers([text])
            if value is None or abs(value[0]) > _LARGEST:
                raise self._not_a_number(n, 'fill it in, remove the row, or set target_kind = "class" for classes')
            found += value
        return found

    def names(self) -> list[str]:
        """Returns the names of the classes in order; raises UsageError for two that differ only in how they look."""
        names = sorted(set(self.texts), key=_in_order)
        alike: dict[object, str] = {}
        for name in names:
            same = float(name) if is_number(name) else name.strip()
            if (other := alike.setdefault(same, name)) != name:
                raise UsageError(
                    f"{self._at(self.texts.index(name))} is {name!r}, and another row has {other!r}: they would be two "
                    "classes",
                    hints=["write them the same way"],
                    key="target",
                )
        return names

    def classes(self, names: Sequence[str]) -> list[int]:
        """Returns the class numbers; raises UsageError for a text that is not in `names`, or empty."""
        number = {name: place for place, name in enumerate(names)}
        for n, text in enumerate(self.texts):
            if not text.strip():
                hints = ["fill it in or remove the row", "samples without a class can only be predicted"]
                raise UsageError(f"{self._at(n)} is empty, not the name of a class", hints=hints, key="target")
            if text not in number:
                raise UsageError(f"{self._at(n)} is {text[:60]!r}: {unknown_class(text, names)}", key="target")
        return [number[text] for text in self.texts]

    def _at(self, n: int) -> str:
        return f"{self.rows.path}:{self.lines[n]}: the cell in column {self.rows.names[self.place]!r}"

    def _not_a_number(self, n: int, *hints: str) -> UsageError:
        return not_a_number(self.rows, self.lines[n], self.place, self.texts[n], key="target", hints=hints)


def _in_order(text: str) -> tuple[bool, float, str]:
    """Returns a sort key: numbers by value, then texts."""
    return (False, float(text), text) if is_number(text) else (True, 0.0, text)
