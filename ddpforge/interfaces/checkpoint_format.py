"""Formats of weights and checkpoints of other programs: files and folders to tensors by name, and back.

A format is a class without arguments in the entry-point group `ddpforge.format`; the entry point has the format's name.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from ddpforge.errors import UsageError
from ddpforge.interfaces.regions import TensorShard
from ddpforge.interfaces.state import SavedTensor

if TYPE_CHECKING:
    from torch import Tensor

    Held = Tensor | list[TensorShard]
    Number = bool | int | float

__all__ = ["CheckpointFormat", "ForeignState"]


@dataclass(kw_only=True)
class ForeignState:
    """Tensors of another program's checkpoint by name, each whole or in parts.

    `kind` is the format in words. `optimizer` has the state of parameters by their names, `aliases` the other names of
    tied tensors. `left_out` describes the entries of the source that are skipped.
    """

    kind: str
    model: dict[str, Held]
    optimizer: dict[str, dict[str, Held | Number]] = field(default_factory=dict)
    aliases: dict[str, str] = field(default_factory=dict)
    step: int | None = None
    samples: int | None = None
    left_out: list[str] = field(default_factory=list)


class CheckpointFormat:
    """Format of weights or checkpoints. A method that a class does not define is not supported by the format."""

    def matches(self, path: Path) -> bool:
        """True if the file or folder is in this format. Must not read tensors."""
        return False

    def read(self, path: Path, *, trust: bool) -> ForeignState:
        """Reads a checkpoint for `ddpforge ckpt import`, into memory.

        `trust`: the user allows pickles, which can run any code. Raises UsageError for a source that is not valid.
        """
        raise UsageError(f"{path} cannot be imported: its format has only weights", hints=["use checkpoint.init_from"])

    def open(self, path: Path) -> Mapping[str, SavedTensor | Tensor]:
        """Returns the tensors for `checkpoint.init_from`, by name; a SavedTensor is read when it is needed.

        Called on every rank. Raises CheckpointError for a source that cannot be read.
        """
        raise UsageError(
            f"{path} cannot be used as it is", hints=["`ddpforge ckpt import` converts checkpoints of this format"]
        )

    def write(self, out: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str]) -> None:
        """Writes the file `out`, which does not exist, for `ddpforge export --format`.

        `tensors` reads a tensor each time it is looked up. `aliases` has the other names of tied tensors.
        """
        raise UsageError("this format cannot be written")
