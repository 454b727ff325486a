"""Streams a dataset from files. Each rank and each loader process reads only its own samples."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from ddpforge.interfaces import Data, ShardedDataset


class Records(ShardedDataset):
    """Streams images (float32) and their labels from files of records, which it first writes from the dataset `of`."""

    random = False

    def __init__(
        self,
        *,
        of: Data,
        folder: str,
        part: Annotated[int, Field(ge=1)] = 100,
        shuffle_buffer: Annotated[int, Field(ge=1)] = 16,
    ) -> None:
        samples = [torch.cat([image.flatten(), label[None].float()]).numpy() for image, label in of]
        self.files = [Path(folder) / f"{len(samples)}-{first:06d}.bin" for first in range(0, len(samples), part)]
        Path(folder).mkdir(parents=True, exist_ok=True)
        for number, file in enumerate(self.files):
            draft = file.with_suffix(f".{os.getpid()}")  # all ranks write; `rename` makes each file appear complete
            draft.write_bytes(np.stack(samples[number * part :][:part]).tobytes())
            draft.rename(file)
        self.values, self.shuffle, self.shuffle_buffer = len(samples[0]), True, shuffle_buffer
        self.shard_sizes = [file.stat().st_size // (4 * self.values) for file in self.files]

    def iter_shard(self, part: int, *, epoch: int, skip: int) -> Iterator[bytes]:
        with self.files[part].open("rb") as file:
            file.seek(skip * 4 * self.values)
            while record := file.read(4 * self.values):
                yield record

    def prepare(self, sample: bytes) -> tuple[Tensor, Tensor]:
        values = torch.frombuffer(bytearray(sample), dtype=torch.float32)
        return values[:-1].view(1, 8, 8), values[-1].long()
