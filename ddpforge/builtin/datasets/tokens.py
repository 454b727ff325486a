"""Tokens that are in a file already, mapped into memory: text of any size for language models."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeAlias

from pydantic import Field

from ddpforge.builtin.datasets.files import InBatches
from ddpforge.errors import EnvironmentProblem, UsageError

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from torch import Tensor

__all__ = ["Tokens"]

Batch: TypeAlias = "tuple[Tensor, Tensor]"
"""Inputs and targets: int64, each [B, T]."""


class Tokens(InBatches):
    """A file of token numbers in blocks: `.npy` (one dimension), or `.bin`, plain numbers one after the other.

    With T for `block_size`, sample i is (tokens[i·T : i·T + T], tokens[i·T + 1 : i·T + T + 1]); a batch is (inputs
    [B, T], targets [B, T]), both int64. The file is mapped, not read: only what is fetched comes into memory, and all
    processes of a machine share it.

    Raises EnvironmentProblem where there is no such file, and ValueError for one of another form, or too short for a
    sample; UsageError for a token that is not below `vocab_size`, when it is fetched.
    """

    random = False

    def __init__(
        self,
        *,
        path: Annotated[Path, Field(description="The file.")],
        block_size: Annotated[int, Field(ge=1, le=2**24, description="Tokens per sample.")] = 256,
        dtype: Annotated[
            Literal["uint8", "uint16", "uint32", "int32", "int64"], Field(description="Of a `.bin` file.")
        ] = "uint16",
        vocab_size: Annotated[
            int | None, Field(ge=2, le=2**31, description="Number of different tokens, to compare with the model.")
        ] = None,
    ) -> None:
        self._path, self._dtype, self.block_size = path, dtype, block_size
        if vocab_size is not None:
            self.vocab_size = vocab_size
        self._tokens = self._mapped()
        if len(self) < 1:
            raise ValueError(
                f"{path} holds {len(self._tokens)} tokens; one sample of block_size = {block_size} needs"
                f" {block_size + 1}"
            )

    def __len__(self) -> int:
        return (len(self._tokens) - 1) // self.block_size

    def __getitems__(self, ids: list[int]) -> Batch:
        """The whole batch at once."""
        import numpy as np
        import torch

        blocks = [self._tokens[index * self.block_size :][: self.block_size + 1] for index in ids]
        tokens = np.stack(blocks).astype(np.int64)
        if (size := getattr(self, "vocab_size", None)) and not 0 <= tokens.min() <= tokens.max() < size:
            odd = tokens.max() if tokens.max() >= size else tokens.min()
            raise UsageError(
                f"{self._path} holds the token {odd}, and vocab_size is {size}",
                hints=[
                    f"set vocab_size of the data and of the model to {odd + 1} or more" if odd >= 0 else "see `dtype`"
                ],
            )
        found = torch.from_numpy(tokens)
        return found[:, :-1].contiguous(), found[:, 1:].contiguous()

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_tokens": None}  # mapped again by the process that it is sent to

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._tokens = self._mapped()

    def _mapped(self) -> NDArray[Any]:
        import numpy as np

        if not self._path.is_file():
            raise EnvironmentProblem(f"no such file: {self._path}", hints=[f"looked in {Path.cwd()}"])
        if self._path.suffix == ".npy":
            tokens: NDArray[Any] = np.load(self._path, mmap_mode="r", allow_pickle=False)
        else:
            item = np.dtype(self._dtype).itemsize
            if (size := self._path.stat().st_size) % item or not size:
                raise ValueError(f"{self._path} has {size} bytes, which are no {self._dtype} numbers of {item} bytes")
            tokens = np.memmap(self._path, dtype=self._dtype, mode="r")
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(
                f"{self._path} holds {tokens.dtype} of shape {list(tokens.shape)}, not one row of integers"
            )
        return tokens
