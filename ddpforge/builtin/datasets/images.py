"""Opens the images of all datasets: by mode, in the orientation in which they are seen, and named if they cannot be."""

from __future__ import annotations

import io
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddpforge.builtin.datasets.listing import other_kind
from ddpforge.errors import UsageError, library, not_there

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

__all__ = ["IMAGE_FORMATS", "open_image", "pixels"]

log = logging.getLogger("ddpforge")

# Pillow detects the format from an image's content, and would run PostScript, which is a program, with Ghostscript.
IMAGE_FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "DIB", "TIFF", "PPM", "JPEG2000", "TGA")

_MODES = {"1", "L", "LA", "La", "P", "PA", "RGB", "RGBA", "RGBa", "RGBX", "CMYK", "YCbCr"}  # with 8 bits
_BITS = 258  # tag of a TIFF: bits of a value
_PHOTOMETRIC = 262  # tag of a TIFF; 0: zero is white
_FRAMES = "several frames"  # in the warning, which each process gives once
_warned: set[str] = set()


def open_image(source: Path | bytes, *, name: object, key: str, mode: str = "RGB", upright: bool = True) -> Image:
    """Returns an image in `mode`, or in mode "F" with values from 0 to 255 if it has one channel of more than 8 bits.

    Args:
        source: the file, or its content.
        name: the file, or the member of an archive, for errors.
        key: option of the recipe that an error names.
        mode: "L", "RGB" or "RGBA".
        upright: turn and mirror the image as its EXIF orientation requires.

    Of several frames, the first is used, with a warning. Raises UsageError for an image that cannot be decoded, is
    cut, or has a mode without a known range of values.
    """
    if isinstance(source, Path) and not source.is_file():  # a pipe would never end
        what = "is not a regular file" if source.exists() else "does not exist"
        raise UsageError(f"there is no image {name}: it {what}", hints=not_there(source), key=key)
    pil = library("PIL.Image", "images")
    try:
        with pil.open(io.BytesIO(source) if isinstance(source, bytes) else source, formats=IMAGE_FORMATS) as opened:
            if opened.format != "MPO" and getattr(opened, "is_animated", False) and _FRAMES not in _warned:
                _warned.add(_FRAMES)
                log.warning("%s has several frames: of such images, the first frame is used", name)
            opened.load()
            image = library("PIL.ImageOps", "images").exif_transpose(opened) if upright else opened
            if (most := _most(opened)) is not None:
                return _scaled(image, most, opened.mode)
            if opened.mode not in _MODES:
                raise ValueError(f"the mode {opened.mode} cannot be turned into colors; write it as RGB")
            found: Image = image.convert(mode)
            return found
    except UsageError:
        raise
    except (MemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # decoders of damaged files raise many kinds
        what = str(error) or type(error).__name__
        if "cannot identify" in what:
            what = f"cannot identify the file as one of {', '.join(IMAGE_FORMATS)}"
        begin = source[:32] if isinstance(source, bytes) else _begin(source)
        kind = other_kind(begin)
        what = f"it {kind[0]}" if kind else what if begin else "it is empty"
        hints = [kind[1] if kind else "write it again, or remove it"]
        raise UsageError(f"{name} is not an image that Pillow can read: {what}", hints=hints, key=key) from error


def _begin(file: Path) -> bytes:
    with file.open("rb") as opened:
        return opened.read(32)


def _most(image: Image) -> float | None:
    """Returns the value of white in an image with one channel of more than 8 bits; None for other images.

    Raises ValueError for a mode without a known white.
    """
    tags: Any = getattr(image, "tag_v2", {})
    if image.mode == "F":
        return 1.0
    if not image.mode.startswith("I"):
        return None
    if image.format == "TIFF":
        bits = tags.get(_BITS, (0,))[0]
        if image.mode == "I" or not 8 < bits <= 16 or tags.get(_PHOTOMETRIC) == 0:
            raise ValueError(
                f"the mode {image.mode} of {bits} bits has no known range of values; write it as 8-bit or 16-bit gray"
            )
        return float(2**bits - 1)
    return 65535.0


def _scaled(image: Image, most: float, mode: str) -> Image:
    """Returns the image in mode "F" with values from 0 to 255; raises ValueError if values are outside of its range."""
    import numpy as np

    values = np.asarray(image).astype(np.float64)
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 0.0)
    if not (0 <= low <= high <= most):
        raise ValueError(
            f"the mode {mode} has values from {low:g} to {high:g}, and needs 0 to {most:g}; scale them, or write an "
            "8-bit or 16-bit image"
        )
    found: Image = library("PIL.Image", "images").fromarray((values * (255 / most)).astype(np.float32))
    return found


def pixels(image: Image, mode: str = "RGB") -> Tensor:
    """Returns an image of `open_image` as float32 [C, H, W] in [0, 1], with the channels of `mode`."""
    import numpy as np
    import torch

    values = np.array(image)
    found = torch.from_numpy(values.reshape(*values.shape[:2], -1)).permute(2, 0, 1).float() / 255
    if image.mode != "F":
        return found
    gray = found.clamp(0, 1)  # a resize with cubic curves goes beyond the range
    return torch.cat([gray.expand(min(len(mode), 3), -1, -1), torch.ones_like(gray)[: len(mode) == 4]])
