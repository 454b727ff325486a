"""Record of a training script's first steps, as files in a folder; and fingerprints of batches."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

__all__ = [
    *("INITIAL", "INPUTS", "RECORD", "ScriptRecord", "ScriptStep", "fingerprints", "joined", "norms_of_changes"),
    "rows_of",
]

RECORD, INITIAL, INPUTS = "record.json", "initial.safetensors", "inputs.pt"


@dataclass(frozen=True)
class ScriptStep:
    """One optimizer step of the script.

    Attributes:
        losses: Values on which the script called `backward()`, in their order.
        indices: Samples of the step; None if the script drew no indices, and no inputs were kept either.
        batch: Fingerprints of the rows of each input of the model, over all micro-batches.
        lr: Learning rate of the first parameter group.
        updates: Norm of the change of each parameter, by its name in the model.
    """

    losses: Sequence[float]
    indices: Sequence[int] | None
    batch: Sequence[Sequence[str]]
    lr: float
    updates: Mapping[str, float]


@dataclass(frozen=True)
class ScriptRecord:
    """Steps of the script; `problem` is the reason if they cannot be compared, else empty.

    Without a DataLoader (`has_inputs`), indices are rows of INPUTS, which has the model's inputs. `samples` is the
    length of the DataLoader's dataset.
    """

    steps: Sequence[ScriptStep]
    problem: str = ""
    has_inputs: bool = False
    samples: int | None = None

    def write(self, folder: Path) -> None:
        """Writes the record into a folder."""
        (folder / RECORD).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> ScriptRecord:
        """Reads the record in a folder; raises OSError if there is none."""
        found = json.loads((folder / RECORD).read_text())
        return cls(
            [ScriptStep(**one) for one in found["steps"]], found["problem"], found["has_inputs"], found["samples"]
        )


def fingerprints(inputs: Any) -> list[list[str]]:
    """Returns, for each tensor in the arguments of a model, one fingerprint for each row of its first dimension."""
    return [[_digest(row) for row in (tensor if tensor.dim() else [tensor])] for tensor in _tensors(inputs)]


def joined(batches: Sequence[Sequence[Sequence[str]]]) -> list[list[str]]:
    """Returns the fingerprints of the micro-batches of a step as those of one batch."""
    return [[digest for part in column for digest in part] for column in zip(*batches, strict=False)]


def norms_of_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, float]:
    """Returns the norm of the change of each tensor, in float64."""
    return {name: (after[name].double() - old.double()).norm().item() for name, old in before.items()}


def rows_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any] | None:
    """Returns the inputs of a forward pass as samples: tuples of rows, or dicts of rows; None if they have no rows.

    Inputs by position come as tuples, inputs by name as dicts.
    """
    values = {str(number): one for number, one in enumerate(args)} | dict(kwargs)
    tensors = {name: one.detach().cpu() for name, one in values.items() if isinstance(one, Tensor) and one.dim()}
    sizes = {len(one) for one in tensors.values()}
    if len(sizes) != 1 or (args and kwargs):
        return None
    rows = [{name: one[row].clone() for name, one in tensors.items()} for row in range(sizes.pop())]
    if not args:
        return rows
    return [tuple(row.values()) if len(row) > 1 else row["0"] for row in rows]


def _digest(row: Tensor) -> str:
    data = row.detach().cpu().contiguous()
    content = data.reshape(-1).view(torch.uint8) if data.numel() else data
    return blake2b(content.numpy().tobytes() + str(tuple(data.shape)).encode(), digest_size=8).hexdigest()


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for one in value.values():
            yield from _tensors(one)
    elif isinstance(value, list | tuple):
        for one in value:
            yield from _tensors(one)
