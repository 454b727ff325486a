"""Dataset of tokens in a memory-mapped file: text of any size for language models."""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from operator import add
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeAlias

from pydantic import Field

from ddpforge.builtin.datasets.files import InBatches
from ddpforge.errors import SetupError, UsageError, not_there

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Tokens"]

_LARGEST = 2**24  # tokens of a vocabulary, if its size is not known
_WINDOW = 2**16  # tokens that are looked at in three places
_ENOUGH = 100  # pairs of tokens to judge the dtype
_HEADER = 1024  # bytes of the header of llm.c: 256 int32
_LLM_C = {20240520: "uint16", 20240801: "uint32"}  # the dtype by the first number of that header
_TEXT = bytes([9, 10, 13, *range(32, 127)])  # of a text in ASCII
_NPY = "an .npy file"
_OTHER_KINDS = {
    b"\x93NUMPY": _NPY,
    b"PK\x03\x04": "a zip archive, such as .npz or .pt",
    b"\x1f\x8b\x08\x00": "compressed with gzip",
    b"\x1f\x8b\x08\x08": "compressed with gzip",
    b"\xfd7zXZ\x00": "compressed with xz",
    b"\x28\xb5\x2f\xfd": "compressed with zstandard",
    b"PAR1": "a parquet file",
    b"ARROW1": "an arrow file",
    b"MMIDIDX": "an index of Megatron; the tokens are in the .bin file next to it",
    b"\x89HDF\r\n": "an HDF5 file",
}

Batch: TypeAlias = "tuple[Tensor, Tensor]"
"""Inputs and targets: int64, each [B, T]."""


class Tokens(InBatches):
    """Blocks of a file of token numbers: `.npy` (one dimension), or `.bin` (an array of plain numbers).

    A `.bin` file may have the header of llm.c, which is skipped. A file with another header, or whose numbers look as
    if it had another dtype, is refused.

    With T for `block_size`, sample i is (tokens[i·T : i·T + T], tokens[i·T + 1 : i·T + T + 1]). A batch is (inputs
    [B, T], targets [B, T]), both int64. The file is memory-mapped: only fetched samples are read, and all processes of
    a machine share the memory.

    Raises:
        SetupError: The file does not exist.
        ValueError: The file is not one row of integers, or too short for a sample.
        UsageError: The file has another dtype, or a token is not in 0 to `vocab_size` - 1.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="File of tokens.")],
        block_size: Annotated[int, Field(ge=1, le=2**24, description="Tokens per sample.")] = 256,
        dtype: Annotated[
            Literal["uint8", "uint16", "uint32", "int32", "int64"], Field(description="Dtype of a `.bin` file.")
        ] = "uint16",
        vocab_size: Annotated[
            int | None, Field(ge=2, le=2**31, description="Number of different tokens, for comparison with the model.")
        ] = None,
    ) -> None:
        self._path, self._dtype, self.block_size = path, dtype, block_size
        if vocab_size is not None:
            self.vocab_size = vocab_size
        self._tokens = self._mapped()
        if len(self) < 1:
            raise ValueError(
                f"{path} has {len(self._tokens)} tokens; one sample of block_size = {block_size} needs {block_size + 1}"
            )
        self._check_values()

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.block_size

    def __getitems__(self, ids: list[int]) -> Batch:
        """Returns the batch of these samples; raises UsageError for a token outside of the vocabulary."""
        import numpy as np
        import torch

        blocks = [self._tokens[index * self.block_size :][: self.block_size + 1] for index in ids]
        tokens = np.stack(blocks).astype(np.int64)
        if getattr(self, "vocab_size", None):
            width = self.block_size + 1
            self._check_range(tokens.ravel(), lambda n: ids[n // width] * self.block_size + n % width)
        found = torch.from_numpy(tokens)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}  # the receiving process maps the file again

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self._mapped()

    def _mapped(self) -> NDArray[Any]:
        import numpy as np

        if not self._path.is_file():
            raise SetupError(f"path: no such file: {self._path}", hints=not_there(self._path))
        if self._path.suffix == ".npy":
            try:
                tokens: NDArray[Any] = np.load(self._path, mmap_mode="r", allow_pickle=False)
            except (ValueError, EOFError, OSError) as error:
                what = "holds no numbers" if "pickle" in str(error) else str(error)  # numpy would unpickle any bytes
                raise UsageError(
                    f"path: {self._path} is not a whole .npy file: {what}",
                    hints=["write its tokens by numpy.save; plain numbers have the ending .bin"],
                    key="path",
                ) from error
            if not isinstance(tokens, np.ndarray):
                raise UsageError(f"path: {self._path} is an archive of arrays, not one array", key="path")
        else:
            begin, item = self._header(), np.dtype(self._dtype).itemsize
            if (size := self._path.stat().st_size) % item or size <= begin:
                if not size:
                    raise UsageError(f"path: {self._path} is empty", key="path")
                raise UsageError(
                    f"path: {self._path} has {size} bytes, not a multiple of the {item} bytes of {self._dtype}",
                    hints=["set `dtype` to that of the tokens, or copy the file again if it is cut"],
                    key="path",
                )
            tokens = np.memmap(self._path, dtype=self._dtype, mode="r", offset=begin)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{self._path} contains {tokens.dtype} of shape {list(tokens.shape)}, not one row of integers"
            )
        return tokens

    def _header(self) -> int:
        """Returns the number of bytes before the tokens; raises UsageError for the header of another format."""
        with self._path.open("rb") as file:
            begin = file.read(_HEADER)
        if kind := next((kind for mark, kind in _OTHER_KINDS.items() if begin.startswith(mark)), None):
            raise UsageError(
                f"path: {self._path} is {kind}, not plain numbers of the dtype {self._dtype}",
                hints=["give it the ending .npy" if kind == _NPY else "write its tokens as .npy: numpy.save"],
                key="path",
            )
        if self._dtype != "uint8" and len(begin) > _ENOUGH and not begin.translate(None, _TEXT):
            raise UsageError(
                f"path: {self._path} is a text, not numbers of the dtype {self._dtype}",
                hints=['set use = "text" for its bytes, or write its tokens: ddpforge-transformers has a tokenizer'],
                key="path",
            )
        magic, version, count = struct.unpack_from("<3i", begin) if len(begin) == _HEADER else (0, 0, 0)
        if magic not in _LLM_C or version < 1:
            return 0
        dtype, size = _LLM_C[magic], self._path.stat().st_size
        if self._dtype != dtype:
            raise UsageError(
                f"path: {self._path} has the header of llm.c, for tokens of the dtype {dtype}, not {self._dtype}",
                hints=[f'set dtype = "{dtype}"'],
                key="dtype",
            )
        if (held := (size - _HEADER) // (2 if dtype == "uint16" else 4)) != count:
            raise UsageError(
                f"path: {self._path} has {held:,} tokens, but its header announces {count:,}: it is cut, or it has "
                "another format",
                key="path",
            )
        return _HEADER

    def _check_values(self) -> None:
        """Raises UsageError for values at the beginning, in the middle and at the end that no tokenizer has.

        Not the whole file, which may be larger than the memory; `__getitems__` checks each sample.
        """
        import numpy as np

        tokens, window = self._tokens, _WINDOW
        starts = dict.fromkeys((0, len(tokens) // 4 * 2, max(0, (len(tokens) - window) // 2 * 2)))
        found = [np.asarray(tokens[start : start + window]).astype(np.int64) for start in starts]
        for start, values in zip(starts, found, strict=True):
            self._check_range(values, partial(add, start))
        if self._path.suffix != ".npy":
            self._check_dtype(np.concatenate(found))

    def _check_range(self, values: NDArray[np.int64], place: Callable[[int], int]) -> None:
        """Raises UsageError for a value that is not a token; `place` returns the position in the file of a value."""
        size = getattr(self, "vocab_size", None) or _LARGEST
        for odd in (int(values.argmax()), int(values.argmin())):
            if not 0 <= values[odd] < size:
                self._reject(int(values[odd]), place(odd))

    def _check_dtype(self, values: NDArray[np.int64]) -> None:
        """Raises UsageError if every second number looks like the upper half of a wider number."""
        low, high = values[: len(values) // 2 * 2].reshape(-1, 2).T
        zeros = len(high) >= _ENOUGH and not high.any() and (low != 0).mean() > 0.5
        # The upper bytes of tokens up to 50,256 are at most 196, the lower ones reach 255.
        halves = self._dtype == "uint8" and len(high) >= 100 * _ENOUGH and low.max() >= 250 and high.max() <= 200
        if zeros or halves:
            wider = {"uint8": "uint16", "uint16": "uint32"}.get(self._dtype, "int64")
            what = "0" if zeros else f"at most {int(high.max())}, and the others up to {int(low.max())}"
            raise UsageError(
                f"path: every second token of {self._path} is {what}: the file seems to have a wider dtype than "
                f"{self._dtype}",
                hints=[f'set dtype = "{wider}"'],
                key="dtype",
            )

    def _reject(self, token: int, place: int) -> NoReturn:
        size = getattr(self, "vocab_size", None)
        what = f"but vocab_size is {size}" if size else "which no vocabulary has"
        larger = f"set vocab_size of the data and of the model to {token + 1} or more"
        raise UsageError(
            f"{self._path} contains the token {token}, {what}; it is at position {place:,}",
            hints=[larger if 0 <= token < _LARGEST else "check the option `dtype`"],
        )
