"""Text datasets: blocks of tokens for language models, in memory or streamed from disk."""

from __future__ import annotations

import functools
import os
import random
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeAlias

from pydantic import Field

from ddpforge.builtin.datasets.files import ClassNames, InBatches, unknown_class
from ddpforge.builtin.datasets.listing import listed, other_kind, without_mark
from ddpforge.errors import SetupError, UsageError, not_there

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

Batch: TypeAlias = "tuple[Tensor, Tensor]"
"""Inputs and targets: int64, each [B, T]."""

_BlockSize = Annotated[int, Field(ge=1, le=2**24, description="Tokens per sample.")]
_Suffixes = Annotated[
    Sequence[str],
    Field(description='Read only files of a folder with these name endings, e.g. [".txt"]; empty: all files.'),
]
_Pieces: TypeAlias = "list[NDArray[np.integer]]"

_NOT_LIBRARY = {"test", "tests", "site-packages", "dist-packages", "idlelib", "lib2to3"}
_PACKAGES = (
    *("asyncio", "concurrent", "ctypes", "email", "encodings"),
    *("http", "importlib", "multiprocessing", "unittest", "xml"),
)
_CHUNK = 1 << 20  # bytes per read of a stream


class Text(InBatches):
    """Dataset of a text file or a folder of text files; a sample is a block of tokens and the block one token later.

    Without a `path` the text is the source of Python's standard library without tests: about 10 MB, available on every
    machine, slightly different in every version of Python. The files of a folder are read recursively, in the order of
    their paths, and joined without a separator. The evaluation split consists of whole files, evenly distributed over
    this order, or of the end of a single file.

    With T for `block_size`, sample i is (tokens[i·T : i·T + T], tokens[i·T + 1 : i·T + T + 1]). A batch is
    (inputs [B, T], targets [B, T]), both int64. An incomplete last block is not used. With `random_offsets` sample i
    begins at i·T + r, with a random r from 0 to T - 1 for each (recipe seed, epoch, i); the last sample has r = 0.

    `level` determines the tokens: bytes of any file, or indices of characters in `alphabet`, the sorted characters of
    the whole text (empty for bytes).

    Raises:
        SetupError: The file or folder does not exist.
        ValueError: The text is too short for a sample, no file has one of the suffixes, or a file is not UTF-8 although
            `level` is "characters".
    """

    random = False

    def __init__(
        self,
        *,
        split: Annotated[Literal["train", "eval"], Field(description="Split of the text.")],
        path: Annotated[
            Path | None, Field(description="Text file or folder; absent: Python's standard library.")
        ] = None,
        block_size: _BlockSize = 256,
        level: Annotated[Literal["bytes", "characters"], Field(description="Kind of tokens.")] = "bytes",
        eval_fraction: Annotated[
            float, Field(gt=0, lt=1, description="Fraction of the files, or of a single file, for evaluation.")
        ] = 0.1,
        suffixes: _Suffixes = (),
        random_offsets: Annotated[
            bool,
            Field(description="Begin each sample at a random offset in its block, different in every epoch."),
        ] = False,
        seed: int,
    ) -> None:
        import numpy as np
        import torch

        self.block_size, self.level = block_size, level
        self._random_offsets, self._seed = random_offsets, seed

        files = _text_files(path, suffixes)
        pieces = [_bytes(file) if level == "bytes" else _characters(file) for file in files]
        tokens = np.concatenate(_part(pieces, split, eval_fraction))
        self.vocab_size, self.alphabet = 256, ""
        if level == "characters":
            values = np.unique(np.concatenate(pieces))
            self.vocab_size, self.alphabet = len(values), "".join(map(chr, values))
            tokens = np.searchsorted(values, tokens)

        self._samples = (len(tokens) - 1) // block_size
        if self._samples < 1:
            raise ValueError(
                f"the {split} split of {path or 'the standard library'} has {len(tokens)} {level};"
                f" one sample of block_size = {block_size} needs {block_size + 1}"
            )
        used = tokens[: self._samples * block_size + 1]
        self._tokens = torch.from_numpy(used.astype(np.uint8 if self.vocab_size <= 256 else np.int32))
        self.set_epoch(0)

    def encode(self, text: str) -> list[int]:
        """Returns the tokens of a text; raises UsageError for a character that is not in the alphabet."""
        if self.level == "bytes":
            return list(text.encode("utf-8"))
        if unknown := sorted(set(text) - set(self.alphabet)):
            raise UsageError(
                f"{', '.join(map(repr, unknown[:8]))} is not among the {len(self.alphabet)} characters of the training "
                f"text: {self.alphabet!r}",
                hints=["remove it from the text"],
            )
        return [self.alphabet.index(character) for character in text]

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        if self.level == "bytes":
            return bytes(tokens).decode("utf-8", errors="replace")
        return "".join(self.alphabet[token] for token in tokens)

    def set_epoch(self, epoch: int) -> None:
        """Draws the random offset of each sample, with `random_offsets`."""
        import numpy as np
        import torch

        if self._random_offsets:
            drawn = np.random.RandomState([self._seed & 0xFFFFFFFF, epoch]).randint(self.block_size, size=self._samples)
            drawn[-1] = 0  # nothing follows the last block
            self._offsets = torch.from_numpy(drawn)

    def __len__(self) -> int:
        return self._samples

    def __getitems__(self, ids: list[int]) -> Batch:
        """Returns the batch of these samples."""
        import torch

        rows = torch.tensor(ids)
        starts = rows * self.block_size + (self._offsets[rows] if self._random_offsets else 0)
        tokens = self._tokens[starts[:, None] + torch.arange(self.block_size + 1)].long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


class StreamedText:
    """Iterable dataset of bytes of a text file or a folder, read during training: for text that exceeds memory.

    It has the samples of `Text` with `level = "bytes"`, without an evaluation split: store the text for evaluation in a
    separate file or folder. A sample is the `block_size + 1` bytes of a block; `collate` converts samples to
    (inputs [B, T], targets [B, T]), both int64.

    Raises:
        SetupError: The file or folder does not exist.
        ValueError: The text is too short for a sample, or no file has one of the suffixes.
    """

    level = "bytes"
    vocab_size = 256

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="Text file, or folder that is read recursively.")],
        block_size: _BlockSize = 256,
        suffixes: _Suffixes = (),
        shuffle_files: Annotated[
            bool, Field(description="Read the files in a different order in every epoch.")
        ] = False,
    ) -> None:
        self.block_size = block_size
        self._files = _text_files(path, suffixes)
        self._shuffle_files = shuffle_files
        self._epoch = 0

        size = sum(file.stat().st_size - _begin(file) for file in self._files)
        if size <= block_size:
            raise ValueError(f"{path} has {size} bytes; one sample of block_size = {block_size} needs {block_size + 1}")

    def set_epoch(self, epoch: int) -> None:
        """Sets the epoch, which determines the order of the files; it is the same on every rank."""
        self._epoch = epoch

    def __iter__(self) -> Iterator[bytes]:
        pending = b""
        for chunk in self._chunks():
            pending += chunk
            end = max(0, len(pending) - 1) // self.block_size * self.block_size
            for start in range(0, end, self.block_size):
                yield pending[start : start + self.block_size + 1]
            pending = pending[end:]

    def encode(self, text: str) -> list[int]:
        """Returns the UTF-8 bytes of a text."""
        return list(text.encode("utf-8"))

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of bytes; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def collate(self, samples: Sequence[bytes]) -> Batch:
        """Converts samples to a batch (inputs [B, T], targets [B, T])."""
        import torch

        tokens = torch.frombuffer(bytearray().join(samples), dtype=torch.uint8).view(len(samples), -1).long()
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def _chunks(self) -> Iterator[bytes]:
        files = list(self._files)
        if self._shuffle_files:
            random.Random(self._epoch).shuffle(files)
        for file in files:
            with file.open("rb") as stream:
                stream.seek(_begin(file))
                while chunk := stream.read(_CHUNK):
                    yield chunk


class TextClasses(InBatches):
    """Dataset of blocks of bytes from several texts; the class of a block is the number of its text.

    Without `paths` the texts are ten packages of Python's standard library. A text is a file, or the joined files of a
    folder; it is split for evaluation as for `text`. A batch is (tokens [B, T], classes [B]), both int64. An incomplete
    last block of a text is not used.

    `class_names` are the names of the files, without their ending, and folders. If other data has texts with some of
    these names, their classes have the numbers of the names; texts with other names only are numbered by their order.

    Raises:
        SetupError: A file or folder does not exist.
        ValueError: A text is too short for a sample, or there is only one text.
        UsageError: Only some of the texts are in `class_names`.
    """

    random = False
    vocab_size = 256

    def __init__(
        self,
        *,
        split: Annotated[Literal["train", "eval"], Field(description="Split of the texts.")],
        paths: Annotated[
            Sequence[Path], Field(description="Files or folders; empty: packages of Python's standard library.")
        ] = (),
        block_size: _BlockSize = 128,
        eval_fraction: Annotated[
            float, Field(gt=0, lt=1, description="Fraction of the files, or of a single file, for evaluation.")
        ] = 0.2,
        suffixes: _Suffixes = (),
        class_names: ClassNames = None,
    ) -> None:
        import torch

        if len(paths) == 1:
            raise ValueError("paths has only one text, but two or more classes are needed")
        self.block_size = block_size
        library = Path(sysconfig.get_path("stdlib"))
        found = [(path, _text_files(path, suffixes if path.is_dir() else ())) for path in paths]
        found = found or [(library / name, _text_files(library / name, (".py",))) for name in _PACKAGES]
        blocks = [
            self._blocks(path, _part([_bytes(file) for file in files], split, eval_fraction)) for path, files in found
        ]
        own = [path.stem if path.is_file() else path.resolve().name for path, _ in found]
        numbers = self._numbered(
            [name if own.count(name) == 1 else str(path) for name, (path, _) in zip(own, found, strict=True)],
            class_names,
        )
        self._tokens = torch.cat(blocks)
        self._classes = torch.cat([torch.full((len(each),), n) for n, each in zip(numbers, blocks, strict=True)])

    def _numbered(self, own: Sequence[str], class_names: Sequence[str] | None) -> list[int]:
        """Sets the names of the classes; returns the class of each text."""
        self.class_names = list(class_names or own)
        self.classes = len(self.class_names)
        known = [name for name in own if name in self.class_names]
        if not known and len(own) == self.classes:
            return list(range(len(own)))  # "train/a.txt" and "eval/b.txt" are one class by their places in the list
        if unknown := [name for name in own if name not in known]:
            raise UsageError(f"paths: {unknown[0]}: {unknown_class(unknown[0], self.class_names)}", key="paths")
        return [self.class_names.index(name) for name in own]

    def _blocks(self, path: Path, pieces: _Pieces) -> Tensor:
        import numpy as np
        import torch

        text = np.concatenate(pieces)
        if len(text) < self.block_size:
            raise ValueError(f"{path} has {len(text)} bytes in this split, less than one block of {self.block_size}")
        whole = text[: len(text) // self.block_size * self.block_size].astype(np.uint8)
        return torch.from_numpy(whole).view(-1, self.block_size)

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return bytes(tokens).decode("utf-8", errors="replace")

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitems__(self, ids: list[int]) -> Batch:
        """Returns the batch of these samples."""
        import torch

        rows = torch.tensor(ids)
        return self._tokens[rows].long(), self._classes[rows]


# ---------------------------------------------------------------------------------------------- files
def _text_files(path: Path | None, suffixes: Sequence[str]) -> Sequence[Path]:
    """Returns a file, the files below a folder, or those of the standard library, in the order of their paths."""
    if suffixes and (path is None or path.is_file()):
        raise ValueError(f"suffixes: they select files of a folder, but path is {path or 'absent'}")
    if path is None:
        return _standard_library()
    if path.is_file():
        return _checked([path])
    if not path.is_dir():
        raise SetupError(f"path: no such file or folder: {path}", hints=not_there(path))

    files = listed(path, suffixes, cased=True)
    if not files:
        raise ValueError(f"the folder {path} has no files" + (f" ending in {list(suffixes)}" if suffixes else ""))
    return _checked(files)


def _checked(files: Sequence[Path]) -> Sequence[Path]:
    """Returns the files; raises UsageError if the first one is compressed, or no text in UTF-8."""
    with files[0].open("rb") as file:
        found = other_kind(file.read(32))
    if found:
        raise UsageError(f"path: {files[0]} {found[0]}, not text", hints=[found[1]], key="path")
    return files


@functools.cache  # used for training and evaluation
def _standard_library() -> Sequence[Path]:
    root = Path(sysconfig.get_path("stdlib"))
    files: list[Path] = []
    for folder, folders, names in os.walk(root):
        folders[:] = set(folders) - _NOT_LIBRARY  # these may be many times larger
        files += (Path(folder, name) for name in names if name.endswith(".py"))
    if not files:
        raise SetupError(f"this Python has no sources in {root}", hints=["set path to a text file or folder"])
    return sorted(files)


def _bytes(file: Path) -> NDArray[np.integer]:
    import numpy as np

    return np.frombuffer(without_mark(file.read_bytes()), dtype=np.uint8)


def _begin(file: Path) -> int:
    """Returns the number of bytes of a byte order mark at the beginning of a file."""
    with file.open("rb") as stream:
        begin = stream.read(3)
    return len(begin) - len(without_mark(begin))


def _characters(file: Path) -> NDArray[np.integer]:
    """Returns the code points of a UTF-8 file."""
    import numpy as np

    try:
        text = without_mark(file.read_bytes()).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f'{file} is not UTF-8: {error}; level = "bytes" reads any file') from error
    return np.frombuffer(text.encode("utf-32-le"), dtype=np.uint32)


def _part(pieces: _Pieces, split: str, eval_fraction: float) -> _Pieces:
    """Returns the pieces of one split: whole files (at least one in each split), or a part of the only file."""
    if len(pieces) == 1:
        cut = round(len(pieces[0]) * (1 - eval_fraction))
        return [pieces[0][:cut] if split == "train" else pieces[0][cut:]]

    held_out = min(max(1, round(len(pieces) * eval_fraction)), len(pieces) - 1)
    chosen = {(2 * n + 1) * len(pieces) // (2 * held_out) for n in range(held_out)}
    return [piece for n, piece in enumerate(pieces) if (n in chosen) == (split == "eval")]
