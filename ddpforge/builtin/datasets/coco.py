"""Images with boxes, annotated in COCO's JSON format."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.datasets.files import ClassNames, unknown_class
from ddpforge.builtin.datasets.images import open_image, pixels
from ddpforge.errors import SetupError, UsageError, library, not_there

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("ddpforge")

__all__ = ["CocoDetection"]

_BACKGROUND = "background"
_FORM = 'it has "images" (id, file_name), "categories" (id, name), "annotations" (image_id, bbox, …)'
_SLACK = 1.0  # pixels that a box may go beyond its image by rounding


@dataclass(frozen=True)
class _Box:
    """Box x1, y1, x2, y2 in pixels, with the id of its annotation."""

    id: Any
    corners: tuple[float, float, float, float]
    label: int
    area: float
    crowd: int

    def beyond(self, width: float, height: float) -> float:
        """Returns the number of pixels that the box goes beyond an image; infinity if it is outside of it."""
        left, top, right, bottom = self.corners
        if left >= width or top >= height or right <= 0 or bottom <= 0:
            return math.inf
        return max(-left, -top, right - width, bottom - height, 0.0)


@dataclass(frozen=True)
class _Picture:
    """File of an image, its boxes, and its size if the annotations have it."""

    file: str
    size: tuple[int, int] | None  # width, height
    boxes: Sequence[_Box]


class CocoDetection:
    """Images float32 [3, H, W] in [0, 1] of different sizes, and targets, from annotations in COCO's format.

    A target is a dict: `boxes` float32 [n, 4] as x1, y1, x2, y2 in pixels; `labels` int64 [n] from 1, the number of the
    category's name in `class_names`, by default in the order of its id, because 0 is the background; `area` float32 [n]
    and `iscrowd` int64 [n]. A batch is a list of images and a list of targets. Boxes without area are left out, with a
    warning. Needs Pillow, not torchvision.

    An image is turned as its EXIF orientation requires, unless its `width` and `height` in the annotations are those
    before it is turned: its boxes are then, too.

    Raises:
        SetupError: The file, an image or Pillow is missing.
        UsageError: The file is not in COCO's format, a box is not finite or outside of its image, an image has another
            size than its annotations, a file is outside of the folder, or a category is not in `class_names`. The
            message has the id.
    """

    def __init__(
        self,
        *,
        annotations: Annotated[Path, Field(description='JSON file, e.g. "instances_train2017.json".')],
        images: Annotated[Path, Field(description="Folder of the images that the file names.")],
        crowds: Annotated[
            bool, Field(description="Keep boxes around crowds (`iscrowd`), which mean average precision ignores.")
        ] = False,
        flip: Annotated[bool, Field(description="Mirror half of the images and their boxes, for training.")] = False,
        class_names: ClassNames = None,
    ) -> None:
        library("PIL", "images")
        if not annotations.is_file():
            raise SetupError(f"annotations: there is no file {annotations}", hints=not_there(annotations))
        self.folder, self.flip = images, flip
        try:
            text = annotations.read_text(encoding="utf-8-sig")
            if not text.strip():
                raise UsageError(f"annotations: {annotations} is empty", hints=[f"a file in COCO's format: {_FORM}"])
            found = json.loads(text)
            reader = _Annotations(annotations, found, class_names)
            self.class_names, self.files = reader.names, reader.pictures(crowds)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
            lacks = isinstance(error, KeyError)
            why = f"an entry has no {error.args[0]!r}" if lacks else f"{type(error).__name__}: {error}"
            raise UsageError(f"annotations: {annotations} is not in COCO's format: {why}", hints=[_FORM]) from error
        if not self.files:
            raise SetupError(f"annotations: {annotations} has no images")
        first = images / self.files[0].file
        if not first.is_file():
            raise SetupError(f"images: there is no file {first}", hints=not_there(first))
        self.classes = len(self.class_names)
        self.random, self.forkable = flip, True

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        import torch

        picture = self.files[index]
        image, found = self._pixels(picture), picture.boxes
        target = {
            "boxes": torch.tensor([box.corners for box in found]).reshape(-1, 4),
            "labels": torch.tensor([box.label for box in found], dtype=torch.int64),
            "area": torch.tensor([box.area for box in found]),
            "iscrowd": torch.tensor([box.crowd for box in found], dtype=torch.int64),
        }
        if self.flip and torch.rand(()) < 0.5:
            image = image.flip(2)
            left, top, right, bottom = target["boxes"].unbind(1)
            target["boxes"] = torch.stack([image.shape[2] - right, top, image.shape[2] - left, bottom], dim=1)
        return image, target

    def collate(self, samples: Sequence[tuple[Tensor, Mapping[str, Tensor]]]) -> tuple[list[Tensor], list[Any]]:
        """Returns the list of images and the list of targets."""
        images, targets = zip(*samples, strict=True)
        return [*images], [*targets]

    def _pixels(self, picture: _Picture) -> Tensor:
        """Reads an image; raises UsageError if its size is not that of the annotations, or a box is outside."""
        file = self.folder / picture.file
        image = open_image(file, name=file, key="images")
        if picture.size and image.size != picture.size:
            stored = open_image(file, name=file, key="images", upright=False)
            if stored.size != picture.size:
                raise UsageError(
                    f"{file} has {image.width} x {image.height} pixels, but its annotations are for "
                    f"{picture.size[0]} x {picture.size[1]}, so its boxes do not fit",
                    hints=["use the images that were annotated, or scale the boxes"],
                    key="images",
                )
            image = stored
        for box in picture.boxes if picture.size is None else ():
            if box.beyond(*image.size) == math.inf:
                raise _outside(self.folder / picture.file, box, image.size)
        return pixels(image)


class _Annotations:
    """Content of a file in COCO's format. Raises KeyError, TypeError and ValueError for missing or wrong entries."""

    def __init__(self, file: Path, content: Any, class_names: Sequence[str] | None) -> None:
        self.file, self.content = file, content
        for name in ("images", "categories", "annotations"):
            if not isinstance(content, dict) or not isinstance(content.get(name), list):
                raise self._error(f'is not in COCO\'s format: it has no list "{name}"', _FORM)
        kinds = sorted(content["categories"], key=lambda one: one["id"])
        own = [str(one["name"]) for one in kinds]
        for values, what in ((own, "name"), ([one["id"] for one in kinds], "id")):
            if twice := [value for place, value in enumerate(values) if value in values[:place]]:
                raise self._error(f"has two categories with the {what} {twice[0]!r}", "give each its own")
        self.names = list(class_names or [_BACKGROUND, *own])
        if self.names[0] != _BACKGROUND:
            raise UsageError(
                f"class_names begins with `{self.names[0]}`, but the class 0 of detection is the background",
                hints=[f'write "{_BACKGROUND}" first'],
                key="class_names",
            )
        number = {name: place for place, name in enumerate(self.names) if place}
        if unknown := [name for name in own if name not in number]:
            raise self._error(f"has a category that is not known: {unknown_class(unknown[0], self.names[1:])}")
        self.labels = {one["id"]: number[name] for one, name in zip(kinds, own, strict=True)}

    def pictures(self, crowds: bool) -> list[_Picture]:
        """Returns the images with their boxes; logs warnings for boxes that are left out, or go beyond their image."""
        boxes: dict[Any, list[_Box]] = {}
        for one in self.content["images"]:
            if one["id"] in boxes:
                raise self._error(f"has two images with the id {one['id']}", "give each its own")
            boxes[one["id"]] = []
        flat = []
        for one in self.content["annotations"]:
            box = self._box(one)
            if box is None:
                flat.append(one.get("id"))
            elif one["image_id"] not in boxes:
                what = f"annotation {one.get('id')} has the image_id {one['image_id']!r}, which no image has"
                raise self._error(what)
            elif crowds or not box.crowd:
                boxes[one["image_id"]].append(box)
        if flat:
            which = f" (annotation {flat[0]}{', …' * (len(flat) > 1)})" if flat[0] is not None else ""
            log.warning("%s: %d boxes without area are left out%s", self.file, len(flat), which)
        found = [_Picture(self._file(one), _size(one), boxes[one["id"]]) for one in self.content["images"]]
        self._check_sizes(found)
        return found

    def _box(self, one: Mapping[str, Any]) -> _Box | None:
        """Returns the box of an annotation; None if it has no area."""
        what = f"annotation {one.get('id', 'without id')}"
        if not isinstance(one.get("bbox"), list) or len(one["bbox"]) != 4:
            raise self._error(f"{what} has the bbox {one.get('bbox')!r}", "a box is [x, y, width, height]")
        x, y, width, height = values = tuple(map(float, one["bbox"]))
        area, crowd = float(one.get("area", width * height)), int(one.get("iscrowd", 0))
        if not all(map(math.isfinite, (*values, area))):
            raise self._error(f"{what} has the box {[*values]} and the area {area:g}, which are not finite")
        if width < 0 or height < 0:
            raise self._error(f"{what} has a box of negative size: {[*values]}", "a box is x, y, width, height")
        if one["category_id"] not in self.labels:
            raise self._error(f"{what} has the category_id {one['category_id']!r}, which no category has")
        label = self.labels[one["category_id"]]
        return _Box(one.get("id"), (x, y, x + width, y + height), label, area, crowd) if width and height else None

    def _file(self, one: Mapping[str, Any]) -> str:
        """Returns the file of an image; raises UsageError if it is outside of the folder."""
        name = str(one["file_name"])
        away = PurePosixPath(name).is_absolute() or PureWindowsPath(name).drive or ".." in PurePosixPath(name).parts
        if away or "\0" in name:
            raise self._error(
                f"image {one['id']} has the file_name {name!r}, which is outside of the folder `images`",
                "write names relative to that folder",
            )
        return name

    def _check_sizes(self, pictures: Sequence[_Picture]) -> None:
        """Raises UsageError for a box outside of its image; logs a warning for boxes that are partly outside."""
        beyond = []
        for picture in pictures:
            for box in picture.boxes if picture.size else ():
                far = box.beyond(*picture.size) if picture.size else 0.0
                if far == math.inf:
                    raise _outside(picture.file, box, picture.size)
                if far > _SLACK:
                    beyond.append(f"annotation {box.id} of {picture.file}")
        sizes = [max(box.corners) for picture in pictures for box in picture.boxes]
        if not sizes:
            log.warning("%s: no image has a box", self.file)
        elif max(sizes) <= 1:
            log.warning("%s: all boxes are within one pixel: COCO's boxes are in pixels, not from 0 to 1", self.file)
        if beyond:
            log.warning("%s: %d boxes go beyond their image, first %s", self.file, len(beyond), beyond[0])

    def _error(self, what: str, *hints: str) -> UsageError:
        return UsageError(f"annotations: {self.file}: {what}", hints=list(hints), key="annotations")


def _size(one: Mapping[str, Any]) -> tuple[int, int] | None:
    """Returns width and height of an image; None if the annotations lack them, or have 0."""
    width, height = one.get("width"), one.get("height")
    return (int(width), int(height)) if width and height else None


def _outside(file: object, box: _Box, size: Any) -> UsageError:
    return UsageError(
        f"annotation {box.id} has the box {[round(value, 3) for value in box.corners]} (x1, y1, x2, y2), outside of "
        f"{file} with {size[0]} x {size[1]} pixels",
        hints=["mend or remove the annotation"],
        key="annotations",
    )
