"""Small datasets, and fitting sets of model, data and task, for tests of components if their author names none."""

from __future__ import annotations

from typing import Annotated, Any

import torch
from pydantic import Field
from torch import Tensor, nn

from ddpforge.builtin.tasks.classification import Classification
from ddpforge.interfaces import World

__all__ = ["COUNTED", "DEFAULTS", "ImageData", "TokenData", "VectorData", "candidates"]

_Count = Annotated[int, Field(ge=1, le=2**20, description="Number of them.")]


class _Held:
    """Samples in memory, random from a fixed seed."""

    random = False
    inputs_: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs_[index], self.targets[index]


class VectorData(_Held):
    """Vectors of `inputs` numbers; the target is one number, or with `classes` a class. 40 samples."""

    def __init__(self, *, inputs: _Count = 4, classes: int = 0, samples: _Count = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs_ = torch.randn(samples, inputs, generator=generator)
        self.targets = self.inputs_.sum(1, keepdim=True)
        if classes:
            self.classes = classes
            self.targets = torch.randint(classes, (samples,), generator=generator)


class ImageData(_Held):
    """Images of noise; the target is one of `classes`. 40 samples."""

    def __init__(
        self, *, channels: _Count = 3, pixels: _Count = 32, classes: _Count = 10, samples: _Count = 40
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.classes = classes
        self.inputs_ = torch.rand(samples, channels, pixels, pixels, generator=generator)
        self.targets = torch.randint(classes, (samples,), generator=generator)


class TokenData(_Held):
    """Random tokens; the target of each is the next one. 40 samples."""

    def __init__(self, *, vocab_size: _Count = 16, block_size: _Count = 8, samples: _Count = 40) -> None:
        generator = torch.Generator().manual_seed(1)
        tokens = torch.randint(vocab_size, (samples, block_size + 1), generator=generator)
        self.vocab_size, self.block_size = vocab_size, block_size
        self.inputs_, self.targets = tokens[:, :-1], tokens[:, 1:]


class Counting(Classification):
    """Classification that counts the samples of a batch, as tasks of tokens do, and gathers logits over ranks.

    It adds the mean over ranks of all squared logits to the loss, which is the same for any number of ranks.
    """

    def start(self, model: nn.Module, world: World) -> None:
        """Stores the data-parallel ranks."""
        self._ranks = world.dp_ranks

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Returns the cross-entropy plus a term with gradients that flow through other ranks."""
        loss, logits = super().loss(model, batch)
        everyones, _ = self._ranks.all_gather(logits.float())
        return loss + 0.01 * everyones.square().sum() / self._ranks.size, logits

    def count(self, batch: Any) -> Tensor:
        """Returns the number of samples (float64, 0-d)."""
        return torch.tensor(float(len(batch[1])), dtype=torch.float64)


_HERE = "ddpforge.testing.fixtures"
_CLASSES = {"use": "classification", "metrics": ["accuracy"]}

COUNTED = {"use": f"{_HERE}:Counting", "metrics": ["accuracy"]}
"""Task for tests of strategies, which must sum its counts and run its gathers over ranks."""

DEFAULTS: dict[str, Any] = {
    "model": {"use": "mlp", "inputs": 64, "outputs": 10, "hidden": [8]},
    "data": {"use": f"{_HERE}:ImageData", "channels": 1, "pixels": 8},
    "task": _CLASSES,
    "optimizer": {"use": "sgd", "lr": 0.05, "momentum": 0.9},
    "schedule": {"use": "constant"},
    "strategy": {"use": "ddp"},
}
"""Defaults for the recipe's sections that the author does not set."""


def candidates(model: Any = None) -> list[dict[str, Any]]:
    """Returns fitting sets of model, data and task; the data fits `model`'s attributes (`inputs`, `vocab_size`, …)."""
    inputs, outputs = _attribute(model, "inputs", 4), _attribute(model, "outputs", 10)
    vocabulary, block = _attribute(model, "vocab_size", 16), min(16, _attribute(model, "block_size", 8))
    images = [
        {
            "model": {"use": "mlp", "inputs": channels * pixels**2, "outputs": outputs, "hidden": [8]},
            "data": {"use": f"{_HERE}:ImageData", "channels": channels, "pixels": pixels, "classes": outputs},
            "task": _CLASSES,
        }
        for channels, pixels in ((1, 8), (3, 32))
    ]
    tokens = {
        "model": {"use": "gpt", "vocab_size": 16, "block_size": 8, "layers": 1, "heads": 1, "width": 8},
        "data": {"use": f"{_HERE}:TokenData", "vocab_size": vocabulary, "block_size": block},
        "task": {"use": "language_modeling"},
    }
    classes = {
        "model": {"use": "mlp", "inputs": inputs, "outputs": outputs, "hidden": [8]},
        "data": {"use": f"{_HERE}:VectorData", "inputs": inputs, "classes": outputs},
        "task": _CLASSES,
    }
    numbers = {
        "model": {"use": "mlp", "inputs": inputs, "outputs": 1, "hidden": [8]},
        "data": {"use": f"{_HERE}:VectorData", "inputs": inputs},
        "task": {"use": "regression", "metrics": ["mae"]},
    }
    found = [images[0], tokens, classes, numbers, images[1]]
    return [tokens, *found] if hasattr(model, "vocab_size") else found


def _attribute(model: Any, name: str, default: int) -> int:
    value = getattr(model, name, default)
    return value if isinstance(value, int) and value > 0 else default
