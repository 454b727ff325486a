"""Samples in tar files as webdataset writes them: files of one name and several endings are one sample."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from ddpforge.builtin.datasets.files import Classes, Lanes, Shuffle, Window, find_files, keep, library
from ddpforge.errors import EnvironmentProblem, UsageError
from ddpforge.interfaces import PartedData

__all__ = ["Tar"]

_PICKLES = {"pickle", "pkl", "pyd", "pth", "pt"}

Raw = tuple[tuple[str, bytes], ...]
"""A sample as it is in the file: for each field its ending and its bytes."""


class Tar(PartedData):
    """Tar files of samples, as webdataset writes them, each read in pieces by the processes that need it.

    A sample is a row of members with one name and several endings, `0001.jpg` and `0001.cls`; `fields` says which of
    them make the tuple that a batch is collated of. Images become float32 [C, H, W] in [0, 1], `cls` and `index` int,
    `npy` an array, `json` and `txt` what they hold, by webdataset's decoders; pickles are not read.

    At the start the headers of all files are read, which tells how many samples there are and where, or what `index`
    keeps of them; their data is not. Every sample is then read once, by the process that keeps it.

    Raises EnvironmentProblem where there is no such file or it is no tar file, and UsageError for a sample without one
    of the fields.
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
        window: Window = 1,
        lanes: Lanes = (8, 4),
        index: Annotated[
            str | None,
            Field(
                description="A folder that keeps what headers say, so that those of a file are read once, not always."
            ),
        ] = None,
    ) -> None:
        library("webdataset", "webdataset")
        self._images = images
        self._fields = [one.split(";") for one in fields]
        if pickled := sorted(_PICKLES & {ending.rpartition(".")[2] for one in self._fields for ending in one}):
            raise UsageError(f"fields: {pickled[0]} is a pickle, which may run code when it is read; write npy or json")
        self._files = find_files(path, ".tar")
        self._members = [_indexed(file, self._fields, index) for file in self._files]
        self.parts = [len(found) for found in self._members]
        self.shuffle, self.window, self.lanes = shuffle, window, lanes
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
        form = "pil" if self._pipeline else "torch"
        kind = ending.rpartition(".")[2].lower()
        handlers = library("webdataset.autodecode", "webdataset")
        image = handlers.imagehandler(form + self._images)(f".{kind}", data)
        if image is not None:
            return self._pipeline(image) if self._pipeline else image.reshape(-1, *image.shape[-2:])  # grey is [H, W]
        try:
            found = handlers.basichandlers(kind, data)
        except ValueError as error:
            raise UsageError(f"fields: `{ending}` of a sample cannot be decoded: {error}") from error
        return data if found is None else found

    def _try(self, transforms: Sequence[str | Mapping[str, Any]]) -> Any:
        """The transforms, tried on the first image."""
        pipeline = library("ddpforge.builtin.datasets.vision", "vision").pipeline
        handler = library("webdataset.autodecode", "webdataset").imagehandler(f"pil{self._images}")
        for sample in self:
            for ending, data in sample:
                if (image := handler(f".{ending.rpartition('.')[2].lower()}", data)) is not None:
                    return pipeline(transforms, (), (), image)
            break
        raise UsageError("transforms: none of the fields is an image")


def _indexed(file: Path, fields: Sequence[Sequence[str]], folder: str | None) -> NDArray[np.int64]:
    """The index of a file, or what `folder` keeps of it, if the file has not changed since."""
    now = file.stat()
    facts = [str(file.resolve()), now.st_size, now.st_mtime_ns, fields]
    return keep(folder, file.stem, facts, lambda: _index(file, fields))


def _index(file: Path, fields: Sequence[Sequence[str]]) -> NDArray[np.int64]:
    """For each sample of a file and each field: which of its endings there is, where its data begins, and its size."""
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
