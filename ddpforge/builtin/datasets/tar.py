"""Samples in tar files as webdataset writes them: files of one name and several endings are one sample."""

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

from ddpforge.builtin.datasets.files import (
    IMAGE_FORMATS,
    Classes,
    Lanes,
    Shuffle,
    Window,
    find_files,
    keep,
    library,
)
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interfaces import PartedData

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


# Every decoder there is, by the last part of an ending. None of them runs what is in the data: a decoder that may, such
# as pickle's, must not come in.
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

Raw = tuple[tuple[str, bytes], ...]
"""A sample as it is in the file: for each field its ending and its bytes."""


class Tar(PartedData):
    """Tar files of samples, as webdataset writes them, each read in pieces by the processes that need it.

    A sample is a row of members with one name and several endings, `0001.jpg` and `0001.cls`; `fields` says which of
    them make the tuple that a batch is collated of. Images become float32 [C, H, W] in [0, 1], `cls` and `index` int,
    `npy` an array, `json` and `txt` what they hold, as webdataset decodes them; `bin` stays bytes. The last part of an
    ending decides, in small or capital letters. Other endings are refused, pickles among them: they may run code.

    At the start the headers of all files are read, which tells how many samples there are and where, or what `index`
    keeps of them; their data is not. Every sample is then read once, by the process that keeps it.

    Raises EnvironmentProblem where there is no such file or it is no tar file, and UsageError for a sample without one
    of the fields, or with an ending that is not decoded.
    """

    jumps = True

    def __init__(
        self,
        *,
        path: Annotated[
            str,
            Field(min_length=1, description='A folder, a file, or a pattern: "train-{00..99}.tar", "data/*.tar".'),
        ],
        fields: Annotated[
            Sequence[Annotated[str, Field(pattern=r"^[^;./]+([;.][^;./]+)*$")]],
            Field(min_length=1, description='Endings, in the order of the tuple; the first found of "jpg;png".'),
        ],
        images: Annotated[
            Literal["l", "rgb", "rgba"], Field(description="How images are decoded: grey, colour, or with alpha.")
        ] = "rgb",
        transforms: Annotated[
            Sequence[str | Mapping[str, Any]],
            Field(
                description="Transforms of images by `torchvision.transforms.v2`, by name or with options, e.g."
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
                description="A folder that keeps what headers say, so that those of a file are read once, not always."
            ),
        ] = None,
    ) -> None:
        self._images = images
        self._fields = [one.split(";") for one in fields]
        for one in self._fields:
            for ending in one:
                _refuse_undecoded(ending)
        self._files = find_files(path, ".tar")
        self._members = [_indexed(file, self._fields, index) for file in self._files]
        self.parts = [len(found) for found in self._members]
        self.shuffle, self.shuffle_buffer, self.interleave = shuffle, shuffle_buffer, interleave
        self.random = bool(transforms)
        if classes is not None:
            self.classes = classes
        self._pipeline = self._try(transforms) if transforms else None

    def open(self, part: int, *, epoch: int, skip: int) -> Iterator[Raw]:
        """The samples of a file, undecoded; each is read when it is asked for."""
        with self._files[part].open("rb") as file:
            for row in self._members[part][skip:]:
                sample = []
                for endings, (which, begin, size) in zip(self._fields, row.tolist(), strict=True):
                    file.seek(begin)
                    sample.append((endings[which], file.read(size)))
                yield tuple(sample)

    def prepare(self, sample: Raw) -> tuple[Any, ...]:
        """The fields, decoded; images transformed."""
        return tuple(self._decoded(ending, data) for ending, data in sample)

    def _decoded(self, ending: str, data: bytes) -> Any:
        kind = _kind(ending)
        try:
            if kind in _IMAGES:
                image = self._image(data)
                return self._pipeline(image) if self._pipeline else _pixels(image)
            return _DECODERS[kind](data)
        except EnvironmentProblem:
            raise
        except Exception as error:  # of each decoder's own kind
            raise UsageError(f"fields: `{ending}` of a sample cannot be decoded: {error}") from error

    def _image(self, data: bytes) -> Any:
        """An image of Pillow; by one of the formats that need no other program, whatever its name says."""
        image = library("PIL.Image", "webdataset").open(io.BytesIO(data), formats=IMAGE_FORMATS)
        return image.convert(self._images.upper())

    def _try(self, transforms: Sequence[str | Mapping[str, Any]]) -> Any:
        """The transforms, tried on the first image."""
        pipeline = library("ddpforge.builtin.datasets.vision", "vision").pipeline
        for sample in self:
            for ending, data in sample:
                if _kind(ending) in _IMAGES:
                    return pipeline(transforms, (), (), self._image(data))
            break
        raise UsageError("transforms: none of the fields is an image")


def _kind(ending: str) -> str:
    """The part of an ending that names a decoder."""
    return ending.rpartition(".")[2].lower()


def _refuse_undecoded(ending: str) -> None:
    """Raises UsageError for an ending without a decoder."""
    if (kind := _kind(ending)) in _PICKLES:
        raise UsageError(f"fields: {ending} is a pickle, which may run code when it is read; write npy or json")
    if kind not in _IMAGES and kind not in _DECODERS:
        raise UsageError(
            f"fields: {ending} is not decoded: `{kind}` is no known ending",
            hints=[
                f"known are {', '.join(_DECODERS)} (bytes as they are: bin), and images: {', '.join(sorted(_IMAGES))}"
            ],
        )


def _pixels(image: Any) -> Any:
    """A float32 tensor [C, H, W] in [0, 1]."""
    import numpy as np
    import torch

    values = np.asarray(image, dtype=np.float32) / 255.0
    return torch.from_numpy(np.ascontiguousarray(values.reshape(*values.shape[:2], -1).transpose(2, 0, 1)))


def _indexed(file: Path, fields: Sequence[Sequence[str]], folder: str | None) -> NDArray[np.int64]:
    """The index of a file, or what `folder` keeps of it, if the file has not changed since."""
    now = file.stat()
    facts = [str(file.resolve()), now.st_size, now.st_mtime_ns, fields]
    return keep(folder, file.stem, facts, lambda: _index(file, fields))


def _index(file: Path, fields: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """For each sample of a file and each field: which of its endings there is, where its data begins, and its size."""
    import numpy as np

    rows: list[list[tuple[int, ...]]] = []
    try:
        with tarfile.open(file, "r:") as archive:
            for name, members in _samples(archive):
                rows.append([_choose(file, name, members, endings) for endings in fields])
    except tarfile.TarError as error:
        raise EnvironmentProblem(
            f"path: {file} is not a tar file without compression: {error}",
            hints=["unpack a compressed one first: gzip -d"],
        ) from error
    return np.array(rows, dtype=np.int64).reshape(len(rows), len(fields), 3)


def _samples(archive: tarfile.TarFile) -> Iterator[tuple[str, dict[str, tarfile.TarInfo]]]:
    """Members of one name that follow one another, by ending."""
    name, members = "", dict[str, tarfile.TarInfo]()
    for member in archive:
        archive.members.clear()  # type: ignore[attr-defined]  # which would hold all of them
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
    raise UsageError(f"fields: sample {name} of {file} has {', '.join(sorted(members))}, and no {' or '.join(endings)}")
