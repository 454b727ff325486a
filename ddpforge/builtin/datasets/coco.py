"""Images with boxes, annotated in COCO's JSON format."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from ddpforge.builtin.datasets.files import IMAGE_FORMATS, library
from ddpforge.errors import SetupError, UsageError

if TYPE_CHECKING:
    from torch import Tensor

log = logging.getLogger("ddpforge")

__all__ = ["CocoDetection"]


class CocoDetection:
    """Images float32 [3, H, W] in [0, 1] of different sizes, and targets, from annotations in COCO's format.

    A target is a dict: `boxes` float32 [n, 4] as x1, y1, x2, y2 in pixels; `labels` int64 [n] from 1, the number of the
    category in the order of its id, because 0 is the background; `area` float32 [n] and `iscrowd` int64 [n]. A batch is
    a list of images and a list of targets. Boxes without area are left out, with a warning. Needs Pillow, not
    torchvision.

    Raises:
        SetupError: The file, an image or Pillow is missing.
        UsageError: The file is not in COCO's format.
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
    ) -> None:
        library("PIL", "images")
        if not annotations.is_file():
            raise SetupError(f"annotations: there is no file {annotations}", hints=[f"looked in {Path.cwd()}"])
        self.folder, self.flip = images, flip
        try:
            found = json.loads(annotations.read_text(encoding="utf-8"))
            kinds = sorted(found["categories"], key=lambda one: one["id"])
            labels = {one["id"]: label for label, one in enumerate(kinds, start=1)}
            boxes: dict[Any, list[tuple[list[float], int, float, int]]] = {one["id"]: [] for one in found["images"]}
            flat = 0
            for one in found["annotations"]:
                x, y, width, height = map(float, one["bbox"])
                crowd = int(one.get("iscrowd", 0))
                if not (width > 0 and height > 0):
                    flat += 1
                elif crowds or not crowd:
                    area = float(one.get("area", width * height))
                    box = [x, y, x + width, y + height]
                    boxes[one["image_id"]].append((box, labels[one["category_id"]], area, crowd))
            self.files = [(str(one["file_name"]), boxes[one["id"]]) for one in found["images"]]
            self.class_names = ["background", *(str(one["name"]) for one in kinds)]
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UsageError(
                f"annotations: {annotations} is not in COCO's format: {type(error).__name__}: {error}",
                hints=['it has "images" (id, file_name), "categories" (id, name), "annotations" (image_id, bbox, …)'],
            ) from error
        if flat:
            log.warning("%s: %d boxes without area are left out", annotations, flat)
        if not self.files:
            raise SetupError(f"annotations: {annotations} has no images")
        if not (images / self.files[0][0]).is_file():
            raise SetupError(f"images: there is no file {images / self.files[0][0]}", hints=[f"looked in {Path.cwd()}"])
        self.classes = len(self.class_names)
        self.random, self.forkable = flip, True

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        import torch

        name, found = self.files[index]
        image = self._pixels(self.folder / name)
        target = {
            "boxes": torch.tensor([box for box, *_ in found]).reshape(-1, 4),
            "labels": torch.tensor([label for _, label, *_ in found], dtype=torch.int64),
            "area": torch.tensor([area for *_, area, _ in found]),
            "iscrowd": torch.tensor([crowd for *_, crowd in found], dtype=torch.int64),
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

    def _pixels(self, file: Path) -> Tensor:
        import numpy as np
        import torch
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(file, formats=IMAGE_FORMATS) as image:
                return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1).float() / 255
        except (OSError, SyntaxError, UnidentifiedImageError, Image.DecompressionBombError) as error:
            raise UsageError(f"{file} is not an image that Pillow can read: {error}", key="images") from error
