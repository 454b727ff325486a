"""Draws pictures with their labels on one sheet."""

from __future__ import annotations

import math
from pathlib import Path

from PIL import Image, ImageDraw
from torch import Tensor

from ddpforge.errors import UsageError
from ddpforge.tools.trials.samples import BatchImages

__all__ = ["draw", "scaled"]

_LEAST = 64  # minimum width and height of a picture on the sheet, in pixels
_GAP, _LINE = 4, 14  # pixels between pictures, and height of a label


def draw(path: Path, pictures: BatchImages) -> None:
    """Writes the sheet in the format of the file's suffix; raises UsageError if it cannot be written."""
    images, _ = scaled(pictures.images)
    number, _, height, width = images.shape
    factor = max(1, math.ceil(_LEAST / min(height, width)))
    columns = math.ceil(math.sqrt(number))
    across, down = width * factor + _GAP, height * factor + _GAP + (_LINE if pictures.labels else 0)
    sheet = Image.new("RGB", (columns * across + _GAP, math.ceil(number / columns) * down + _GAP), "white")
    pen = ImageDraw.Draw(sheet)
    for index, image in enumerate(images):
        left, top = _GAP + index % columns * across, _GAP + index // columns * down
        sheet.paste(_picture(image).resize((width * factor, height * factor), Image.Resampling.NEAREST), (left, top))
        if pictures.labels:
            pen.text((left, top + height * factor), pictures.labels[index], fill="black")
    try:
        sheet.save(path)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot write {path}: {error}", hints=["e.g. -o sheet.png"]) from error


def scaled(images: Tensor) -> tuple[Tensor, bool]:
    """Returns the images with values from 0 to 1, and True if other values were moved there (normalized data)."""
    values = images.double().nan_to_num()
    if images.dtype.is_floating_point or images.dtype.is_complex:
        least, most = values.min().item(), values.max().item()
        if least >= 0 and most <= 1:
            return values, False
        return (values - least) / max(most - least, 1e-12), True
    return (values / max(1.0, 255.0 if values.max() > 1 else 1.0)).clamp(0, 1), False


def _picture(image: Tensor) -> Image.Image:
    pixels = (image * 255).round().byte().expand(3, -1, -1).permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(pixels)
