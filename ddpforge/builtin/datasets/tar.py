"""Dataset of tar files in webdataset's format: members with the same name and several endings are one sample."""

from __future__ import annotations

import io
import json
import re
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, find_files, keep
from ddpforge.builtin.datasets.images import open_image, pixels
from ddpforge.builtin.datasets.listing import other_kind
from ddpforge.errors import SetupError, UsageError, library
from ddpforge.interfaces import ShardedDataset

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["Tar"]

_PICKLES = {"pickle", "pkl", "pyd", "pth", "pt", "joblib", "dill", "p"}
_IMAGES = {
    *("jpg", "jpeg", "jpe", "jfif", "png", "apng", "webp", "gif", "bmp", "dib", "tif", "tiff"),
    *("ppm", "pgm", "pbm", "pnm", "jp2", "j2k", "tga"),
}


def _array(data: bytes) -> Any:
    import numpy as np

    return np.lib.format.read_array(io.BytesIO(data), allow_pickle=False)


def _arrays(data: bytes) -> Any:
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        return {name.removesuffix(".npy"): _array(archive.read(name)) for name in archive.namelist()}


def _text(data: bytes) -> str:
    return data.decode("utf-8")


# All decoders, by the last part of an ending. None of them runs code from the data. Never add a decoder that may do so,
# such as pickle's.
_DECODERS: Mapping[str, Callable[[bytes], Any]] = {
    **dict.fromkeys(("txt", "text", "transcript"), _text),
    **dict.fromkeys(("cls", "cls2", "index", "inx", "id"), int),
    **dict.fromkeys(("json", "jsn"), json.loads),
    "npy": _array,
    "npz": _arrays,
    **dict.fromkeys(("ten", "tb"), lambda data: library("webdataset.tenbin", "webdataset").decode_buffer(data)),
    **dict.fromkeys(("mp", "msg"), lambda data: library("msgpack", "webdataset").unpackb(data)),
    "bin": bytes,
}

Raw = tuple[tuple[str, bytes, str], ...]
"""Undecoded sample: ending and bytes of each field, and the place of the sample for errors."""


class Tar(ShardedDataset):
    """Tar files of samples in webdataset's format; processes read only the samples that they need.

    A sample is a sequence of members with the same name and several endings, e.g. `0001.jpg` and `0001.cls`; `fields`
    selects the elements of the sample's tuple. Endings are decoded as webdataset does: images become float32 [C, H, W]
    in [0, 1], `cls` and `index` int, `npy` an array, `json` and `txt` their content; `bin` stays bytes. Only the last
    part of an ending counts, in lower or upper case. Other endings are refused, including pickles, which may run code.

    At the start the headers of all files are read, or their cache in `index`, to find the samples. Every sample is then
    read once, by the process that keeps it.

    Raises:
        SetupError: A file does not exist, or is not an uncompressed tar file.
        UsageError: A sample lacks a field, or an ending cannot be decoded.
    """

    seekable = True

    def __init__(
        self,
        *,
        path: Annotated[
            str,
            Field(min_length=1, description='Folder, file, or pattern: "train-{00..99}.tar", "data/*.tar".'),
        ],
        fields: Annotated[
            Sequence[Annotated[str, Field(pattern=r"^[^;./]+([;.][^;./]+)*$")]],
            Field(min_length=1, description='Endings, in the order of the tuple; "jpg;png": the first one found.'),
        ],
        images: Annotated[
            Literal["l", "rgb", "rgba"], Field(description="Color mode of images: gray, color, or color with alpha.")
        ] = "rgb",
        transforms: Annotated[
            Sequence[str | Mapping[str, Any]],
            Field(
                description="Transforms of images of `torchvision.transforms.v2`, by name or with options, e.g."
                ' [{ use = "RandomResizedCrop", size = 224 }]; needs the extra `vision`.'
            ),
        ] = (),
        classes: Classes = None,
        shuffle: Shuffle = False,
        shuffle_buffer: Window = 1,
        interleave: Lanes = (8, 4),
        index: Annotated[
            str | None,
            Field(
                description="Folder that caches the headers' content, so that the headers of a file are read only once."
            ),
        ] = None,
    ) -> None:
        self._images, self._transforms = images, bool(transforms)
        self._fields = [one.split(";") for one in fields]
        for one in self._fields:
            for ending in one:
                _reject_undecoded(ending)
        self._files = find_files(path, ".tar")
        self._members = [_indexed(file, self._fields, index) for file in self._files]
        self.shard_sizes = [len(found) for found in self._members]
        self.shuffle, self.shuffle_buffer, self.interleave = shuffle, shuffle_buffer, interleave
        self.random = bool(transforms)
        if classes is not None:
            self.classes = classes
        self._pipeline = self._try(transforms) if transforms else None

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[Raw]:
        """Yields the undecoded samples of a file; reads each when it is requested."""
        with self._files[part].open("rb") as file:
            for number, row in enumerate(self._members[part][skip:], skip + 1):
                sample, place = [], f"sample {number} of {self._files[part]}"
                for endings, (which, begin, size) in zip(self._fields, row.tolist(), strict=True):
                    file.seek(begin)
                    sample.append((endings[which], file.read(size), place))
                yield tuple(sample)

    def prepare(self, sample: Raw) -> tuple[Any, ...]:
        """Decodes the fields, and transforms images."""
        return tuple(self._decoded(*field) for field in sample)

    def _decoded(self, ending: str, data: bytes, place: str) -> Any:
        kind = _kind(ending)
        try:
            if kind in _IMAGES:
                image = self._image(ending, data, place)
                return self._pipeline(image) if self._pipeline else pixels(image, self._images.upper())
            return _DECODERS[kind](data)
        except (SetupError, UsageError):
            raise
        except Exception as error:  # decoders raise different errors
            raise UsageError(f"fields: `{ending}` of {place} cannot be decoded: {error}") from error

    def _image(self, ending: str, data: bytes, place: str) -> Any:
        """Reads an image with Pillow; with transforms, one with more than 8 bits is a tensor in [0, 1]."""
        mode = self._images.upper()
        image = open_image(data, name=f"fields: `{ending}` of {place}", key="fields", mode=mode)
        return pixels(image, mode) if self._transforms and image.mode == "F" else image

    def _try(self, transforms: Sequence[str | Mapping[str, Any]]) -> Any:
        """Builds the pipeline of transforms, and tests it on the first image."""
        pipeline = library("ddpforge.builtin.datasets.vision", "vision").pipeline
        for sample in self:
            for ending, data, place in sample:
                if _kind(ending) in _IMAGES:
                    return pipeline(transforms, (), (), self._image(ending, data, place))
            break
        raise UsageError("transforms: none of the fields is an image")


def _kind(ending: str) -> str:
    """Returns the last part of an ending, which selects the decoder."""
    return ending.rpartition(".")[2].lower()


def _reject_undecoded(ending: str) -> None:
    """Raises UsageError for an ending without a decoder."""
    if (kind := _kind(ending)) in _PICKLES:
        raise UsageError(f"fields: {ending} is a pickle, which may run code when it is read; use npy or json")
    if kind not in _IMAGES and kind not in _DECODERS:
        raise UsageError(
            f"fields: {ending} cannot be decoded: the ending `{kind}` is unknown",
            hints=[
                f"known endings: {', '.join(_DECODERS)} (bin: plain bytes), and images: {', '.join(sorted(_IMAGES))}"
            ],
        )


def _indexed(file: Path, fields: Sequence[Sequence[str]], folder: str | None) -> NDArray[np.int64]:
    """Returns the index of a file, cached in `folder` until the file changes."""
    now = file.stat()
    facts = [str(file.resolve()), now.st_size, now.st_mtime_ns, fields]
    return keep(folder, file.stem, facts, lambda: _index(file, fields))


def _index(file: Path, fields: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """Returns [samples, fields, 3]: number of the field's ending, offset of its data, and its size."""
    import numpy as np

    rows: list[list[tuple[int, ...]]] = []
    try:
        with tarfile.open(file, "r:") as archive:
            for name, members in _samples(archive):
                rows.append([_choose(file, name, members, endings) for endings in fields])
    except tarfile.TarError as error:
        with file.open("rb") as opened:
            found = other_kind(opened.read(32))
        way = found[1] if found else "is it cut, or of another kind? copy it again"
        raise SetupError(f"path: {file} is not an uncompressed tar file: {error}", hints=[way]) from error
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(fields), 3)


def _samples(archive: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Yields the name and the members, by ending, of each sample: consecutive members with the same name."""
    name, members = "", dict[str, tarfile.TarInfo]()
    for member in archive:
        archive.members.clear()  # type: ignore[attr-defined]  # otherwise all members would stay in memory
        split = re.match(r"^((?:.*/|)[^.]+)[.]([^/]*)$", member.name)
        if not member.isfile() or not split or member.name.startswith("__"):
            continue
        if split[1] != name and members:
            yield name, members
            members = {}
        name = split[1]
        members[split[2]] = member
    if members:
        yield name, members


def _choose(file: Path, name: str, members: Mapping[str, tarfile.TarInfo], endings: Sequence[str]) -> tuple[int, ...]:
    for which, ending in enumerate(endings):
        if ending in members:
            return which, members[ending].offset_data, members[ending].size
    raise UsageError(
        f"fields: sample {name} of {file} has {', '.join(sorted(members))}, but no {' or '.join(endings)}",
        hints=["if this is the end of the file, the file is cut: copy it again"],
        key="fields",
    )
