"""Dataset of tokens in a memory-mapped file: text of any size for language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ddpforge.builtin.datasets.files import InBatches
from ddpforge.errors import SetupError, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Tokens"]

Batch: TypeAlias = "tuple[Tensor, Tensor]"
"""Inputs and targets: int64, each [B, T]."""


class Tokens(InBatches):
    """Blocks of a file of token numbers: `.npy` (one dimension), or `.bin` (an array of plain numbers).

    With T for `block_size`, sample i is (tokens[i·T : i·T + T], tokens[i·T + 1 : i·T + T + 1]). A batch is (inputs
    [B, T], targets [B, T]), both int64. The file is memory-mapped: only fetched samples are read, and all processes of
    a machine share the memory.

    Raises:
        SetupError: The file does not exist.
        ValueError: The file is not one row of integers, or too short for a sample.
        UsageError: A fetched token is not in 0 to `vocab_size` - 1.
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

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.block_size

    def __getitems__(self, ids: list[int]) -> Batch:
        """Returns the batch of these samples; raises UsageError for a token outside of the vocabulary."""
        import numpy as np
        import torch

        blocks = [self._tokens[index * self.block_size :][: self.block_size + 1] for index in ids]
        tokens = np.stack(blocks).astype(np.int64)
        if (size := getattr(self, "vocab_size", None)) and not 0 <= tokens.min() <= tokens.max() < size:
            odd = tokens.max() if tokens.max() >= size else tokens.min()
            raise UsageError(
                f"{self._path} contains the token {odd}, but vocab_size is {size}",
                hints=[
                    f"set vocab_size of the data and of the model to {odd + 1} or more"
                    if odd >= 0
                    else "check the option `dtype`"
                ],
            )
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
            raise SetupError(f"no such file: {self._path}", hints=[f"looked in {Path.cwd()}"])
        if self._path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(self._path, mmap_mode="r", allow_pickle=False)
        else:
            item = np.dtype(self._dtype).itemsize
            if (size := self._path.stat().st_size) % item or not size:
                raise ValueError(f"{self._path} has {size} bytes, not a multiple of the {item} bytes of {self._dtype}")
            tokens = np.memmap(self._path, dtype=self._dtype, mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{self._path} contains {tokens.dtype} of shape {list(tokens.shape)}, not one row of integers"
            )
        return tokens
