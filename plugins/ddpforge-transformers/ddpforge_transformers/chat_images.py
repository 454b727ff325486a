"""Images of chats: takes them out of a row, finds their files, and reads them."""

import base64
import binascii
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlparse

from PIL import Image, ImageOps, UnidentifiedImageError

from ddpforge_transformers.chat_forms import IMAGE

__all__ = ["ImageFile", "taken_out"]

_KEYS = ("image", "images")  # of a row
_OF_PART = ("image", "path", "url", "image_url")  # keys of a part with the file
_TYPES = ("image", "image_url")
_TOKEN = "<image>"  # place of an image in texts, as LLaVA and other programs write it
_LISTS = ("messages", "conversations", "prompt", "completion")  # keys with lists of messages
_TURNED = range(5, 9)  # values of EXIF's orientation that exchange width and height
_ORIENTATION = 0x0112
_LARGEST = 178_956_970  # pixels; PIL refuses more as a decompression bomb


@dataclass(frozen=True)
class ImageFile:
    """A file with an image, or its content, and its width and height in pixels, as it is seen."""

    path: Path  # a name in messages only, if there is `content`
    size: tuple[int, int]
    content: bytes | None = None

    @classmethod
    def at(cls, path: Path, content: bytes | None = None) -> "ImageFile":
        """Reads the head of a file or of its content; raises ValueError if it has no image."""
        try:
            with Image.open(path if content is None else io.BytesIO(content)) as opened:
                width, height = opened.size
                turned = opened.getexif().get(_ORIENTATION) in _TURNED
        except FileNotFoundError:
            raise ValueError(f"there is no image {path}") from None
        except Exception as error:  # of any decoder
            _refuse(path, error)
        if width * height > _LARGEST:
            raise ValueError(f"the image {path} has {width} x {height} pixels, more than {_LARGEST:,}; make it smaller")
        return cls(path, (height, width) if turned else (width, height), content)

    def read(self) -> Image.Image:
        """Returns the image in RGB, turned by its EXIF data; transparent pixels keep their colour.

        Raises ValueError if it cannot be decoded, or if its size is not that of the head any more.
        """
        try:
            with Image.open(self.path if self.content is None else io.BytesIO(self.content)) as opened:
                found = ImageOps.exif_transpose(opened).convert("RGB")
        except Exception as error:  # of any decoder
            _refuse(self.path, error)
        if found.size != self.size:
            raise ValueError(
                f"the image {self.path} has {found.size[0]} x {found.size[1]} pixels, but had {self.size[0]} x"
                f" {self.size[1]} when the run started; do not change images during a run"
            )
        return found


def _refuse(path: Path, error: Exception) -> NoReturn:
    if isinstance(error, IsADirectoryError):
        raise ValueError(f"{path} is a folder, but a file with an image is expected") from error
    if isinstance(error, UnidentifiedImageError):
        raise ValueError(f"{path} is not an image that PIL can read") from error
    raise ValueError(f"the image {path} cannot be read: {error}") from error


def taken_out(row: Mapping[str, Any], folder: Path) -> tuple[dict[str, Any], list[ImageFile]]:
    """Returns a row without images, with the character `IMAGE` at their places in the texts, and the images in order.

    Images are in the parts of messages, or under `images` (or `image`), for parts without a file, for `<image>` in the
    texts, or, without any places, before the text of the user's first message. Paths are relative to `folder`.

    Raises ValueError for other parts, for files without an image, and for other numbers of images than of places.
    """
    given = _given(row)
    found: list[Any] = []  # an image, or None for one of `given`
    kept = {key: value for key, value in row.items() if key not in _KEYS}
    _refuse_marks(kept, "")
    for key in _LISTS:
        if isinstance(kept.get(key), list):
            kept[key] = [_message(one, f"{key}[{number}]", found) for number, one in enumerate(kept[key])]
    if given and None not in found:
        _place(kept, given, found)
    empty = found.count(None)
    if empty != len(given):
        places = "one place" if empty == 1 else f"{empty} places"
        raise ValueError(
            f'"images" has {len(given)} images, but the messages have {places} for them: expected a part'
            ' {"type": "image"} for each'
        )
    rest = iter(given)
    images = [next(rest) if one is None else one for one in found]
    return kept, [_image(one, number, folder) for number, one in enumerate(images)]


def _given(row: Mapping[str, Any]) -> list[Any]:
    if row.get("image") is not None and row.get("images") is not None:
        raise ValueError('the row has "image" and "images": expected one of them')
    if row.get("image") is not None:
        return [row["image"]]
    images = row.get("images")
    if images is not None and not isinstance(images, list):
        raise ValueError(f'"images" is {type(images).__name__}: expected a list of files')
    return images or []


def _refuse_marks(value: Any, name: str) -> None:
    if isinstance(value, str) and IMAGE in value:
        raise ValueError(f"{name} has the character U+{ord(IMAGE):X}, which stands for images here; remove it")
    items: Any = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in items:
        _refuse_marks(one, f"{name}.{key}".lstrip("."))


def _message(message: Any, name: str, found: list[Any]) -> Any:
    """Returns a message whose content is a text with a character for each image; adds these to `found`."""
    if not isinstance(message, dict) or not isinstance(message.get("content"), list):
        return message
    parts = []
    for number, part in enumerate(message["content"]):
        if not isinstance(part, dict) or part.get("type") not in _TYPES:
            parts.append(part)
            continue
        found.append(_of_part(part, f"{name}.content[{number}]"))
        parts.append({"type": "text", "text": IMAGE})
    return {**message, "content": parts}


def _of_part(part: Mapping[str, Any], name: str) -> Any:
    """Returns the file of a part; None if it has none."""
    unknown = [key for key in part if key not in (*_OF_PART, "type", "text") and part[key] is not None]
    if unknown:
        expected = ", ".join(f'"{key}"' for key in _OF_PART[:3])
        raise ValueError(f'{name} has the unknown key "{unknown[0]}": expected one of {expected}')
    files = [part[key] for key in _OF_PART if part.get(key) is not None]
    if len(files) > 1:
        raise ValueError(f"{name} has {len(files)} files: expected one")
    if not files:
        return None
    return files[0].get("url") if isinstance(files[0], dict) and "url" in files[0] else files[0]


def _place(row: dict[str, Any], given: Sequence[Any], found: list[Any]) -> None:
    """Puts places for `given` images into a row without any: for `<image>`, or before the user's first message."""
    if found:
        raise ValueError('the row has "images", but the parts of its messages have files of their own: remove one')
    texts = _texts(row)
    places = 0
    for owner, key in texts:
        places += owner[key].count(_TOKEN)
        owner[key] = owner[key].replace(_TOKEN, IMAGE)
    first = next((one for one in texts if one[0].get("role", one[0].get("from", "user")) in ("user", "human")), None)
    if not places and first is not None:
        owner, key = first
        places, owner[key] = len(given), IMAGE * len(given) + owner[key]
    found += [None] * places


def _texts(row: dict[str, Any]) -> list[tuple[dict[str, Any], str]]:
    """Returns the owner and the key of each text, in the order of the chat; messages are copied into the row."""
    if "instruction" in row:
        return [(row, key) for key in ("instruction", "input") if isinstance(row.get(key), str)]
    texts = []
    for name in _LISTS:
        if isinstance(row.get(name), list):
            row[name] = [dict(one) if isinstance(one, dict) else one for one in row[name]]
            messages = [one for one in row[name] if isinstance(one, dict)]
            texts += [(one, key) for one in messages for key in ("content", "value") if isinstance(one.get(key), str)]
    return texts


def _image(value: Any, number: int, folder: Path) -> ImageFile:
    """Returns the image of a path, or of {bytes, path}, as columns of images have them in parquet files."""
    if isinstance(value, dict) and isinstance(value.get("bytes"), bytes):
        name = value.get("path")
        return ImageFile.at(
            Path(name if isinstance(name, str) and name else f"image {number} of the row"), value["bytes"]
        )
    if isinstance(value, str) and value.startswith("data:"):
        return ImageFile.at(Path(f"image {number} of the row"), _of_data_url(value))
    return ImageFile.at(_file(value, folder))


def _of_data_url(url: str) -> bytes:
    head, _, text = url.partition(",")
    if not head.endswith(";base64"):
        raise ValueError(f"an image is given as the URL {url[:30]}…: expected data:image/png;base64,… or a file's path")
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data: URL of an image is not base64: {error}") from error


def _file(value: Any, folder: Path) -> Path:
    """Returns the path of an image's file; raises ValueError for anything else."""
    if isinstance(value, dict) and isinstance(value.get("path"), str) and value.get("bytes") is None:
        value = value["path"]
    if not isinstance(value, str):
        raise ValueError(
            f"an image is given as {type(value).__name__}: expected the path of its file, or the content of a file as"
            ' {"bytes": …} in a parquet file or a dataset of Hugging Face'
        )
    if not value.strip():
        raise ValueError("the path of an image is empty")
    url = urlparse(value)
    if url.scheme == "file":
        value = unquote(url.path)
    elif len(url.scheme) > 1:
        raise ValueError(f"the image {value} is not downloaded: expected the path of a file; download it first")
    return folder / Path(value).expanduser()
